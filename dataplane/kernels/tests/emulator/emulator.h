// The words of CUDA C++ that the kernels use, for a processor: every thread of a thread block is a fiber with
// a stack of its own, so that barriers and shuffles really wait. Thread blocks run one after the other, and
// blocks and threads in an order that a seed decides. Not emulated: time, caches, memory ordering between
// thread blocks.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define KVASIR_EMULATED 1
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

struct dim3 {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};

// Of the fiber that runs.
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
// The processor's address of a device address.
void *translate(unsigned long long address);
// Waits for all threads of the block.
void barrier();
// Wait for all lanes of the mask; returns what the other lane gave.
unsigned long long exchange(unsigned mask, unsigned long long value, unsigned lane);
unsigned lane();
// Lets other fibers run before and after an atomic operation.
void yield();
}

template <class T> T *pointer(unsigned long long address) {
    static_assert(sizeof(unsigned long long) == sizeof(void *));
    return static_cast<T *>(emulator::translate(address));
}

inline void __syncthreads() { emulator::barrier(); }
inline void __threadfence() {}

inline unsigned long long __shfl_xor_sync(unsigned mask, unsigned long long value, unsigned distance) {
    return emulator::exchange(mask, value, emulator::lane() ^ distance);
}

template <class T, class V> T atomicAdd(T *place, V value) {
    emulator::yield();
    const T before = *place;
    *place = before + static_cast<T>(value);
    emulator::yield();
    return before;
}
template <class T, class V> T atomicOr(T *place, V value) {
    emulator::yield();
    const T before = *place;
    *place = before | static_cast<T>(value);
    return before;
}
template <class T, class V> T atomicExch(T *place, V value) {
    emulator::yield();
    const T before = *place;
    *place = static_cast<T>(value);
    return before;
}

template <class T> T __ldg(const T *place) { return *place; }
template <class T> T __ldcs(const T *place) { return *place; }
template <class T> void __stcs(T *place, T value) { *place = value; }
template <class T> void __stwb(T *place, T value) { *place = value; }

inline unsigned min(unsigned one, unsigned other) { return one < other ? one : other; }
inline unsigned __umulhi(unsigned one, unsigned other) {
    return static_cast<unsigned>(static_cast<unsigned long long>(one) * other >> 32);
}
