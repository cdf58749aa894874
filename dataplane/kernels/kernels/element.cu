// Elements (bf16, fp16, fp32), codes (fp8 e4m3, int8) and scales, to the bit as kvstore-quantise has them.
//
// Every product, sum and quotient is written with a rounding intrinsic, so that no compiler option contracts
// it into a fused multiplication; compile without `--ftz` and `--use_fast_math`: denormals count.

KVASIR_INLINE u32 bits_of(float value) { return __float_as_uint(value); }
KVASIR_INLINE float float_of(u32 bits) { return __uint_as_float(bits); }
KVASIR_INLINE float clamp(float value, float most) { return fmaxf(fminf(value, most), -most); }

constexpr u32 NOT_FINITE = 0x7f800000U;
constexpr u32 LEAST_NORMAL = 0x00800000U;

struct Bf16 {
    typedef u16 Raw;
    static constexpr u32 NAN_BITS = 0x7fc0;
    static KVASIR_INLINE float load(u16 raw) { return float_of(u32(raw) << 16); }
    static KVASIR_INLINE u16 store(float value) {
        const u32 bits = bits_of(clamp(value, float_of(0x7f7f0000U)));
        return u16((bits + 0x7fffU + (bits >> 16 & 1)) >> 16);
    }
};

struct F16 {
    typedef u16 Raw;
    static constexpr u32 NAN_BITS = 0x7e00;
    static KVASIR_INLINE float load(u16 raw) {
        const u32 magnitude = raw & 0x7fffU;
        // Exponent and mantissa as those of a single, then 2^112 to correct the bias: exact for denormals
        // too.
        const u32 finite = bits_of(__fmul_rn(float_of(magnitude << 13), float_of(239U << 23)));
        const u32 bits = magnitude >= 0x7c00U ? NOT_FINITE | magnitude << 13 : finite;
        return float_of(bits | (raw & 0x8000U) << 16);
    }
    static KVASIR_INLINE u16 store(float value) {
        const float magnitude = fminf(float_of(bits_of(value) & 0x7fffffffU), 65504.0f);
        const u32 bits = bits_of(magnitude);
        const u32 normal = ((bits + 0xfffU + (bits >> 13 & 1)) >> 13) - (112U << 10);
        // A sum with a half has 2^-24, the step of denormals, as its last bit.
        const u32 subnormal = bits_of(__fadd_rn(magnitude, 0.5f)) - bits_of(0.5f);
        return u16((bits < 113U << 23 ? subnormal : normal) | (bits_of(value) >> 16 & 0x8000U));
    }
};

struct F32 {
    typedef u32 Raw;
    static constexpr u32 NAN_BITS = 0x7fc00000;
    static KVASIR_INLINE float load(u32 raw) { return float_of(raw); }
    static KVASIR_INLINE u32 store(float value) { return bits_of(clamp(value, float_of(0x7f7fffffU))); }
};

// Symmetric int8.
struct Int8 {
    static constexpr float MAX = 127.0f;
    static KVASIR_INLINE u8 encode(float value) {
        // 1.5 × 2^23: the low byte of the sum's bits is the nearest integer in two's complement.
        return u8(bits_of(__fadd_rn(clamp(value, 127.0f), 12582912.0f)));
    }
    static KVASIR_INLINE u16 encode_pair(float low, float high) { return u16(encode(low) | encode(high) << 8); }
    static KVASIR_INLINE bool is_nan(u8) { return false; }
    static KVASIR_INLINE float decode(u8 code) { return float(int(static_cast<signed char>(code))); }
};

// OCP fp8 e4m3.
struct Fp8 {
    static constexpr float MAX = 448.0f;
    static KVASIR_INLINE u8 encode(float value) {
        const float magnitude = fminf(float_of(bits_of(value) & 0x7fffffffU), 448.0f);
        const u32 bits = bits_of(magnitude);
        const u32 normal = ((bits + 0x7ffffU + (bits >> 20 & 1)) >> 20) - (120U << 3);
        // The last bit of a sum with 2^14 is 2^-9, the step of denormals.
        const u32 subnormal = bits_of(__fadd_rn(magnitude, 16384.0f)) - bits_of(16384.0f);
        return u8((bits < 121U << 23 ? subnormal : normal) | (bits_of(value) >> 24 & 0x80U));
    }
    static KVASIR_INLINE u16 encode_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && !defined(KVASIR_PORTABLE)
        u16 pair;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
        return pair;
#else
        return u16(encode(low) | encode(high) << 8);
#endif
    }
    static KVASIR_INLINE bool is_nan(u8 code) { return (code & 0x7f) == 0x7f; }
    static KVASIR_INLINE float decode(u8 code) {
        // Exponent and mantissa as those of a single, then 2^120 to correct the bias: exact for denormals
        // too.
        const float magnitude = __fmul_rn(float_of(u32(code & 0x7f) << 20), float_of(247U << 23));
        return float_of(bits_of(magnitude) | u32(code & 0x80) << 24);
    }
};

