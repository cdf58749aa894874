"""Blocks of host tensors through the C interface: saved, and loaded from host memory, from the disk and from a pool on this host, beside
what the machine gives, and beside LMCache and the disk tier of vLLM's own offloading where they can be had.

    cargo build --profile capi -p kvstore-capi
    python3 bench/peers/kv/compare.py target/capi/libkvasir_kv.so [--kvasir target/release/kvasir] [--lmcache FOLDER]
        [--vllm-python PYTHON] [--folder DIR] [--sizes 64,256,1024,8192] [--mebibytes 256] [--rounds 5] [--smoke]

Sizes are KiB of a block; a transfer moves all blocks of a round at once. GB/s of blocks from the submission to the completion, GB for each
second of processor time of this process, how often the process reads each byte for a checksum (a copy that is summed on the way counts), and
the rate as a share of the limit, which is measured in turn: one thread's memcpy for memory, four threads that read as many bytes past the
page cache for the disk. Medians of the rounds. Every block is compared with what was saved before it is timed. The pool is a process of its
own (`kvasir store`), whose processor time is not counted. The peers run as their scripts say (lmcache_side.py, vllm_side.py). LMCache's
packages, in a folder, for a Python with torch (--lmcache-python):
    pip install --target FOLDER --no-deps lmcache==0.5.6 sortedcontainers==2.4.0 aiofile==3.12.3 caio==0.12.10
"""

import argparse
import concurrent.futures
import ctypes
import json
import mmap
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2] / "kvstore" / "capi" / "python"))
from kvasir_kv.library import Library, Memory, Operation, Plane, Store  # noqa: E402

READERS = 4
PIECE = 1 << 20
WARM_UP = 11


class Tensors:
    """Blocks in host memory, one after the other; all of it is touched."""

    def __init__(self, blocks, block_bytes, seed=None):
        self.blocks, self.block_bytes = blocks, block_bytes
        self.memory = mmap.mmap(-1, blocks * block_bytes)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        if seed is None:
            ctypes.memset(self.start, 0x5A, len(self.memory))
        else:
            page = os.urandom(1 << 20)
            for at in range(0, len(self.memory), len(page)):
                part = page[: len(self.memory) - at]
                self.memory[at : at + len(part)] = part
            for block in range(blocks):
                self.memory[block * block_bytes : block * block_bytes + 8] = (seed << 32 | block).to_bytes(8, "little")

    def register(self, store):
        return store.register([Plane(self.start, self.block_bytes, self.block_bytes)], self.blocks, Memory.HOST)


