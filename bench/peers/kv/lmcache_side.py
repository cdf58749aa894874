"""LMCache's side of compare.py: blocks into its host memory, out of it, and from its disk, by its in-process `StorageManager` without a GPU.

    lmcache_side.py [--sizes 64,256,1024,8192] [--mebibytes 256] [--rounds 5] [--folder DIR]

Written for 0.5.6, of which nothing is stubbed: the calls are those that its engine makes to store and retrieve, where the copies would be a
GPU's. Blocks are copied in and out by one thread of torch. The disk is read past the page cache (`use_odirect`), as ours is, into LMCache's memory and
from there to where they are wanted. Neither side calls fsync here. A line of JSON for each row.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
import torch  # noqa: E402
from lmcache.utils import CacheEngineKey  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.event_manager import EventManager  # noqa: E402
from lmcache.v1.memory_management import MemoryFormat  # noqa: E402
from lmcache.v1.metadata import LMCacheMetadata  # noqa: E402
from lmcache.v1.storage_backend.storage_manager import StorageManager  # noqa: E402

LAYERS, HIDDEN = 4, 1024
TOKEN_BYTES = 2 * LAYERS * HIDDEN * 2
MEMORY, DISK = "LocalCPUBackend", "LocalDiskBackend"


class Side:
    def __init__(self, block_bytes, blocks, folder):
        self.shape = torch.Size([2, LAYERS, block_bytes // TOKEN_BYTES, HIDDEN])
        self.bytes, self.blocks = block_bytes * blocks, blocks
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=True, max_local_cpu_size=(2 * self.bytes + (64 << 20)) / (1 << 30), chunk_size=256,
            **({"local_disk": folder, "max_local_disk_size": 1024.0} if folder else {}),
            extra_config={"use_odirect": True, "disk_io_threads": 4})
        metadata = LMCacheMetadata(
            model_name="bench", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0, kv_dtype=torch.bfloat16,
            kv_shape=(LAYERS, 2, 256, 8, HIDDEN // 8), role="worker")
        self.manager = StorageManager(config, metadata, EventManager())
        self.memory, self.disk = (self.manager.storage_backends.get(name) for name in (MEMORY, DISK))
        self.memory.memory_allocator.buffer.fill_(0)
        self.source = [torch.randint(-(2**15), 2**15, self.shape, dtype=torch.int16).view(torch.bfloat16) for _ in range(blocks)]
        self.target = [torch.zeros(self.shape, dtype=torch.bfloat16) for _ in range(blocks)]

    def keys(self, generation):
        return [CacheEngineKey("bench", 1, 0, generation << 32 | block, torch.bfloat16) for block in range(self.blocks)]

    def put(self, generation):
        objects = []
        for block in self.source:
            held = self.manager.allocate(block.shape, block.dtype, fmt=MemoryFormat.KV_2LTD, busy_loop=False)
            held.tensor.copy_(block)
            objects.append(held)
        self.manager.batched_put(self.keys(generation), objects)

    def get(self, generation, location):
        for held, target in zip(self.manager.batched_get(self.keys(generation), location=location), self.target):
            target.copy_(held.tensor)
            held.ref_count_down()

    def settle(self):
        while self.disk.disk_worker.put_tasks:
            time.sleep(0.005)

    def clear(self, generation, backends):
        for key in self.keys(generation):
            for backend in backends:
                backend.remove(key)

    def check(self):
        for source, target in zip(self.source, self.target):
            assert torch.equal(source.view(torch.int16), target.view(torch.int16)), "other bytes came back"
            target.zero_()

    def row(self, what, rounds, work, prepare=lambda round: None):
        rates = []
        for round in range(rounds):
            prepare(round)
            began, used = time.perf_counter(), time.process_time()
            work(round)
            rates.append((self.bytes / (time.perf_counter() - began) / 1e9, self.bytes / max(time.process_time() - used, 1e-9) / 1e9))
        rate, per_second = (statistics.median(column) for column in zip(*rates))
        block_kib = self.bytes // self.blocks >> 10
        print(json.dumps({"block_kib": block_kib, "what": what, "gb_per_s": rate, "gb_per_cpu_s": per_second}), flush=True)


def run(block_bytes, mebibytes, rounds, folder):
    blocks = max(mebibytes * (1 << 20) // block_bytes, 2)
    side = Side(block_bytes, blocks, None)
    side.put(0)
    side.get(0, MEMORY)
    side.check()
    side.row("saved", rounds, lambda round: side.put(1 + round), lambda round: side.clear(round, [side.memory]))
    side.row("loaded, host memory", rounds, lambda _: side.get(rounds, MEMORY))
    side.check()
    folder = tempfile.mkdtemp(dir=folder)
    try:
        side = Side(block_bytes, blocks, folder)
        side.put(0)
        side.settle()
        side.row("loaded, disk", rounds, lambda _: side.get(0, DISK), lambda _: side.clear(0, [side.memory]))
        side.check()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="64,256,1024,8192")
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    torch.set_num_threads(1)
    for size in map(int, options.sizes.split(",")):
        run(size << 10, options.mebibytes, options.rounds, options.folder)


if __name__ == "__main__":
    main()
    # Its threads do not end by themselves.
    os._exit(0)
