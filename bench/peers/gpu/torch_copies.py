"""PyTorch on the shapes of `kvasir bench gpu`: what an engine would write without kernels of its own.

Both, one after the other, on the same machine:
    cargo run --release -p bench -- gpu; python3 bench/peers/gpu/torch_copies.py

Gather is `index_select` of a layer's blocks into the slots, scatter `index_copy_` of the slots into a layer's blocks, a call
for each layer and part; HND needs a transposing copy beside it. The unit is that of `bench gpu`: GB/s read and written, as
a share of one copy of as many bytes within the device, the two in turn, median (least-most) of the rounds. Times are those of
CUDA events around as many passes as take 20 ms. Results are compared with a plain loop before they are timed.
`--smoke` runs tiny shapes once. `--device cpu` runs them on the processor, by its clock: that proves this script and measures
nothing of a GPU. Exit code 77: no torch, or no device that it can use.
"""

import argparse
import statistics
import sys
import time

TOKENS = 16
# name, layers, parts, heads, head_dim, order of a block
MODELS = [
    ("llama-3-70b nhd", 80, 2, 8, 128, "nhd"),
    ("llama-3-70b hnd", 80, 2, 8, 128, "hnd"),
    ("deepseek latent", 61, 1, 1, 576, "nhd"),
]


def load(device):
    try:
        import torch
    except ImportError as error:
        print(f"SKIPPED: no torch: {error}")
        sys.exit(77)
    if device == "cuda" and not torch.cuda.is_available():
        print("SKIPPED: torch finds no CUDA device")
        sys.exit(77)
    return torch


class Case:
    """Tensors of every layer and part, slots, and the block of each slot."""

    def __init__(self, torch, device, model, blocks):
        _, layers, parts, heads, head_dim, order = model
        self.torch = torch
        self.device = device
        self.order = order
        inner = (TOKENS, heads, head_dim) if order == "nhd" else (heads, TOKENS, head_dim)
        make = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        self.planes = [make(blocks, *inner) for _ in range(layers * parts)]
        self.slots = make(blocks, layers * parts, TOKENS, heads, head_dim)
        self.blocks = torch.randperm(blocks, device=device)
        # What index_select and index_copy_ take as their other side is one piece.
        self.piece = torch.empty((blocks, *inner), dtype=torch.bfloat16, device=device)
        self.flat = torch.empty_like(self.slots)
        self.bytes = self.slots.numel() * self.slots.element_size()

    def slot(self, plane):
        """A plane of every slot, in the order of the engine's blocks."""
        view = self.slots[:, plane]
        return view if self.order == "nhd" else view.transpose(1, 2)

    def gather(self):
        for number, plane in enumerate(self.planes):
            self.torch.index_select(plane, 0, self.blocks, out=self.piece)
            self.slot(number).copy_(self.piece)

    def scatter(self):
        for number, plane in enumerate(self.planes):
            plane.index_copy_(0, self.blocks, self.slot(number))

    def copy(self):
        self.flat.copy_(self.slots)

    def check(self):
        torch = self.torch
        self.slots.zero_()
        self.gather()
        for number in (0, len(self.planes) - 1):
            for slot in (0, len(self.blocks) - 1):
                assert torch.equal(self.slot(number)[slot], self.planes[number][self.blocks[slot]])
        before = self.planes[0].clone()
        self.planes[0].zero_()
        self.scatter()
        assert torch.equal(self.planes[0], before)


def seconds(case, work, passes):
    if case.device == "cpu":
        start = time.perf_counter()
        for _ in range(passes):
            work()
        return (time.perf_counter() - start) / passes
    start, end = (case.torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(passes):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / passes


def compare(case, work, rounds, least_seconds):
    sides = [case.copy, work]
    # Each side as often as takes long enough: small blocks take torch a hundred times as long as a copy of them.
    passes = [1, 1]
    for at, side in enumerate(sides):
        side()
        while seconds(case, side, passes[at]) * passes[at] < least_seconds and passes[at] < 1 << 16:
            passes[at] *= 2
    rates, ratios = [], []
    for number in range(rounds):
        spent = [0.0, 0.0]
        for at in (number % 2, 1 - number % 2):
            spent[at] = seconds(case, sides[at], passes[at])
        rates.append(2 * case.bytes / spent[1] / 1e9)
        ratios.append(spent[0] / spent[1])
    return f"{statistics.median(rates):.1f} GB/s = {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--memory-gib", type=float, default=96, help="device memory for tensors, slots and a copy of them")
    arguments = parser.parse_args()
    torch = load(arguments.device)
    is_cpu = arguments.device == "cpu"
    is_tiny = arguments.smoke or is_cpu
    free = 2**30 if is_cpu else torch.cuda.mem_get_info()[0]
    memory = min(arguments.memory_gib * 2**30, free * 0.75)
    name = "the processor: this proves the script alone" if is_cpu else torch.cuda.get_device_name()
    print(f"# torch {torch.__version__} on {name}")
    for model in MODELS:
        if is_tiny:
            model = (model[0], 1, *model[2:])
        name, layers, parts, heads, head_dim, _ = model
        block_bytes = 2 * layers * parts * TOKENS * heads * head_dim
        most = int(min(2 if is_tiny else 4096, memory // (3 * block_bytes)))
        for blocks in (1, most):
            case = Case(torch, arguments.device, model, blocks)
            case.check()
            for word, work in (("gather", case.gather), ("scatter", case.scatter)):
                rounds, least = (1, 0.0) if is_tiny else (arguments.rounds, 0.02)
                print(f"torch {word} {name} x {blocks}: {compare(case, work, rounds, least)}", flush=True)
            del case
            if not is_cpu:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
