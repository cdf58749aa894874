"""The side of vLLM's own offloading in compare.py: blocks from its file system tier, by that tier's functions and threads.

    vllm_side.py [--sizes 64,256,1024,8192] [--mebibytes 256] [--rounds 5] [--folder DIR]

Written for 0.32.0. Its host memory tier runs on GPUs alone (`CPUOffloadingSpec.get_worker` refuses others), so there are no rows of host memory.
The file system tier reads blocks past the page cache into that memory; here they stay there, where our side copies them on into the
engine's tensors and verifies them. A job of the tier is one thread's: 16 jobs are submitted at a time, one for each of its threads. A line
of JSON for each row.
"""

import argparse
import json
import mmap
import os
import pathlib
import shutil
import statistics
import tempfile
import time

from vllm.v1.kv_offload.tiering.fs.io import batch_load_block, batch_store_block
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

THREADS = 16


def run(block_bytes, mebibytes, rounds, folder):
    blocks = max(mebibytes * (1 << 20) // block_bytes, 2)
    memory = mmap.mmap(-1, 2 * blocks * block_bytes)
    view = memoryview(memory)
    page = os.urandom(1 << 20)
    source_bytes = blocks * block_bytes
    for at in range(0, source_bytes, len(page)):
        memory[at : at + len(page)] = page[: source_bytes - at]
    for block in range(blocks):
        memory[block * block_bytes : block * block_bytes + 8] = block.to_bytes(8, "little")
    pool = DualQueueThreadPool(THREADS, THREADS)
    paths = [str(folder / f"{block:08x}.bin") for block in range(blocks)]
    parts = [range(part, blocks, THREADS) for part in range(min(THREADS, blocks))]
    numbers = iter(range(1 << 30))

    def move(function, enqueue, first_offset):
        for part in parts:
            of_part = [paths[block] for block in part]
            offsets = [first_offset + block * block_bytes for block in part]
            enqueue(next(numbers), 1, [lambda paths=of_part, offsets=offsets: function(paths, view, offsets, block_bytes, True)])
        left = len(parts)
        while left:
            for _, is_done, _ in pool.get_finished():
                assert is_done, "a job failed"
                left -= 1
            time.sleep(0.0002)

    move(batch_store_block, pool.enqueue_store, 0)
    rates = []
    for _ in range(rounds):
        began, used = time.perf_counter(), time.process_time()
        move(batch_load_block, pool.enqueue_load, source_bytes)
        rates.append((source_bytes / (time.perf_counter() - began) / 1e9, source_bytes / max(time.process_time() - used, 1e-9) / 1e9))
    assert memory[:source_bytes] == memory[source_bytes : 2 * source_bytes], "other bytes came back"
    rate, per_second = (statistics.median(column) for column in zip(*rates))
    print(json.dumps({"block_kib": block_bytes >> 10, "what": "loaded, disk", "gb_per_s": rate, "gb_per_cpu_s": per_second}), flush=True)
    pool.shutdown(wait=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="64,256,1024,8192")
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    for kib in (int(size) for size in options.sizes.split(",")):
        folder = pathlib.Path(tempfile.mkdtemp(dir=options.folder))
        try:
            run(kib << 10, options.mebibytes, options.rounds, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
