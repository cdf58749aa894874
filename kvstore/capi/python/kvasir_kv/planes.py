"""Where a block's bytes lie in an engine's tensors.

A block's payload is its bytes in each plane, one plane after the other. A plane is found for each run of bytes that
one block has in a tensor: one for `[blocks, …]` (keys and values together, `[blocks, 2, …]`, latents), two for `[2,
blocks, …]`, one for each head where heads are outermost. Planes keep the order in which the engine names its tensors,
which is the same at each start; addresses are not. Blocks that are not whole in each plane are refused, because
copying them would take a gather.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from .library import Plane

PLANES_MAX = 4096
"""What the library takes."""


PIECE_BYTES_MIN = 256
"""Smaller pieces of a block are not worth a copy each."""


class Tensor(Protocol):
    """What is asked of a tensor; PyTorch's answer to this."""

    @property
    def shape(self) -> Iterable[int]: ...
    @property
    def dtype(self) -> object: ...
    def stride(self) -> Iterable[int]: ...
    def element_size(self) -> int: ...
    def data_ptr(self) -> int: ...


class LayoutError(ValueError):
    """Tensors whose blocks cannot be copied as they lie."""


@dataclass(frozen=True)
class Layout:
    """Planes, the bytes of a block in all of them, and what decides how those bytes are to be read.

    `layers` has the same planes for each layer by itself, by the name of its tensor, and `head_layouts` how each is cut by heads.
    """

    planes: tuple[Plane, ...]
    block_bytes: int
    facts: tuple[object, ...]
    layers: Mapping[str, tuple[Plane, ...]]
    head_layouts: Mapping[str, "HeadLayout"]


@dataclass(frozen=True)
class HeadLayout:
    """A block of a layer is `rows` rows of `heads` heads of `head_bytes`; `axes` are what a row's place and a head have."""

    rows: int
    heads: int
    head_bytes: int
    axes: tuple[str, ...]


def layout(tensors: Mapping[str, Tensor], blocks: int) -> Layout:
    """The layout of an engine's tensors, each with `blocks` blocks."""
    planes: list[Plane] = []
    facts: list[object] = []
    layers: dict[str, tuple[Plane, ...]] = {}
    head_layouts: dict[str, HeadLayout] = {}
    seen: set[tuple[object, ...]] = set()
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size())
        if place in seen:
            # Layers that share their cache have it once.
            facts.append((name, "shared"))
            continue
        seen.add(place)
        found, of_tensor = _of_tensor(name, tensor, blocks)
        planes += found
        layers[name] = tuple(found)
        head_layouts[name] = _cut(tensor, sum(plane.block_bytes for plane in found))
        facts.append((name, str(tensor.dtype), of_tensor))
    if not planes:
        raise LayoutError("the engine has no tensors of KV blocks")
    merged = _merge(_union(planes))
    if len(merged) > PLANES_MAX:
        raise LayoutError(f"a block lies in {len(merged)} pieces, and at most {PLANES_MAX} can be copied")
    return Layout(tuple(merged), sum(plane.block_bytes for plane in merged), tuple(facts), layers, head_layouts)


def _cut(tensor: Tensor, layer_bytes: int) -> HeadLayout:
    """How a layer is cut by heads: of vLLM's tensors `[blocks, heads, tokens, content]`, whatever their order in memory.

    Of any other tensor a block is one row of one head.
    """
    sizes, strides = list(tensor.shape), list(tensor.stride())
    if len(sizes) != 4:
        return HeadLayout(1, 1, layer_bytes, ())
    names = ("heads", "tokens", "content")
    # Of two axes with one stride the outer one has one element: that of heads is told last, where it changes nothing.
    axes = sorted(zip(strides[1:], (1, 2, 3), names, sizes[1:]), key=lambda axis: (-axis[0], axis[1] == 1))
    at = next(place for place, axis in enumerate(axes) if axis[2] == "heads")
    head_bytes = math.prod(axis[3] for axis in axes[at + 1 :]) * tensor.element_size()
    rows = layer_bytes // (sizes[1] * head_bytes)
    return HeadLayout(rows, sizes[1], head_bytes, tuple(axis[2] for axis in axes))


