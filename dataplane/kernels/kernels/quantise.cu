// Quantising gather and dequantising scatter. A slot is that of kvstore-quantise: 64 bytes of header, then
// for each layer its planes (keys, values), each its scales, then a byte an element.
//
// A part has its groups either along channels over all tokens (one thread: 8 channels, the tokens in
// registers) or within a token (2^n threads: one group, four groups in flight). Work of a part is numbered
// over all layers of an item, so that small planes fill thread blocks.

// One part (keys, values) of every layer.
struct Part {
    u64 offset;               // Of the first layer's plane in the slot.
    u64 code_offset;          // Of its codes.
    u32 group;                // 0: channels.
    u32 groups;               // In one plane of this launch.
    u32 slot_groups, first_group; // Scales of a token in the slot, and the first that this launch writes.
    u32 lanes_shift;          // 2^this threads work on a group.
    u32 tiles, work;          // Of an item.
    Divider plane_work, token_groups, group_divider;
};

struct QuantiseParameters {
    u64 items, status;
    Paged paged;
    Sums sums;
    u64 layer_bytes, slot_bytes;
    u32 header[16];
    Part parts[2];
    u32 part_count, tokens, channels, slot_channels, first_channel, has_bf16_scales;
    u32 tiles, units;
    Divider item_tiles, head_elements, layer_units, part_units, token_units;
};

constexpr u32 QUANTISE_THREADS = 128;
constexpr u32 HEADER_BYTES = 64;
constexpr u32 GROUPS_IN_FLIGHT = 4;

KVASIR_INLINE u32 scale_bytes(const QuantiseParameters &p) { return p.has_bf16_scales ? 2 : 4; }

KVASIR_INLINE void store_scale(u8 *to, float scale, bool as_bf16) {
    const u32 bits = as_bf16 ? bits_of(scale) >> 16 : bits_of(scale);
    for (u32 at = 0; at < (as_bf16 ? 2 : 4); ++at) to[at] = u8(bits >> 8 * at);
}

template <bool ALIGNED> KVASIR_INLINE float load_scale(const u8 *from, bool is_bf16) {
    if (ALIGNED)
        return float_of(is_bf16 ? u32(__ldg(reinterpret_cast<const u16 *>(from))) << 16
                                : __ldg(reinterpret_cast<const u32 *>(from)));
    u32 bits = 0;
    for (u32 at = 0; at < (is_bf16 ? 2 : 4); ++at) bits |= u32(from[at]) << 8 * at;
    return float_of(is_bf16 ? bits << 16 : bits);
}

// Where one token's channels from `channel` on lie in the engine, from the piece of a plane.
template <class E> KVASIR_INLINE u64 within_piece(const QuantiseParameters &p, u32 token, u32 channel) {
    const u32 head = divide(channel, p.head_elements);
    const u64 within = u64(channel - head * p.head_elements.divisor) * sizeof(typename E::Raw);
    return token * p.paged.token_stride + head * p.paged.head_stride + within;
}

// Scales of neighbouring groups: written and summed as whole lanes where they are such. A launch that sums has whole
// lanes only (`QuantisePlan::launch`: accesses of eight, the whole slot, scales of each plane a multiple of 8 bytes);
// one that takes a part of the heads may begin inside a lane. A sum without its scales would be a wrong checksum, so
// that a launch which breaks the rule ends the context.
template <u32 COUNT>
KVASIR_INLINE u64 write_scales(const QuantiseParameters &p, u8 *slot, u64 at, const float (&scale)[COUNT]) {
    const bool as_bf16 = p.has_bf16_scales;
    if (COUNT == 1 || at % 8) {
        if (p.sums.checksums) __trap();
        for (u32 number = 0; number < COUNT; ++number)
            store_scale(slot + at + number * scale_bytes(p), scale[number], as_bf16);
        return 0;
    }
    u64 sum = 0;
    if (as_bf16) {
#pragma unroll
        for (u32 number = 0; number + 3 < COUNT; number += 4) {
            const u32 low = bits_of(scale[number]) >> 16 | bits_of(scale[number + 1]);
            const u32 high = bits_of(scale[number + 2]) >> 16 | bits_of(scale[number + 3]);
            __stwb(reinterpret_cast<u64 *>(slot + at + number * 2), join(low, high));
            sum += mix(join(low, high), (at + number * 2) >> 3);
        }
    } else {
#pragma unroll
        for (u32 number = 0; number + 1 < COUNT; number += 2) {
            const u64 lane = join(bits_of(scale[number]), bits_of(scale[number + 1]));
            __stwb(reinterpret_cast<u64 *>(slot + at + number * 4), lane);
            sum += mix(lane, (at + number * 4) >> 3);
        }
    }
    return sum;
}

