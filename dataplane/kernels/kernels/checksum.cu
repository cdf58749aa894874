// The checksum that dataplane-checksum specifies: a sum over 8-byte lanes, each mixed with its position.

constexpr u64 POSITION_STEP = 0x9e3779b97f4a7c15ULL;
constexpr u32 FIRST_FACTOR = 0x9e3779b1U;
constexpr u32 SECOND_FACTOR = 0x85ebca77U;
constexpr u64 LENGTH_FACTOR = 0xc2b2ae3d27d4eb4fULL;

// Sums of an item while thread blocks work on it. All zero before the first launch, and again after each.
struct Scratch {
    u64 sum;
    u32 arrived, reserved;
};

KVASIR_INLINE u64 mix(u64 value, u64 lane) {
    u64 mixed = value + (lane + 1) * POSITION_STEP;
    mixed ^= mixed >> 32;
    mixed *= FIRST_FACTOR;
    mixed ^= mixed >> 32;
    mixed *= SECOND_FACTOR;
    return mixed ^ mixed >> 32;
}

KVASIR_INLINE u64 join(u32 low, u32 high) { return u64(high) << 32 | low; }

KVASIR_INLINE u64 mix_unit(uint4 value, u64 offset) {
    return mix(join(value.x, value.y), offset >> 3) + mix(join(value.z, value.w), (offset >> 3) + 1);
}
KVASIR_INLINE u64 mix_unit(uint2 value, u64 offset) { return mix(join(value.x, value.y), offset >> 3); }

KVASIR_INLINE u64 seal(u64 sum, u64 bytes) {
    u64 mixed = sum + (bytes + 1) * LENGTH_FACTOR;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9ULL;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebULL;
    return mixed ^ mixed >> 31;
}

// Adds this thread block's part of an item; whoever completes the item writes its checksum and clears the
// scratch. Called by all threads. `tiles` of `item_tiles` have been worked on.
KVASIR_INLINE void deliver(const Sums &sums, u64 status, u32 item, u64 sum, u32 tiles, u32 item_tiles, u64 bytes) {
    __shared__ u64 partial[32];
    for (u32 distance = 16; distance; distance >>= 1) sum += __shfl_xor_sync(0xffffffffU, sum, distance);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 warp = 1; warp < blockDim.x / 32; ++warp) sum += partial[warp];
        Scratch *scratch = pointer<Scratch>(sums.scratch) + item;
        atomicAdd(&scratch->sum, sum);
        __threadfence();
        if (atomicAdd(&scratch->arrived, tiles) + tiles == item_tiles) {
            __threadfence();
            const u64 checksum = seal(atomicExch(&scratch->sum, 0ULL), bytes);
            atomicExch(&scratch->arrived, 0U);
            pointer<u64>(sums.checksums)[item] = checksum;
            if (sums.expected && pointer<const u64>(sums.expected)[item] != checksum)
                report(status, item, STATUS_CHECKSUM);
        }
    }
    __syncthreads();
}

// Follows a thread block from item to item and delivers when it changes.
struct Running {
    u64 sum;
    u32 item, tiles;
};

KVASIR_INLINE void turn_to(Running &running, u32 item, const Sums &sums, u64 status, u32 item_tiles, u64 bytes) {
    if (running.tiles && running.item != item) {
        deliver(sums, status, running.item, running.sum, running.tiles, item_tiles, bytes);
        running.sum = 0;
        running.tiles = 0;
    }
    running.item = item;
    ++running.tiles;
}

struct ChecksumParameters {
    u64 items, status;
    Sums sums;
    u64 bytes;
    u32 tiles, tile_units, units;
    Divider item_tiles;
};

constexpr u32 CHECKSUM_THREADS = 256;
constexpr u32 CHECKSUM_LOADS = 4;

// Reads lanes of a slot that is not aligned, or the end of one.
KVASIR_INLINE u64 mix_bytes(const u8 *slot, u64 from, u64 bytes) {
    u64 sum = 0;
    for (u64 lane = from; lane < bytes && lane < from + 16; lane += 8) {
        u64 value = 0;
        for (u64 at = lane; at < bytes && at < lane + 8; ++at) value |= u64(slot[at]) << 8 * (at - lane);
        sum += mix(value, lane >> 3);
    }
    return sum;
}

template <bool ALIGNED> KVASIR_INLINE u64 checksum_tile(const ChecksumParameters &p, const u8 *slot, u32 first) {
    const u32 end = min(first + p.tile_units, p.units);
    uint4 value[CHECKSUM_LOADS];
    u64 sum = 0;
#pragma unroll
    for (u32 load = 0; load < CHECKSUM_LOADS; ++load) {
        const u32 unit = first + load * CHECKSUM_THREADS + threadIdx.x;
        if (ALIGNED && unit < end && u64(unit) * 16 + 16 <= p.bytes)
            value[load] = __ldcs(reinterpret_cast<const uint4 *>(slot) + unit);
    }
#pragma unroll
    for (u32 load = 0; load < CHECKSUM_LOADS; ++load) {
        const u32 unit = first + load * CHECKSUM_THREADS + threadIdx.x;
        if (unit >= end) continue;
        const u64 from = u64(unit) * 16;
        sum += ALIGNED && from + 16 <= p.bytes ? mix_unit(value[load], from) : mix_bytes(slot, from, p.bytes);
    }
    return sum;
}

template <bool ALIGNED> KVASIR_INLINE void checksum_batch(const ChecksumParameters &p) {
    const Share share = share_of(p.tiles);
    Running running = {0, 0, 0};
    for (u32 tile = share.first; tile < share.last; ++tile) {
        const u32 item = divide(tile, p.item_tiles);
        turn_to(running, item, p.sums, p.status, p.item_tiles.divisor, p.bytes);
        const u64 slot = load_item(p.items, item).slot;
        if (ALIGNED && slot & 15) {
            if (threadIdx.x == 0) report(p.status, item, STATUS_MISALIGNED);
            continue;
        }
        const u32 first = (tile - item * p.item_tiles.divisor) * p.tile_units;
        running.sum += checksum_tile<ALIGNED>(p, pointer<const u8>(slot), first);
    }
    if (running.tiles)
        deliver(p.sums, p.status, running.item, running.sum, running.tiles, p.item_tiles.divisor, p.bytes);
}

#define KVASIR_CHECKSUM_KERNELS(X) X(kvasir_checksum_16, true) X(kvasir_checksum_1, false)

#define KVASIR_CHECKSUM(name, ALIGNED)                                                                                 \
    extern "C" __global__ void __launch_bounds__(CHECKSUM_THREADS)                                                     \
    name(const __grid_constant__ ChecksumParameters p) { checksum_batch<ALIGNED>(p); }
KVASIR_CHECKSUM_KERNELS(KVASIR_CHECKSUM)