def _of_tensor(name: str, tensor: Tensor, blocks: int) -> tuple[list[Plane], tuple[object, ...]]:
    sizes, strides = list(tensor.shape), list(tensor.stride())
    what = f"tensor {name} of shape {sizes} and strides {strides}"
    axis = _block_axis(what, sizes, blocks)
    if sizes[axis] != blocks:
        # The engine's kernels see a block as several smaller ones, which lie one after the other.
        split = sizes[axis] // blocks
        sizes[axis : axis + 1] = [blocks, split]
        strides[axis : axis + 1] = [strides[axis] * split, strides[axis]]
    block_stride = strides[axis]
    others = [(stride, size, at) for at, (size, stride) in enumerate(zip(sizes, strides)) if at != axis and size > 1]
    run, outer = 1, []
    for stride, size, at in sorted(others):
        if stride == run:
            run *= size
        elif stride >= block_stride * blocks:
            outer.append((stride, size, at))
        else:
            raise LayoutError(
                f"{what}: a block is not whole in it (of {size} pieces, {stride} elements apart, each has {run}); "
                "choose a layout of the KV cache in which it is, such as VLLM_KV_CACHE_LAYOUT=LBHNC"
            )
    if blocks > 1 and run > block_stride:
        raise LayoutError(f"{what}: blocks of {run} elements overlap")
    bytes_each = tensor.element_size()
    if outer and run * bytes_each < PIECE_BYTES_MIN:
        raise LayoutError(f"{what}: a block lies in pieces of {run * bytes_each} bytes")
    outer.sort(reverse=True)
    planes = [
        Plane(
            tensor.data_ptr() + bytes_each * sum(index * stride for index, (stride, _, _) in zip(place, outer)),
            block_stride * bytes_each,
            run * bytes_each,
        )
        for place in product(*(range(size) for _, size, _ in outer))
    ]
    # The order of axes inside a block and that of planes; distances between blocks and planes decide nothing.
    whole: list[tuple[object, object]] = [
        (size, stride if size > 1 and stride < run else "outer") for size, stride in zip(sizes, strides)
    ]
    for rank, (_, size, at) in enumerate(outer):
        whole[at] = (size, f"outer {rank}")
    whole[axis] = ("blocks", "outer")
    return planes, (bytes_each, tuple(whole))


def _block_axis(what: str, sizes: list[int], blocks: int) -> int:
    exact = [axis for axis, size in enumerate(sizes[:2]) if size == blocks]
    if len(exact) == 1:
        return exact[0]
    if exact:
        raise LayoutError(f"{what}: either of the first two axes could be that of the {blocks} blocks")
    if sizes and blocks and sizes[0] > blocks and sizes[0] % blocks == 0:
        return 0
    raise LayoutError(f"{what}: none of the first two axes is that of the {blocks} blocks")


def _union(planes: list[Plane]) -> list[Plane]:
    """Planes that overlap in each block become one: groups of layers whose blocks take turns in the same memory, each seen in its own shape."""
    disjoint: list[Plane] = []
    for plane in planes:
        for other in [one for one in disjoint if _overlap(one, plane)]:
            if other.block_stride != plane.block_stride:
                raise LayoutError(f"blocks {plane.block_stride} and {other.block_stride} bytes apart overlap")
            disjoint.remove(other)
            start = min(plane.start, other.start)
            stop = max(plane.start + plane.block_bytes, other.start + other.block_bytes)
            plane = Plane(start, plane.block_stride, stop - start)
        if plane.block_bytes > plane.block_stride:
            raise LayoutError(f"a block of {plane.block_bytes} bytes is longer than the distance of {plane.block_stride} to the next one")
        disjoint.append(plane)
    return disjoint


def _overlap(one: Plane, other: Plane) -> bool:
    return one.start < other.start + other.block_bytes and other.start < one.start + one.block_bytes


def _merge(planes: list[Plane]) -> list[Plane]:
    """Planes that lie one after the other in each block become one, so that a block is copied in few pieces."""
    merged: list[Plane] = []
    for plane in planes:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.block_stride == plane.block_stride
            and last.start + last.block_bytes == plane.start
            and last.block_bytes + plane.block_bytes <= plane.block_stride
        ):
            merged[-1] = Plane(last.start, last.block_stride, last.block_bytes + plane.block_bytes)
        else:
            merged.append(plane)
    return merged
