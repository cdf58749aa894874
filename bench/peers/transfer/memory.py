"""Host memory for the movers: mappings that are touched before any measurement, patterns, and memcpy as the limit."""

import ctypes
import mmap

import numpy

PAGE_BYTES = 4096


class Memory:
    """An anonymous mapping of whole pages, all of them present."""

    def __init__(self, size_bytes):
        # Private, as an engine's own allocator gives it: a mover must not need memory that it allocated itself.
        self.mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = numpy.frombuffer(self.mapping, dtype=numpy.uint8)
        self.bytes[::PAGE_BYTES] = 1
        self.base = self.bytes.ctypes.data
        self.size_bytes = size_bytes

    def fill(self, seed, size_bytes):
        """Writes the pattern of `seed` into the first bytes."""
        self.bytes[:size_bytes] = pattern(seed, size_bytes)

    def differs_from(self, seed, size_bytes):
        """How many of the first bytes are not those of the pattern."""
        return int(numpy.count_nonzero(self.bytes[:size_bytes] != pattern(seed, size_bytes)))


def pattern(seed, size_bytes):
    """Bytes that depend on the seed and on the place of each."""
    return numpy.random.Generator(numpy.random.SFC64(seed)).integers(0, 256, size_bytes, dtype=numpy.uint8)


def places(size_bytes, count, seed=7):
    """Offsets of `count` pieces on both sides. The order at the far side is shuffled, so that no library can merge
    neighbours into one long copy: blocks of a cache are never neighbours on both sides."""
    far = numpy.random.Generator(numpy.random.SFC64(seed)).permutation(count)
    return [(index * size_bytes, int(other) * size_bytes) for index, other in enumerate(far)]


def copier(source, target, pieces, size_bytes):
    """A call that copies every piece with memmove; the calls are prepared, as the movers' descriptor lists are."""
    memmove = ctypes.memmove
    calls = [(target.base + far, source.base + near, size_bytes) for near, far in pieces]

    def copy():
        for call in calls:
            memmove(*call)

    return copy
