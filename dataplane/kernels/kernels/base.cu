// What all kernels share: integers, places in memory, division by a launch constant, status words.
//
// The files of this folder are one translation unit: they are joined in the order of `SOURCE` (src/source.rs)
// and compiled at run time. Nothing is included, because the run-time compiler has no headers. The structures
// have the layout of those of the same name in src/parameters.rs.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define KVASIR_INLINE __device__ __forceinline__

#ifndef KVASIR_EMULATED
// A device address as a pointer. The emulator translates here. Loads and stores name global memory (`__ldcs`,
// `__stcs`, `__stwb`), because the compiler cannot know from a number which memory it is in.
template <class T> KVASIR_INLINE T *pointer(u64 address) { return reinterpret_cast<T *>(address); }
#endif

// What went wrong with an item; bits of its status word.
[[maybe_unused]] constexpr u32 STATUS_MISALIGNED = 8;  // An address is 0 or no multiple of the launch's unit; nothing there was touched.
[[maybe_unused]] constexpr u32 STATUS_BLOCK = 16;      // The block does not exist; the item was not touched.
[[maybe_unused]] constexpr u32 STATUS_CHECKSUM = 32;   // The checksum is not the expected one.

// One block of the engine and one slot.
struct Item {
    u64 slot;
    u64 block;
};

// Quotients of numbers below 2^31 (Granlund and Montgomery 1994, section 4): a multiplication in place of a
// division.
struct Divider {
    u32 divisor, multiplier, shift;
};

KVASIR_INLINE u32 divide(u32 number, const Divider &by) {
    return by.divisor == 1 ? number : __umulhi(number, by.multiplier) >> by.shift;
}

// Where blocks lie in the engine's tensors, in bytes. `planes` is an array in device memory: for each plane
// (one layer's keys or values) the address of its first block.
struct Paged {
    u64 planes, block_count, block_stride, token_stride, head_stride, first;
};

// Where the sums go (0: nowhere). `expected` may be 0.
struct Sums {
    u64 checksums, scratch, expected;
};

KVASIR_INLINE Item load_item(u64 items, u32 index) {
    const ulonglong2 item = __ldg(pointer<const ulonglong2>(items) + index);
    return Item{item.x, item.y};
}

// Called by one thread for each thing that is wrong, not by all that see it: the words are few, and atomic.
KVASIR_INLINE void report(u64 status, u32 item, u32 bits) { atomicOr(pointer<u32>(status) + item, bits); }

// The block's piece of a plane, or 0 when the plane has no address or is misaligned for accesses of `unit` bytes.
KVASIR_INLINE u64 piece(const Paged &paged, u32 plane, u64 block, u32 unit) {
    const u64 base = __ldg(pointer<const u64>(paged.planes) + plane);
    return base == 0 || base & (unit - 1) ? 0 : base + block * paged.block_stride + paged.first;
}

// The share of a batch that this thread block works on: neighbouring tiles, so that it changes items seldom.
struct Share {
    u32 first, last;
};

KVASIR_INLINE Share share_of(u32 tiles) {
    return Share{u32(u64(tiles) * blockIdx.x / gridDim.x), u32(u64(tiles) * (blockIdx.x + 1) / gridDim.x)};
}
