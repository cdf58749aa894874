"""The C interface on tensors in a GPU's memory, beside one copy of the same bytes between the GPU and pinned host memory.

    cargo build --profile capi -p kvstore-capi
    python3 bench/peers/gpu/store.py target/capi/libkvasir_kv.so

Blocks of an engine's paged tensors (vLLM's shape: a tensor of each layer, keys and values before blocks) are saved into the
store's host memory and loaded into other tensors, as one transfer of so many blocks. A save is of new blocks, a load is of
blocks that host memory has. The unit is GB/s of blocks, from the submission to the completion by the host's clock, and as a
share of one `cudaMemcpyAsync` of as many bytes in the same round: the two in turn, median (least-most) of the rounds.
Everything that is loaded is compared with what was saved before it is timed.
`--smoke` runs tiny shapes once. Exit code 77: no torch, or no CUDA device that it can use.
"""

import argparse
import itertools
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../kvstore/capi/python"))
from kvasir_kv.library import Library, Memory, Operation, Store  # noqa: E402
from kvasir_kv.planes import layout  # noqa: E402

TOKENS = 16
# name, layers, shape of a block in a layer's tensor, whether keys and values are before blocks
MODELS = [
    ("llama-3-8b", 32, (TOKENS, 8, 128), True),
    ("llama-3-70b", 80, (TOKENS, 8, 128), True),
    ("deepseek latent", 61, (TOKENS, 576), False),
]


def torch_with_cuda():
    try:
        import torch
    except ImportError as error:
        print(f"SKIPPED: no torch: {error}")
        sys.exit(77)
    if not torch.cuda.is_available():
        print("SKIPPED: torch finds no CUDA device")
        sys.exit(77)
    return torch


class Case:
    """A store, the tensors that blocks are saved from and loaded to, and a pinned buffer of as many bytes."""

    def __init__(self, torch, library, model, blocks, staging):
        _, layers, inner, has_parts = model
        self.torch = torch
        self.blocks = blocks
        shape = (2, blocks, *inner) if has_parts else (blocks, *inner)
        make = lambda: {
            f"layer {layer}": torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for layer in range(layers)
        }
        self.source, self.target = make(), make()
        source, target = layout(self.source, blocks), layout(self.target, blocks)
        self.bytes = source.block_bytes * blocks
        slot = -(-source.block_bytes // 4096) * 4
        self.store = Store.open(
            library,
            f'[store]\nslot = "{slot} KiB"\n[host_tier]\ncapacity = "{(slot + 4) * (3 * blocks + 8)} KiB"\n'
            f'eviction = "lru"\n[device]\nstaging = "{staging}"\n',
        )
        self.places = [self.store.register(one.planes, blocks, Memory.CUDA) for one in (source, target)]
        self.names = itertools.count(1)
        self.saved = b""
        self.host = torch.empty(self.bytes, dtype=torch.uint8, pin_memory=True)
        self.flat = torch.empty(self.bytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()

    def close(self):
        for place in self.places:
            self.store.unregister(place)
        self.store.close()

    def transfer(self, operation, place, identities):
        assert self.store.submit(1, operation, place, identities, range(self.blocks))
        while not (ends := self.store.poll(-1)):
            pass
        assert (ends[0].status, ends[0].blocks) == (0, self.blocks), ends

    def save(self):
        first = next(self.names) << 32
        self.saved = b"".join((first + at).to_bytes(16, "little") for at in range(self.blocks))
        self.transfer(Operation.SAVE, self.places[0], self.saved)

    def load(self):
        self.transfer(Operation.LOAD, self.places[1], self.saved)

    def to_host(self):
        self.host.copy_(self.flat, non_blocking=True)
        self.torch.cuda.synchronize()

    def to_device(self):
        self.flat.copy_(self.host, non_blocking=True)
        self.torch.cuda.synchronize()

    def check(self):
        self.save()
        self.load()
        for name, tensor in self.source.items():
            assert self.torch.equal(tensor, self.target[name]), name


def seconds(work, passes):
    start = time.perf_counter()
    for _ in range(passes):
        work()
    return (time.perf_counter() - start) / passes


def compare(case, work, limit, rounds, least_seconds):
    passes = max(1, min(200, int(least_seconds / max(seconds(limit, 1), 1e-6))))
    rates, ratios, alone = [], [], []
    for number in range(rounds):
        spent = [0.0, 0.0]
        for at in (number % 2, 1 - number % 2):
            spent[at] = seconds((limit, work)[at], passes)
        rates.append(case.bytes / spent[1] / 1e9)
        ratios.append(spent[0] / spent[1])
        alone.append(case.bytes / spent[0] / 1e9)
    return (
        f"{statistics.median(rates):.1f} GB/s = {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) "
        f"of one pinned copy ({statistics.median(alone):.1f} GB/s)"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library", help="libkvasir_kv.so")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--staging", default="64 MiB", help="device.staging of the store")
    arguments = parser.parse_args()
    torch = torch_with_cuda()
    library = Library(arguments.library)
    print(f"# the C interface on {torch.cuda.get_device_name()}, staging {arguments.staging}")
    for model in MODELS:
        if arguments.smoke:
            model = (model[0], 2, *model[2:])
        for blocks in (1, 4) if arguments.smoke else (1, 64, 512):
            case = Case(torch, library, model, blocks, arguments.staging)
            case.check()
            rounds, least = (1, 0.0) if arguments.smoke else (arguments.rounds, 0.05)
            for word, work, limit in (("save", case.save, case.to_host), ("load", case.load, case.to_device)):
                said = compare(case, work, limit, rounds, least)
                print(f"store {word} {model[0]} x {blocks} ({case.bytes / 2**20:.0f} MiB): {said}", flush=True)
            statistics_ = case.store.statistics()
            assert statistics_["damaged"] == 0 and statistics_["throttled"] == 0, statistics_
            case.close()


if __name__ == "__main__":
    main()