// Eight channels (or one) over all tokens.
template <class E, class F, u32 COUNT>
KVASIR_INLINE u64 quantise_channels(const QuantiseParameters &p, const Part &part, const Item &item, u32 number,
                                    u32 part_number, u32 work) {
    constexpr u32 HELD = sizeof(typename E::Raw) == 2 ? 16 : 8;
    if (work >= part.work) return 0;
    const u32 layer = divide(work, part.plane_work);
    const u32 channel = (work - layer * part.plane_work.divisor) * COUNT;
    const u64 base = piece(p.paged, layer * p.part_count + part_number, item.block,
                           COUNT == 8 ? 16 : sizeof(typename E::Raw));
    if (!base) {
        if (channel == 0) report(p.status, number, STATUS_MISALIGNED);
        return 0;
    }
    const u8 *source = pointer<const u8>(base + within_piece<E>(p, 0, channel));
    Elements<E, COUNT> held[HELD];
    u32 greatest[COUNT] = {};
#pragma unroll
    for (u32 token = 0; token < HELD; ++token)
        if (token < p.tokens) held[token] = load_elements<E, COUNT>(source + token * p.paged.token_stride);
#pragma unroll
    for (u32 token = 0; token < HELD; ++token)
        if (token < p.tokens) magnitudes<E, COUNT>(held[token], greatest);
    for (u32 token = HELD; token < p.tokens; ++token)
        magnitudes<E, COUNT>(load_elements<E, COUNT>(source + token * p.paged.token_stride), greatest);
    float scale[COUNT], inverses[COUNT];
    u32 all = 0;
#pragma unroll
    for (u32 at = 0; at < COUNT; ++at) {
        all = max(all, greatest[at]);
        scale[at] = scale_of<F>(greatest[at], p.has_bf16_scales);
        inverses[at] = __fdiv_rn(1.0f, scale[at]);
    }
    if (all >= NOT_FINITE) report(p.status, number, STATUS_NOT_FINITE);
    const auto inverse = [&](u32 at) { return inverses[at]; };
    u8 *slot = pointer<u8>(item.slot);
    const u32 slot_channel = p.first_channel + channel;
    const u64 plane = layer * p.layer_bytes;
    u64 sum = write_scales<COUNT>(p, slot, plane + part.offset + u64(slot_channel) * scale_bytes(p), scale);
    u64 codes_at = plane + part.code_offset + slot_channel;
#pragma unroll
    for (u32 token = 0; token < HELD; ++token) {
        if (token >= p.tokens) continue;
        const u64 codes = encode_elements<E, F, COUNT>(held[token], inverse);
        const u64 at = codes_at + u64(token) * p.slot_channels;
        store_codes<COUNT>(slot + at, codes);
        sum += mix(codes, at >> 3);
    }
    for (u32 token = HELD; token < p.tokens; ++token) {
        const u64 codes = encode_elements<E, F, COUNT>(
            load_elements<E, COUNT>(source + token * p.paged.token_stride), inverse);
        const u64 at = codes_at + u64(token) * p.slot_channels;
        store_codes<COUNT>(slot + at, codes);
        sum += mix(codes, at >> 3);
    }
    return sum;
}