class Bench:
    def __init__(self, options, block_bytes):
        self.options, self.block_bytes = options, block_bytes
        self.blocks = max(options.mebibytes * (1 << 20) // block_bytes, 2)
        self.bytes = self.blocks * block_bytes
        self.source, self.target = Tensors(self.blocks, block_bytes, seed=1), Tensors(self.blocks, block_bytes)
        self.library = Library(options.library)
        self.numbers = 0

    def open(self, host_bytes, more=""):
        slot = self.block_bytes + 4096
        text = f'[store]\nslot = "{self.block_bytes} B"\n[host_tier]\ncapacity = "{max(host_bytes // self.block_bytes, 2) * slot} B"\n{more}'
        return Store.open(self.library, text)

    def names(self, generation):
        return b"".join((generation << 64 | block).to_bytes(16, "little") for block in range(self.blocks))

    def move(self, store, operation, tensors, generation):
        """Moves all blocks; how many were moved."""
        self.numbers += 1
        chain = (0, None) if operation == Operation.SAVE else None
        assert store.submit(self.numbers, operation, tensors, self.names(generation), range(self.blocks), 0, chain)
        return self.end(store)

    def end(self, store):
        while True:
            for completion in store.poll(timeout_ms=60_000):
                assert completion.user == self.numbers and not completion.failure, completion
                return completion.blocks

    def timed(self, work):
        began, used = time.perf_counter(), time.process_time()
        assert work() == self.blocks, "not all blocks were moved"
        return self.bytes / (time.perf_counter() - began) / 1e9, self.bytes / max(time.process_time() - used, 1e-9) / 1e9

    def memcpy(self):
        began = time.perf_counter()
        ctypes.memmove(self.target.start, self.source.start, self.bytes)
        return self.bytes / (time.perf_counter() - began) / 1e9

    def check(self):
        assert self.target.memory[:] == self.source.memory[:], "other bytes came back"
        ctypes.memset(self.target.start, 0x5A, self.bytes)

    def row(self, what, store, rounds, limit):
        """`rounds` gives a round's work, untimed preparation included in the making of it."""
        rates, shares, passes = [], [], []
        for round in range(self.options.rounds):
            work = rounds(round)
            alone = limit()
            before = store.statistics()["checksummed_bytes"]
            rates.append(self.timed(work))
            passes.append((store.statistics()["checksummed_bytes"] - before) / self.bytes)
            shares.append(rates[-1][0] / alone)
        rate, per_second = (statistics.median(column) for column in zip(*rates))
        share = statistics.median(shares)
        spread = f"{min(shares):.2f}-{max(shares):.2f}"
        print(f"  {self.block_bytes >> 10:>5} KiB  {what:<22} {rate:7.2f} GB/s  {per_second:6.2f} GB/CPU s  {statistics.median(passes):5.2f} checksums  {share:5.2f} of the limit ({spread})", flush=True)
        return {"block_kib": self.block_bytes >> 10, "what": what, "gb_per_s": rate, "gb_per_cpu_s": per_second, "share": share, "checksums": statistics.median(passes)}

    def host(self):
        with self.open(2 * self.bytes + (64 << 20)) as store:
            source, target = self.source.register(store), self.target.register(store)
            assert self.move(store, Operation.SAVE, source, 0) == self.blocks
            assert self.move(store, Operation.LOAD, target, 0) == self.blocks
            self.check()
            # The memory of all slots is there.
            for generation in (1, 2, 3):
                assert self.move(store, Operation.SAVE, source, generation) == self.blocks
            yield self.row("saved", store, lambda round: lambda: self.move(store, Operation.SAVE, source, 4 + round), self.memcpy)
            generation = 3 + self.options.rounds
            yield self.row("loaded, host memory", store, lambda _: lambda: self.move(store, Operation.LOAD, target, generation), self.memcpy)

    def disk(self):
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.options.folder))
        try:
            yield from self.disk_in(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def disk_in(self, folder):
        segment = 64 << 20
        capacity = (2 * self.blocks * (self.block_bytes + 8192) // segment + 2) * segment
        few = max(self.bytes // 8, 12 * self.block_bytes)
        disk = f'[disk_tier]\ncapacity = "{capacity} B"\nsegment = "{segment} B"\npath = "{folder}/tier"\n'
        with self.open(few, disk) as store:
            source, target = self.source.register(store), self.target.register(store)
            for block in range(0, self.blocks, 4):
                # A few at a time: host memory has fewer than all.
                some = range(block, min(block + 4, self.blocks))
                names = self.names(7)[16 * some.start : 16 * some.stop]
                self.numbers += 1
                parent = self.names(7)[16 * (block - 1) : 16 * block] if block else None
                assert store.submit(self.numbers, Operation.SAVE, source, names, some, 0, (block, parent))
                assert self.end(store) == len(some)
                # New blocks that host memory has no room for are gone before the disk has them.
                deadline = time.monotonic() + 60
                while store.statistics()["disk_written"] < some.stop:
                    assert time.monotonic() < deadline, store.statistics()
                    time.sleep(0.0005)
            assert self.move(store, Operation.LOAD, target, 7) == self.blocks
            self.check()
            plain = folder / "plain"
            plain.write_bytes(self.source.memory[:])
            before = store.statistics()["disk_read"]
            row = self.row("loaded, disk", store, lambda _: lambda: self.move(store, Operation.LOAD, target, 7), lambda: self.plain_reads(plain))
            from_disk = (store.statistics()["disk_read"] - before) / self.options.rounds / self.blocks
            assert from_disk > 0.5 or self.options.smoke, f"{from_disk:.2f} of the blocks came from the disk"
            yield row

    def plain_reads(self, path):
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            size, piece = os.path.getsize(path), min(PIECE, max(self.block_bytes, 4096))

            def read(reader):
                buffer, done = mmap.mmap(-1, piece), 0
                for at in range(reader * piece, size, READERS * piece):
                    done += os.preadv(file, [buffer], at)
                return done

            began = time.perf_counter()
            with concurrent.futures.ThreadPoolExecutor(READERS) as threads:
                assert sum(threads.map(read, range(READERS))) == size
            return size / (time.perf_counter() - began) / 1e9
        finally:
            os.close(file)

    def pool(self):
        if not self.options.kvasir:
            return
        folder = pathlib.Path(tempfile.mkdtemp())
        configuration = folder / "pool.toml"
        slot = -(-(self.block_bytes + 8192) // 4096) * 4
        configuration.write_text(
            f'[store]\nname = "bench"\npool = "{10 * self.bytes >> 20} MiB"\nslot = "{slot} KiB"\nresp = []\nlisten = "127.0.0.1:0"\n'
            f'http = "127.0.0.1:0"\n[transfer]\ntransport = "shm"\nsocket_folder = "{folder}"\n')
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen([self.options.kvasir, "store", "--config", configuration], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            address = folder / "kvasir-bench-pool.sock"
            while not address.exists():
                assert process.poll() is None, (folder / "log").read_text()
                time.sleep(0.05)
            yield from self.pool_at(address)
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)

    def pool_at(self, address):
        far = f'[remote_tier]\nnodes = ["bench=shm:{address}"]\ndeadline = "30s"\n'
        with self.open(2 * self.bytes + (64 << 20), far) as one, self.open(2 * self.bytes + (64 << 20), far) as two:
            source, target = self.source.register(one), self.target.register(two)
            two.observe_prefill(1000, 0, 100.0)

            def prepare(round):
                generation = 100 + WARM_UP + round
                assert self.move(one, Operation.SAVE, source, generation) == self.blocks
                # The blocks by which the connection was tried count as well.
                wanted = (round + 2 + WARM_UP) * self.blocks
                deadline = time.monotonic() + 60
                while one.statistics()["far_written"] < wanted:
                    assert time.monotonic() < deadline, one.statistics()
                    time.sleep(0.005)
                return lambda: self.fetch_and_load(two, target, generation)

            # A store has nothing from a pool as long as its connection to it is being made.
            assert self.move(one, Operation.SAVE, source, 99) == self.blocks
            deadline = time.monotonic() + 60
            while one.statistics()["far_written"] < self.blocks or self.fetched(two, 99) != self.blocks:
                assert time.monotonic() < deadline, (one.statistics(), two.statistics())
                time.sleep(0.05)
            # The memory of all slots is there after some rounds, here and in the pool.
            for round in range(-WARM_UP, 0):
                assert prepare(round)() == self.blocks
                self.check()
            yield self.row("fetched and loaded", two, prepare, self.memcpy)

    def fetched(self, store, generation):
        self.numbers += 1
        assert store.fetch(self.numbers, self.names(generation), 0)
        return self.end(store)

    def fetch_and_load(self, store, target, generation):
        assert self.fetched(store, generation) == self.blocks, "not all blocks came from the pool"
        return self.move(store, Operation.LOAD, target, generation)


def peer(name, python, script, options, environment=None):
    """A peer's rows, by its script, in an environment that has it."""
    command = [python, str(HERE / script), "--sizes", options.sizes, "--mebibytes", str(options.mebibytes), "--rounds", str(options.rounds),
               "--folder", options.folder]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | (environment or {}))
    if ended.returncode != 0:
        return print(f"SKIPPED {name}: {(ended.stderr.strip().splitlines() or ['it failed'])[-1]}")
    for row in (json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")):
        print(f"  {row['block_kib']:>5} KiB  {row['what']:<22} {row['gb_per_s']:7.2f} GB/s  {row['gb_per_cpu_s']:6.2f} GB/CPU s  ({name})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--kvasir", default="")
    parser.add_argument("--lmcache", default="", help="a folder with LMCache's packages")
    parser.add_argument("--lmcache-python", default=sys.executable)
    parser.add_argument("--vllm-python", default="", help="a Python that has vLLM")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--sizes", default="64,256,1024,8192")
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.sizes, options.mebibytes, options.rounds = "64,1024", 8, 1
    for size in map(int, options.sizes.split(",")):
        bench = Bench(options, size << 10)
        for rows in (bench.host, bench.disk, bench.pool):
            for _ in rows():
                pass
    if options.lmcache:
        peer("LMCache", options.lmcache_python, "lmcache_side.py", options, {"PYTHONPATH": options.lmcache})
    if options.vllm_python:
        peer("vLLM", options.vllm_python, "vllm_side.py", options)
    print("ok: all blocks came back as they were saved")


if __name__ == "__main__":
    main()
