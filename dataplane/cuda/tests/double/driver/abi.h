/* What the double takes from cuda.h: abi.c holds it against the real one. */
#ifndef KVASIR_DOUBLE_ABI_H
#define KVASIR_DOUBLE_ABI_H
#include <stddef.h>

typedef unsigned long long address_t;
typedef int result_t;

/* Results. */
enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_IMAGE = 200, INVALID_CONTEXT = 201, MAP_FAILED_ERROR = 205, NO_BINARY = 209, INVALID_PTX = 218,
    OPERATING_SYSTEM = 304, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801, DRIVER_MISMATCH = 803,
    CAPTURE_UNSUPPORTED = 900
};

/* Attributes of devices and of addresses. */
enum {
    MAX_PITCH = 11, MULTIPROCESSOR_COUNT = 16, ASYNC_ENGINE_COUNT = 40, UNIFIED_ADDRESSING = 41, CAPABILITY_MAJOR = 75,
    CAPABILITY_MINOR = 76, DIRECT_RDMA_SUPPORTED = 116, DIRECT_FLUSH_OPTIONS = 117, DIRECT_WRITES_ORDERING = 118,
    DMA_BUF_SUPPORTED = 124
};
enum { MEMORY_TYPE = 2, SYNC_MEMOPS = 6, DEVICE_ORDINAL = 9 };

/* Other arguments. */
enum {
    MEMORY_HOST = 1, MEMORY_DEVICE = 2, MEMORY_UNIFIED = 4, ORDER_STREAM = 1, JIT_ERROR_LOG = 5,
    JIT_ERROR_LOG_BYTES = 6, FLUSH_CURRENT_CONTEXT = 0, FLUSH_TO_OWNER = 100, FLUSH_TO_ALL = 200,
    IPC_LAZY_PEER_ACCESS = 1, HANDLE_DMA_BUF = 1, RANGE_PCIE = 1, CAPTURE_MODE_RELAXED = 2
};

/* CUDA_MEMCPY2D. */
struct rows {
    size_t from_x, from_y;
    int from_type;
    const void *from_host;
    address_t from_device;
    void *from_array;
    size_t from_pitch, to_x, to_y;
    int to_type;
    void *to_host;
    address_t to_device;
    void *to_array;
    size_t to_pitch, width, height;
};

/* CUmemcpyAttributes; a hint is a type and a number. */
struct attributes {
    int order;
    int hints[4];
    unsigned flags;
};

#endif