// A restored element. A NaN has the one representation that the processor gives it, not that of the machine.
template <class E, class F> KVASIR_INLINE typename E::Raw restore(u8 code, float scale) {
    if (F::is_nan(code)) return typename E::Raw(E::NAN_BITS | u32(code >> 7) << (8 * sizeof(typename E::Raw) - 1));
    return E::store(__fmul_rn(F::decode(code), scale));
}

// The scale of a group whose greatest magnitude has these bits; bf16 scales are rounded up.
template <class F> KVASIR_INLINE float scale_of(u32 greatest, bool as_bf16) {
    const float wanted = fmaxf(__fdiv_rn(float_of(greatest), F::MAX), float_of(LEAST_NORMAL));
    return as_bf16 ? float_of((bits_of(wanted) + 0xffffU) & 0xffff0000U) : wanted;
}

KVASIR_INLINE bool usable(float scale) { return bits_of(scale) >= LEAST_NORMAL && bits_of(scale) < NOT_FINITE; }

// Neighbouring elements as they lie in the engine, and their codes. Eight are one 16-byte access (two for
// fp32).
template <class E, u32 COUNT> struct Elements {
    alignas(COUNT == 8 ? 16 : sizeof(typename E::Raw)) typename E::Raw raw[COUNT];
};

template <class E, u32 COUNT> KVASIR_INLINE Elements<E, COUNT> load_elements(const u8 *from) {
    Elements<E, COUNT> elements;
    if constexpr (COUNT == 8) {
#pragma unroll
        for (u32 at = 0; at < sizeof(elements) / 16; ++at)
            reinterpret_cast<uint4 *>(&elements)[at] = __ldcs(reinterpret_cast<const uint4 *>(from) + at);
    } else {
        elements.raw[0] = __ldcs(reinterpret_cast<const typename E::Raw *>(from));
    }
    return elements;
}

template <class E, u32 COUNT> KVASIR_INLINE void store_elements(u8 *to, const Elements<E, COUNT> &elements) {
    if constexpr (COUNT == 8) {
#pragma unroll
        for (u32 at = 0; at < sizeof(elements) / 16; ++at)
            __stwb(reinterpret_cast<uint4 *>(to) + at, reinterpret_cast<const uint4 *>(&elements)[at]);
    } else {
        __stwb(reinterpret_cast<typename E::Raw *>(to), elements.raw[0]);
    }
}

template <class E, u32 COUNT> KVASIR_INLINE void magnitudes(const Elements<E, COUNT> &elements, u32 *greatest) {
#pragma unroll
    for (u32 at = 0; at < COUNT; ++at)
        greatest[at] = max(greatest[at], bits_of(E::load(elements.raw[at])) & 0x7fffffffU);
}

template <class E, u32 COUNT> KVASIR_INLINE u32 greatest_of(const Elements<E, COUNT> &elements, u32 greatest) {
#pragma unroll
    for (u32 at = 0; at < COUNT; ++at) greatest = max(greatest, bits_of(E::load(elements.raw[at])) & 0x7fffffffU);
    return greatest;
}

// Codes of eight elements as one 8-byte lane; of one element, in its low byte.
template <class E, class F, u32 COUNT, class Inverse>
KVASIR_INLINE u64 encode_elements(const Elements<E, COUNT> &elements, const Inverse &inverse) {
    if constexpr (COUNT == 1) return F::encode(__fmul_rn(E::load(elements.raw[0]), inverse(0)));
    u64 codes = 0;
#pragma unroll
    for (u32 at = 0; at + 1 < COUNT; at += 2) {
        const float low = __fmul_rn(E::load(elements.raw[at]), inverse(at));
        const float high = __fmul_rn(E::load(elements.raw[at + 1]), inverse(at + 1));
        codes |= u64(F::encode_pair(low, high)) << 8 * at;
    }
    return codes;
}

template <u32 COUNT> KVASIR_INLINE void store_codes(u8 *to, u64 codes) {
    if constexpr (COUNT == 8)
        __stwb(reinterpret_cast<u64 *>(to), codes);
    else
        __stwb(to, u8(codes));
}
