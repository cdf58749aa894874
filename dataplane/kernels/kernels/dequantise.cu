// Dequantising scatter: a flat walk over an item's pieces of eight elements (or one), four in flight.

constexpr u32 DEQUANTISE_THREADS = 256;
constexpr u32 DEQUANTISE_LOADS = 4;

template <u32 COUNT> struct Coded {
    u64 codes;
    float scale[COUNT];
    u8 *target;
};

// Scales of neighbouring channels.
template <u32 COUNT>
KVASIR_INLINE bool load_scales(const QuantiseParameters &p, const u8 *from, float (&scale)[COUNT]) {
    bool good = true;
    if (COUNT == 8 && p.has_bf16_scales) {
#pragma unroll
        for (u32 at = 0; at < COUNT; ++at) {
            const u32 pair = __ldg(reinterpret_cast<const u32 *>(from) + at / 2);
            scale[at] = float_of(at % 2 ? pair & 0xffff0000U : pair << 16);
        }
    } else {
#pragma unroll
        for (u32 at = 0; at < COUNT; ++at)
            scale[at] = COUNT == 8 ? __ldg(reinterpret_cast<const float *>(from) + at)
                                   : load_scale<false>(from + at * scale_bytes(p), p.has_bf16_scales);
    }
#pragma unroll
    for (u32 at = 0; at < COUNT; ++at) good = good && usable(scale[at]);
    return good;
}

// Whether the piece can be restored. Of all pieces that share what is wrong, the first one's thread reports it.
template <class E, u32 COUNT>
KVASIR_INLINE bool load_coded(const QuantiseParameters &p, const Item &item, u32 number, u32 index,
                              Coded<COUNT> &coded) {
    const u32 layer = divide(index, p.layer_units);
    const u32 in_layer = index - layer * p.layer_units.divisor;
    const u32 part_number = divide(in_layer, p.part_units);
    const u32 in_part = in_layer - part_number * p.part_units.divisor;
    const u32 token = divide(in_part, p.token_units);
    const u32 channel = (in_part - token * p.token_units.divisor) * COUNT;
    const Part &part = p.parts[part_number];
    const u64 base = piece(p.paged, layer * p.part_count + part_number, item.block,
                           COUNT == 8 ? 16 : sizeof(typename E::Raw));
    if (!base) {
        if (in_part == 0) report(p.status, number, STATUS_MISALIGNED);
        return false;
    }
    coded.target = pointer<u8>(base + within_piece<E>(p, token, channel));
    const u8 *plane = pointer<const u8>(item.slot) + layer * p.layer_bytes;
    const u32 slot_channel = p.first_channel + channel;
    const u8 *codes = plane + part.code_offset + u64(token) * p.slot_channels + slot_channel;
    if constexpr (COUNT == 8)
        coded.codes = __ldcs(reinterpret_cast<const u64 *>(codes));
    else
        coded.codes = *codes;
    if (part.group == 0) {
        const u8 *scales = plane + part.offset + u64(slot_channel) * scale_bytes(p);
        const bool good = load_scales<COUNT>(p, scales, coded.scale);
        if (!good && token == 0) report(p.status, number, STATUS_SCALE);
        return good;
    }
    const u32 group = divide(channel, part.group_divider);
    const u64 scale_number = u64(token) * part.slot_groups + part.first_group + group;
    const u8 *from = plane + part.offset + scale_number * scale_bytes(p);
    const float scale = load_scale<COUNT == 8>(from, p.has_bf16_scales);
#pragma unroll
    for (u32 at = 0; at < COUNT; ++at) coded.scale[at] = scale;
    if (!usable(scale) && channel == group * part.group) report(p.status, number, STATUS_SCALE);
    return usable(scale);
}