// Four groups of neighbouring elements by 2^n threads of a warp.
template <class E, class F, u32 COUNT>
KVASIR_INLINE u64 quantise_groups(const QuantiseParameters &p, const Part &part, const Item &item, u32 number,
                                  u32 part_number, u32 work) {
    const u32 lanes = 1U << part.lanes_shift;
    const u32 lane = threadIdx.x & (lanes - 1);
    const u32 chunks = part.group / COUNT;
    const u32 layer = work < part.work ? divide(work, part.plane_work) : 0;
    const u32 first = (work - layer * part.plane_work.divisor) * GROUPS_IN_FLIGHT;
    const u64 base = work < part.work ? piece(p.paged, layer * p.part_count + part_number, item.block,
                                              COUNT == 8 ? 16 : sizeof(typename E::Raw))
                                      : 0;
    if (!base && work < part.work && lane == 0 && first == 0) report(p.status, number, STATUS_MISALIGNED);
    Elements<E, COUNT> held[GROUPS_IN_FLIGHT];
    const u8 *source[GROUPS_IN_FLIGHT];
    u64 codes_at[GROUPS_IN_FLIGHT], scale_at[GROUPS_IN_FLIGHT];
    u32 greatest[GROUPS_IN_FLIGHT];
    bool valid[GROUPS_IN_FLIGHT];
    const u64 plane = layer * p.layer_bytes;
#pragma unroll
    for (u32 at = 0; at < GROUPS_IN_FLIGHT; ++at) {
        valid[at] = base && first + at < part.groups;
        greatest[at] = 0;
        if (!valid[at]) continue;
        const u32 token = divide(first + at, part.token_groups);
        const u32 in_token = first + at - token * part.token_groups.divisor;
        source[at] = pointer<const u8>(base + within_piece<E>(p, token, in_token * part.group));
        const u64 group_in_slot = u64(token) * part.slot_groups + part.first_group + in_token;
        scale_at[at] = plane + part.offset + group_in_slot * scale_bytes(p);
        codes_at[at] = plane + part.code_offset + group_in_slot * part.group;
        if (lane < chunks)
            held[at] = load_elements<E, COUNT>(source[at] + u64(lane) * sizeof(Elements<E, COUNT>));
    }
    float scale[GROUPS_IN_FLIGHT];
    u32 all = 0;
#pragma unroll
    for (u32 at = 0; at < GROUPS_IN_FLIGHT; ++at) {
        if (valid[at] && lane < chunks) greatest[at] = greatest_of<E, COUNT>(held[at], 0);
        for (u32 chunk = lane + lanes; valid[at] && chunk < chunks; chunk += lanes) {
            const u8 *from = source[at] + u64(chunk) * sizeof(Elements<E, COUNT>);
            greatest[at] = greatest_of<E, COUNT>(load_elements<E, COUNT>(from), greatest[at]);
        }
        for (u32 distance = lanes / 2; distance; distance >>= 1)
            greatest[at] = max(greatest[at], __shfl_xor_sync(0xffffffffU, greatest[at], distance));
        all = max(all, greatest[at]);
        scale[at] = scale_of<F>(greatest[at], p.has_bf16_scales);
    }
    u8 *slot = pointer<u8>(item.slot);
    u64 sum = 0;
    if (lane == 0 && base) {
        if (all >= NOT_FINITE) report(p.status, number, STATUS_NOT_FINITE);
        if (COUNT == 8 && valid[GROUPS_IN_FLIGHT - 1] &&
            scale_at[GROUPS_IN_FLIGHT - 1] - scale_at[0] == (GROUPS_IN_FLIGHT - 1) * scale_bytes(p)) {
            sum += write_scales<GROUPS_IN_FLIGHT>(p, slot, scale_at[0], scale);
        } else {
            // Two fp32 scales are a lane; other ends of planes are not summed (the plan refuses).
            if (valid[0]) store_scale(slot + scale_at[0], scale[0], p.has_bf16_scales);
            if (valid[1]) store_scale(slot + scale_at[1], scale[1], p.has_bf16_scales);
            if (valid[2]) store_scale(slot + scale_at[2], scale[2], p.has_bf16_scales);
            if (valid[3]) store_scale(slot + scale_at[3], scale[3], p.has_bf16_scales);
            if (valid[1]) sum += mix(join(bits_of(scale[0]), bits_of(scale[1])), scale_at[0] >> 3);
        }
    }
#pragma unroll
    for (u32 at = 0; at < GROUPS_IN_FLIGHT; ++at) {
        if (!valid[at]) continue;
        const float factor = __fdiv_rn(1.0f, scale[at]);
        const auto inverse = [&](u32) { return factor; };
        for (u32 chunk = lane; chunk < chunks; chunk += lanes) {
            if (chunk != lane)
                held[at] = load_elements<E, COUNT>(source[at] + u64(chunk) * sizeof(Elements<E, COUNT>));
            const u64 codes = encode_elements<E, F, COUNT>(held[at], inverse);
            const u64 to = codes_at[at] + chunk * COUNT;
            store_codes<COUNT>(slot + to, codes);
            sum += mix(codes, to >> 3);
        }
    }
    return sum;
}

