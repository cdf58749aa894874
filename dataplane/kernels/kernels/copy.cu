// Gather (engine to slots) and scatter (slots to engine): the same walk over a slot's units, in the slot's
// order.
//
// A thread block takes tiles of up to 4 × 256 units of one item; a warp's 32 units are neighbours in the slot
// and, as long as runs are, in the engine. All loads of a tile are issued before the first store. Without sums a thread
// block takes one tile: the device hands out tiles in order, so that those under way are neighbours in memory, which an
// H200 copies 5 % faster than equal shares for thread blocks that stay. Loads and stores are marked as streaming, since a batch
// is larger than the caches (another 5 %).

struct CopyParameters {
    u64 items, status;
    Paged paged;
    Sums sums;
    u64 slot_first, slot_plane_stride, slot_token_stride, slot_head_stride, slot_bytes;
    u32 tiles, tile_units, units, tail_bytes;
    Divider item_tiles, plane_units, token_units, run_units;
};

constexpr u32 COPY_THREADS = 256;
constexpr u32 COPY_LOADS = 4;

template <class Unit> struct Move {
    const u8 *source;
    u8 *target;
    u64 offset;
};

// Where a unit lies on both sides. `bytes` is less than a unit at the end of a run that is no multiple of it,
// 0 for none: the thread with the plane's first unit reports then.
template <class Unit, bool GATHER>
KVASIR_INLINE u32 locate(const CopyParameters &p, const Item &item, u32 number, u8 *slot, u32 index,
                         Move<Unit> &move) {
    const u32 plane = divide(index, p.plane_units);
    const u32 in_plane = index - plane * p.plane_units.divisor;
    const u32 token = divide(in_plane, p.token_units);
    const u32 in_token = in_plane - token * p.token_units.divisor;
    const u32 head = divide(in_token, p.run_units);
    const u32 unit = in_token - head * p.run_units.divisor;
    const u64 base = piece(p.paged, plane, item.block, sizeof(Unit));
    if (!base) {
        if (in_plane == 0) report(p.status, number, STATUS_MISALIGNED);
        return 0;
    }
    const u64 within = u64(unit) * sizeof(Unit);
    u8 *paged = pointer<u8>(base + token * p.paged.token_stride + head * p.paged.head_stride + within);
    move.offset = p.slot_first + plane * p.slot_plane_stride + token * p.slot_token_stride +
                  head * p.slot_head_stride + within;
    move.source = GATHER ? paged : slot + move.offset;
    move.target = GATHER ? slot + move.offset : paged;
    return p.tail_bytes && unit == p.run_units.divisor - 1 ? p.tail_bytes : sizeof(Unit);
}

template <class Unit, bool GATHER, bool SUM>
KVASIR_INLINE u64 copy_tile(const CopyParameters &p, const Item &item, u32 number, u32 first) {
    const u32 end = min(first + p.tile_units, p.units);
    u8 *slot = pointer<u8>(item.slot);
    Move<Unit> move[COPY_LOADS];
    Unit value[COPY_LOADS];
    u32 bytes[COPY_LOADS];
    u64 sum = 0;
#pragma unroll
    for (u32 load = 0; load < COPY_LOADS; ++load) {
        const u32 index = first + load * COPY_THREADS + threadIdx.x;
        bytes[load] = 0;
        if (index < end) bytes[load] = locate<Unit, GATHER>(p, item, number, slot, index, move[load]);
        if (bytes[load] == sizeof(Unit)) value[load] = __ldcs(reinterpret_cast<const Unit *>(move[load].source));
    }
#pragma unroll
    for (u32 load = 0; load < COPY_LOADS; ++load) {
        if (bytes[load] == sizeof(Unit)) {
            __stcs(reinterpret_cast<Unit *>(move[load].target), value[load]);
            if constexpr (SUM) sum += mix_unit(value[load], move[load].offset);
        } else {
            for (u32 at = 0; at < bytes[load]; ++at) move[load].target[at] = move[load].source[at];
        }
    }
    return sum;
}

template <class Unit, bool GATHER, bool SUM> KVASIR_INLINE void copy_batch(const CopyParameters &p) {
    const Share share = share_of(p.tiles);
    Running running = {0, 0, 0};
    for (u32 tile = share.first; tile < share.last; ++tile) {
        const u32 number = divide(tile, p.item_tiles);
        if constexpr (SUM) turn_to(running, number, p.sums, p.status, p.item_tiles.divisor, p.slot_bytes);
        const Item item = load_item(p.items, number);
        const u32 refused = (item.block >= p.paged.block_count ? STATUS_BLOCK : 0) |
                            (item.slot & (sizeof(Unit) - 1) ? STATUS_MISALIGNED : 0);
        if (refused) {
            if (threadIdx.x == 0) report(p.status, number, refused);
            continue;
        }
        const u32 first = (tile - number * p.item_tiles.divisor) * p.tile_units;
        running.sum += copy_tile<Unit, GATHER, SUM>(p, item, number, first);
    }
    if (SUM && running.tiles)
        deliver(p.sums, p.status, running.item, running.sum, running.tiles, p.item_tiles.divisor, p.slot_bytes);
}

#define KVASIR_COPY_KERNELS(X)                                                                                         \
    X(kvasir_gather_16, uint4, true, false)                                                                            \
    X(kvasir_gather_8, uint2, true, false)                                                                             \
    X(kvasir_gather_4, u32, true, false)                                                                               \
    X(kvasir_gather_2, u16, true, false)                                                                               \
    X(kvasir_gather_1, u8, true, false)                                                                                \
    X(kvasir_gather_sum_16, uint4, true, true)                                                                         \
    X(kvasir_gather_sum_8, uint2, true, true)                                                                          \
    X(kvasir_scatter_16, uint4, false, false)                                                                          \
    X(kvasir_scatter_8, uint2, false, false)                                                                           \
    X(kvasir_scatter_4, u32, false, false)                                                                             \
    X(kvasir_scatter_2, u16, false, false)                                                                             \
    X(kvasir_scatter_1, u8, false, false)                                                                              \
    X(kvasir_scatter_sum_16, uint4, false, true)                                                                       \
    X(kvasir_scatter_sum_8, uint2, false, true)

#define KVASIR_COPY(name, Unit, GATHER, SUM)                                                                           \
    extern "C" __global__ void __launch_bounds__(COPY_THREADS, 3) name(const __grid_constant__ CopyParameters p) {        \
        copy_batch<Unit, GATHER, SUM>(p);                                                                              \
    }
KVASIR_COPY_KERNELS(KVASIR_COPY)