template <class E, class F, u32 COUNT>
KVASIR_INLINE void dequantise_tile(const QuantiseParameters &p, const Item &item, u32 number, u32 first) {
    Coded<COUNT> coded[DEQUANTISE_LOADS];
    bool good[DEQUANTISE_LOADS];
#pragma unroll
    for (u32 load = 0; load < DEQUANTISE_LOADS; ++load) {
        const u32 index = first + load * DEQUANTISE_THREADS + threadIdx.x;
        good[load] = index < p.units && load_coded<E, COUNT>(p, item, number, index, coded[load]);
    }
#pragma unroll
    for (u32 load = 0; load < DEQUANTISE_LOADS; ++load) {
        if (!good[load]) continue;
        Elements<E, COUNT> elements;
#pragma unroll
        for (u32 at = 0; at < COUNT; ++at)
            elements.raw[at] = restore<E, F>(u8(coded[load].codes >> 8 * at), coded[load].scale[at]);
        store_elements<E, COUNT>(coded[load].target, elements);
    }
}

// Whether a slot has the header of this launch; asked by every thread block before it restores anything.
KVASIR_INLINE bool has_header(const QuantiseParameters &p, const Item &item) {
    const u8 *slot = pointer<const u8>(item.slot);
    u32 differing = 0;
    if (threadIdx.x < HEADER_BYTES) differing = slot[threadIdx.x] ^ u8(p.header[threadIdx.x / 4] >> threadIdx.x % 4 * 8);
    return !__syncthreads_or(int(differing));
}

template <class E, class F, u32 COUNT> KVASIR_INLINE void dequantise_batch(const QuantiseParameters &p) {
    const Share share = share_of(p.tiles);
    u32 checked = ~0U, refused = 0;
    for (u32 tile = share.first; tile < share.last; ++tile) {
        const u32 number = divide(tile, p.item_tiles);
        const Item item = load_item(p.items, number);
        if (number != checked) {
            checked = number;
            refused = (item.block >= p.paged.block_count ? STATUS_BLOCK : 0) |
                      (item.slot & (COUNT - 1) ? STATUS_MISALIGNED : 0);
            if (!refused && !has_header(p, item)) refused = STATUS_HEADER;
            if (refused && threadIdx.x == 0) report(p.status, number, refused);
        }
        if (refused) continue;
        const u32 first = (tile - number * p.item_tiles.divisor) * DEQUANTISE_THREADS * DEQUANTISE_LOADS;
        dequantise_tile<E, F, COUNT>(p, item, number, first);
    }
}

#define KVASIR_DEQUANTISE_KERNELS(X)                                                                                   \
    X(kvasir_dequantise_bf16_fp8_8, Bf16, Fp8, 8)                                                                      \
    X(kvasir_dequantise_bf16_fp8_1, Bf16, Fp8, 1)                                                                      \
    X(kvasir_dequantise_bf16_int8_8, Bf16, Int8, 8)                                                                    \
    X(kvasir_dequantise_bf16_int8_1, Bf16, Int8, 1)                                                                    \
    X(kvasir_dequantise_f16_fp8_8, F16, Fp8, 8)                                                                        \
    X(kvasir_dequantise_f16_fp8_1, F16, Fp8, 1)                                                                        \
    X(kvasir_dequantise_f16_int8_8, F16, Int8, 8)                                                                      \
    X(kvasir_dequantise_f16_int8_1, F16, Int8, 1)                                                                      \
    X(kvasir_dequantise_f32_fp8_8, F32, Fp8, 8)                                                                        \
    X(kvasir_dequantise_f32_fp8_1, F32, Fp8, 1)                                                                        \
    X(kvasir_dequantise_f32_int8_8, F32, Int8, 8)                                                                      \
    X(kvasir_dequantise_f32_int8_1, F32, Int8, 1)

#define KVASIR_DEQUANTISE(name, E, F, COUNT)                                                                           \
    extern "C" __global__ void __launch_bounds__(DEQUANTISE_THREADS)                                                   \
    name(const __grid_constant__ QuantiseParameters p) { dequantise_batch<E, F, COUNT>(p); }
KVASIR_DEQUANTISE_KERNELS(KVASIR_DEQUANTISE)
