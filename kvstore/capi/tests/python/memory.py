"""Tensors without PyTorch: memory that an engine might have, with the shape and strides of a cache of KV blocks."""

import ctypes
import math
import random
from collections.abc import Sequence


class Tensor:
    """Answers as PyTorch's tensors do. `order` is the physical order of the axes; without one they lie as they come."""

    dtype = "bytes"

    def __init__(self, shape: Sequence[int], order: Sequence[int] = (), start: int | None = None) -> None:
        self.shape = tuple(shape)
        order = tuple(order) or tuple(range(len(shape)))
        strides, distance = [0] * len(shape), 1
        for axis in reversed(order):
            strides[axis] = distance
            distance *= shape[axis]
        self.strides = tuple(strides)
        self.memory = (ctypes.c_uint8 * math.prod(shape))()
        self.start = ctypes.addressof(self.memory) if start is None else start

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return self.start

    def fill(self, block: int, seed: int) -> bytes:
        """Gives a block of a tensor `[blocks, …]` bytes of its own, and returns them."""
        size = self.strides[0]
        content = random.Random(seed * 1000 + block).randbytes(size)
        ctypes.memmove(self.start + block * size, content, size)
        return content

    def read(self, block: int) -> bytes:
        """The bytes of a block of a tensor `[blocks, …]`."""
        return ctypes.string_at(self.start + block * self.strides[0], self.strides[0])