KVASIR_INLINE u64 write_header(const QuantiseParameters &p, const Item &item) {
    if (threadIdx.x >= HEADER_BYTES / 8) return 0;
    const u64 lane = join(p.header[threadIdx.x * 2], p.header[threadIdx.x * 2 + 1]);
    u8 *slot = pointer<u8>(item.slot) + threadIdx.x * 8;
    for (u32 at = 0; at < 8; ++at) slot[at] = u8(lane >> 8 * at);
    return mix(lane, threadIdx.x);
}

template <class E, class F, u32 COUNT> KVASIR_INLINE void quantise_batch(const QuantiseParameters &p) {
    const Share share = share_of(p.tiles);
    Running running = {0, 0, 0};
    for (u32 tile = share.first; tile < share.last; ++tile) {
        const u32 number = divide(tile, p.item_tiles);
        if (p.sums.checksums) turn_to(running, number, p.sums, p.status, p.item_tiles.divisor, p.slot_bytes);
        const Item item = load_item(p.items, number);
        const u32 refused = (item.block >= p.paged.block_count ? STATUS_BLOCK : 0) |
                            (item.slot & (COUNT - 1) ? STATUS_MISALIGNED : 0);
        if (refused) {
            if (threadIdx.x == 0) report(p.status, number, refused);
            continue;
        }
        const u32 in_item = tile - number * p.item_tiles.divisor;
        if (in_item == 0) running.sum += write_header(p, item);
        const u32 part_number = in_item < p.parts[0].tiles ? 0 : 1;
        const Part &part = p.parts[part_number];
        const u32 in_part = part_number ? in_item - p.parts[0].tiles : in_item;
        if (part.group == 0) {
            const u32 work = in_part * QUANTISE_THREADS + threadIdx.x;
            running.sum += quantise_channels<E, F, COUNT>(p, part, item, number, part_number, work);
        } else {
            const u32 work = in_part * (QUANTISE_THREADS >> part.lanes_shift) + (threadIdx.x >> part.lanes_shift);
            running.sum += quantise_groups<E, F, COUNT>(p, part, item, number, part_number, work);
        }
    }
    if (p.sums.checksums && running.tiles)
        deliver(p.sums, p.status, running.item, running.sum, running.tiles, p.item_tiles.divisor, p.slot_bytes);
}

#define KVASIR_QUANTISE_KERNELS(X)                                                                                     \
    X(kvasir_quantise_bf16_fp8_8, Bf16, Fp8, 8)                                                                        \
    X(kvasir_quantise_bf16_fp8_1, Bf16, Fp8, 1)                                                                        \
    X(kvasir_quantise_bf16_int8_8, Bf16, Int8, 8)                                                                      \
    X(kvasir_quantise_bf16_int8_1, Bf16, Int8, 1)                                                                      \
    X(kvasir_quantise_f16_fp8_8, F16, Fp8, 8)                                                                          \
    X(kvasir_quantise_f16_fp8_1, F16, Fp8, 1)                                                                          \
    X(kvasir_quantise_f16_int8_8, F16, Int8, 8)                                                                        \
    X(kvasir_quantise_f16_int8_1, F16, Int8, 1)                                                                        \
    X(kvasir_quantise_f32_fp8_8, F32, Fp8, 8)                                                                          \
    X(kvasir_quantise_f32_fp8_1, F32, Fp8, 1)                                                                          \
    X(kvasir_quantise_f32_int8_8, F32, Int8, 8)                                                                        \
    X(kvasir_quantise_f32_int8_1, F32, Int8, 1)

#define KVASIR_QUANTISE(name, E, F, COUNT)                                                                             \
    extern "C" __global__ void __launch_bounds__(QUANTISE_THREADS, 2)                                                     \
    name(const __grid_constant__ QuantiseParameters p) { quantise_batch<E, F, COUNT>(p); }
KVASIR_QUANTISE_KERNELS(KVASIR_QUANTISE)
