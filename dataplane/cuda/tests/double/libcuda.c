/*
 * A double of the CUDA driver, for machines without one: the functions that this crate calls, with their
 * documented checks and error codes, over host memory.
 *
 * Device memory is a memfd that is mapped twice. The address that is handed out is a mapping nobody may touch, so
 * that a processor that reads device memory by mistake faults, as it would on hardware; the double copies through
 * the second mapping. A stream is a thread that runs its operations in order. The copies of one batch run in a
 * shuffled order, since the driver promises none. The address of freed memory is never used again, so that a stale
 * pointer is always an error.
 *
 * Variables named kvasir_double_* are settings, faults and counts; see the list. Kernels: an image that begins
 * with "emulator:PATH\n", as machine code behind ELF's first four bytes, is a shared object with kvasir_emulate and
 * kvasir_parameter_sizes; it may call kvasir_translate. Compile with -DKVASIR_DOUBLE_OLD for a driver without what came after 11.4.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef unsigned long long address_t;
typedef int result_t;

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_IMAGE = 200, INVALID_CONTEXT = 201, MAP_FAILED_ERROR = 205, INVALID_PTX = 218, INVALID_HANDLE = 400,
    NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, PEER_ALREADY_ENABLED = 704, ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900
};

/* Settings and faults. */
int64_t kvasir_double_devices = 2;
int64_t kvasir_double_version = 12080;
int64_t kvasir_double_initialise = 0;       /* what cuInit returns */
int64_t kvasir_double_delay_us = 0;         /* before each operation of a stream */
int64_t kvasir_double_memory = 1 << 30;     /* bytes of each device */
int64_t kvasir_double_peers = 1;            /* devices can reach each other */
int64_t kvasir_double_no_dmabuf = 0;        /* 1: the device cannot export */
int64_t kvasir_double_no_pcie_flag = 0;     /* 1: the mapping cannot be chosen */
int64_t kvasir_double_no_ipc = 0;
int64_t kvasir_double_fault_copy = 0;       /* n: the n-th copy from now breaks the context */
int64_t kvasir_double_refuse_copy = 0;      /* n: the n-th call of a copy from now is an invalid value */
int64_t kvasir_double_refuse_batch = 0;     /* what cuMemcpyBatchAsync returns */
int64_t kvasir_double_refuse_register = 0;  /* what cuMemHostRegister returns */
int64_t kvasir_double_refuse_record = 0;    /* n: the n-th cuEventRecord from now fails */
int64_t kvasir_double_refuse_synchronise = 0; /* what cuStreamSynchronize returns, at once */
int64_t kvasir_double_refuse_unregister = 0; /* what cuMemHostUnregister returns */
int64_t kvasir_double_capturing = 0;        /* 1: another thread records a graph and forbids unsafe calls to all */
int64_t kvasir_double_no_capture_mode = 0;  /* 1: a thread's mode cannot be exchanged */
int64_t kvasir_double_refuse_machine_code = 0; /* what cuModuleLoadDataEx returns for it */
int64_t kvasir_double_range_bytes = 0;      /* n: an allocation says that it has so many bytes: the rest is another */
int64_t kvasir_double_flush_options = 1;    /* 1: the host can flush what NICs have written */
int64_t kvasir_double_writes_ordering = 0;  /* 0: none, 100: for the owner, 200: for all devices */
/* What is alive. */
_Atomic int64_t kvasir_double_allocations, kvasir_double_events, kvasir_double_streams, kvasir_double_registrations;
_Atomic int64_t kvasir_double_modules, kvasir_double_graphs, kvasir_double_contexts, kvasir_double_imports;
/* What was called, or done. */
_Atomic int64_t kvasir_double_copies, kvasir_double_copy_calls, kvasir_double_batch_calls, kvasir_double_row_calls;
_Atomic int64_t kvasir_double_pageable, kvasir_double_launches;
_Atomic int64_t kvasir_double_captures_spoilt, kvasir_double_direct_flushes, kvasir_double_resolved_by_version;
_Atomic int64_t kvasir_double_exported_bytes; /* of the last export */

struct context {
    int device, retained;
    _Atomic int sticky;
    uint64_t peers;
};

struct allocation {
    struct allocation *next;
    address_t address;
    size_t bytes, mapped;
    unsigned char *alias;
    int descriptor, device, imported, freed;
};

struct registration {
    struct registration *next;
    address_t address;
    size_t bytes;
};

struct event {
    struct event *next;
    uint64_t recorded, passed;
    int pending, destroyed;
};

enum kind { COPY, BATCH, RECORD, LAUNCH, WAIT };

struct piece {
    unsigned char *to;
    const unsigned char *from;
    size_t bytes, rows, to_pitch, from_pitch;
};

struct function {
    struct function *next;
    char name[128];
    int (*emulate)(const char *, const unsigned *, const unsigned *, unsigned, void **);
    int (*sizes)(const char *, size_t *, int);
};

struct operation {
    struct operation *next;
    enum kind kind;
    size_t count;
    struct piece *pieces;
    struct event *event;
    uint64_t ticket;
    struct function *function;
    unsigned grid[3], block[3], shared;
    size_t parameter_count, parameter_offsets[64];
    unsigned char *parameters;
};

struct stream {
    struct stream *next;
    struct context *context;
    pthread_t thread;
    struct operation *first, **last;
    int busy, closing, priority;
    struct graph *capture;
};

struct graph {
    struct operation *first, **last;
};

struct module {
    void *library;
    struct function *functions;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct context contexts[64];
static struct allocation *allocations;
static struct registration *registrations;
static struct event *events;
static struct stream *streams;
static size_t used[64];
static int initialised;
static uint32_t shuffle = 12345;
static __thread struct context *stack[32];
static __thread int depth;

static struct context *current(void) { return depth > 0 ? stack[depth - 1] : NULL; }

/* Every call that needs a context begins so. */
#define ENTER()                                                                                        \
    if (!initialised) return NOT_INITIALIZED;                                                          \
    struct context *context = current();                                                               \
    if (!context || !context->retained) return INVALID_CONTEXT

#define ENTER_HEALTHY()                                                                                \
    ENTER();                                                                                           \
    if (context->sticky) return context->sticky

/* While another thread records in the global mode, calls that may wait for the device are refused, and spoil the
 * recording, unless this thread's own mode is the relaxed one (2). */
static __thread int capture_mode;

static int is_forbidden(void) {
    if (!kvasir_double_capturing || capture_mode == 2) return 0;
    kvasir_double_captures_spoilt++;
    return 1;
}

#define UNSAFE()                                                                                       \
    if (is_forbidden()) return CAPTURE_UNSUPPORTED

static int counted_down(int64_t *fault) { return *fault > 0 && --*fault == 0; }

static result_t finish(result_t result) {
    pthread_mutex_unlock(&lock);
    return result;
}

/* Initialisation and devices. */

static void environment(const char *name, int64_t *value) {
    const char *text = getenv(name);
    if (text && *text) *value = strtoll(text, NULL, 10);
}

result_t cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (!initialised) {
        environment("KVASIR_DOUBLE_DELAY_US", &kvasir_double_delay_us);
        environment("KVASIR_DOUBLE_NO_DMABUF", &kvasir_double_no_dmabuf);
        environment("KVASIR_DOUBLE_DEVICES", &kvasir_double_devices);
        environment("KVASIR_DOUBLE_MEMORY", &kvasir_double_memory);
        /* Emulators shall find kvasir_translate, however this was loaded. */
        Dl_info self;
        if (dladdr((void *)cuInit, &self)) dlopen(self.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
    }
    if (kvasir_double_initialise) return finish((result_t)kvasir_double_initialise);
    if (!kvasir_double_devices) return finish(NO_DEVICE);
    initialised = 1;
    return finish(SUCCESS);
}

result_t cuDriverGetVersion(int *version) {
    *version = (int)kvasir_double_version;
    return SUCCESS;
}

static const struct { result_t code; const char *name; } names[] = {
    {SUCCESS, "CUDA_SUCCESS"}, {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"}, {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"}, {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"}, {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
    {MAP_FAILED_ERROR, "CUDA_ERROR_MAP_FAILED"}, {INVALID_PTX, "CUDA_ERROR_INVALID_PTX"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"}, {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
    {NOT_READY, "CUDA_ERROR_NOT_READY"}, {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {PEER_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"}, {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"}, {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM"}, {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
};

result_t cuGetErrorName(result_t code, const char **name) {
    for (size_t at = 0; at < sizeof names / sizeof *names; at++)
        if (names[at].code == code) {
            *name = names[at].name;
            return SUCCESS;
        }
    *name = NULL;
    return INVALID_VALUE;
}

#define DEVICE(device)                                                                                 \
    if (!initialised) return NOT_INITIALIZED;                                                          \
    if ((device) < 0 || (device) >= kvasir_double_devices) return INVALID_DEVICE

result_t cuDeviceGetCount(int *count) {
    if (!initialised) return NOT_INITIALIZED;
    *count = (int)kvasir_double_devices;
    return SUCCESS;
}

result_t cuDeviceGet(int *device, int ordinal) {
    DEVICE(ordinal);
    *device = ordinal;
    return SUCCESS;
}

result_t cuDeviceGetName(char *name, int bytes, int device) {
    DEVICE(device);
    snprintf(name, (size_t)bytes, "Double %d", device);
    return SUCCESS;
}

result_t cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    DEVICE(device);
    for (int at = 0; at < 16; at++) uuid[at] = (unsigned char)(0xF0 - at * 16 + device);
    return SUCCESS;
}

result_t cuDeviceTotalMem_v2(size_t *bytes, int device) {
    DEVICE(device);
    *bytes = (size_t)kvasir_double_memory;
    return SUCCESS;
}

result_t cuDeviceGetPCIBusId(char *address, int bytes, int device) {
    DEVICE(device);
    snprintf(address, (size_t)bytes, "0000:%02X:00.0", 0xAB + device);
    return SUCCESS;
}

result_t cuDeviceGetAttribute(int *value, int attribute, int device) {
    DEVICE(device);
    switch (attribute) {
    case 11: *value = 0x7FFFFFFF; return SUCCESS;   /* MAX_PITCH */
    case 16: *value = 2; return SUCCESS;            /* MULTIPROCESSOR_COUNT */
    case 40: *value = 3; return SUCCESS;            /* ASYNC_ENGINE_COUNT */
    case 41: *value = 1; return SUCCESS;            /* UNIFIED_ADDRESSING */
    case 75: *value = 9; return SUCCESS;            /* COMPUTE_CAPABILITY_MAJOR */
    case 76: *value = 0; return SUCCESS;
    case 116: *value = 1; return SUCCESS;           /* GPU_DIRECT_RDMA_SUPPORTED */
    case 117: *value = (int)kvasir_double_flush_options; return SUCCESS;
    case 118: *value = (int)kvasir_double_writes_ordering; return SUCCESS;
#ifndef KVASIR_DOUBLE_OLD
    case 124: *value = !kvasir_double_no_dmabuf; return SUCCESS; /* DMA_BUF_SUPPORTED */
#endif
    default: return INVALID_VALUE;
    }
}

result_t cuDeviceCanAccessPeer(int *can, int device, int peer) {
    DEVICE(device);
    DEVICE(peer);
    *can = device != peer && kvasir_double_peers;
    return SUCCESS;
}

result_t cuDeviceGetP2PAttribute(int *value, int attribute, int device, int peer) {
    DEVICE(device);
    DEVICE(peer);
    if (device == peer || attribute < 1 || attribute > 4) return INVALID_VALUE;
    *value = attribute == 1 ? 0 : kvasir_double_peers != 0;
    return SUCCESS;
}

/* Contexts: the primary one of each device. */

result_t cuDevicePrimaryCtxRetain(struct context **context, int device) {
    DEVICE(device);
    pthread_mutex_lock(&lock);
    *context = &contexts[device];
    if (!(*context)->retained++) {
        (*context)->device = device;
        (*context)->sticky = 0;
        (*context)->peers = 0;
        kvasir_double_contexts++;
    }
    return finish(SUCCESS);
}

result_t cuDevicePrimaryCtxRelease_v2(int device) {
    DEVICE(device);
    pthread_mutex_lock(&lock);
    if (!contexts[device].retained) return finish(INVALID_CONTEXT);
    if (!--contexts[device].retained) kvasir_double_contexts--;
    return finish(SUCCESS);
}

result_t cuCtxPushCurrent_v2(struct context *context) {
    if (!initialised) return NOT_INITIALIZED;
    if (!context || !context->retained || depth == 32) return INVALID_CONTEXT;
    stack[depth++] = context;
    return SUCCESS;
}

result_t cuCtxPopCurrent_v2(struct context **context) {
    if (!initialised) return NOT_INITIALIZED;
    if (!depth) return INVALID_CONTEXT;
    depth--;
    if (context) *context = stack[depth];
    return SUCCESS;
}

result_t cuCtxGetCurrent(struct context **context) {
    *context = current();
    return SUCCESS;
}

result_t cuCtxSetCurrent(struct context *context) {
    if (!initialised) return NOT_INITIALIZED;
    if (context && !context->retained) return INVALID_CONTEXT;
    if (depth) depth--;
    if (context) stack[depth++] = context;
    return SUCCESS;
}

result_t cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER_HEALTHY();
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return SUCCESS;
}

result_t cuCtxEnablePeerAccess(struct context *peer, unsigned flags) {
    ENTER_HEALTHY();
    if (flags) return INVALID_VALUE;
    if (!peer || !peer->retained || peer == context) return INVALID_CONTEXT;
    if (!kvasir_double_peers) return 217;
    if (context->peers & 1ull << peer->device) return PEER_ALREADY_ENABLED;
    context->peers |= 1ull << peer->device;
    return SUCCESS;
}

/* Wait until nothing is queued on a stream, or on any stream, the destroyed ones too. With the lock held. */
static void drain(struct stream *stream) {
    while (stream->first || stream->busy) pthread_cond_wait(&changed, &lock);
}

static void drain_all(void) {
    for (struct stream *stream = streams; stream;)
        if (stream->first || stream->busy) {
            pthread_cond_wait(&changed, &lock);
            stream = streams; /* some may be gone */
        } else {
            stream = stream->next;
        }
}

/* Memory. */

static struct allocation *containing(address_t address) {
    for (struct allocation *at = allocations; at; at = at->next)
        if (address >= at->address && address < at->address + at->mapped) return at;
    return NULL;
}

/* Maps the descriptor twice: where nobody may touch it, and for the double itself. */
static struct allocation *map(int descriptor, size_t bytes, size_t mapped, int device, int imported) {
    const size_t align = 2u << 20;
    unsigned char *reserved = mmap(NULL, mapped + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    unsigned char *alias = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
    struct allocation *new = calloc(1, sizeof *new);
    if (reserved == MAP_FAILED || alias == MAP_FAILED || !new) return NULL;
    new->address = ((address_t)reserved + align - 1) / align * align;
    new->bytes = bytes;
    new->mapped = mapped;
    new->alias = alias;
    new->descriptor = descriptor;
    new->device = device;
    new->imported = imported;
    new->next = allocations;
    allocations = new;
    return new;
}

result_t cuMemAlloc_v2(address_t *address, size_t bytes) {
    ENTER_HEALTHY();
    UNSAFE();
    if (!bytes) return INVALID_VALUE;
    size_t mapped = (bytes + (2u << 20) - 1) / (2u << 20) * (2u << 20);
    pthread_mutex_lock(&lock);
    if (used[context->device] + mapped > (size_t)kvasir_double_memory) return finish(OUT_OF_MEMORY);
    int descriptor = memfd_create("double", MFD_CLOEXEC);
    if (descriptor < 0 || ftruncate(descriptor, (off_t)mapped)) return finish(OUT_OF_MEMORY);
    struct allocation *new = map(descriptor, bytes, mapped, context->device, 0);
    if (!new) return finish(OUT_OF_MEMORY);
    used[context->device] += mapped;
    kvasir_double_allocations++;
    *address = new->address;
    return finish(SUCCESS);
}

static result_t end_of_memory(address_t address, int imported) {
    ENTER();
    pthread_mutex_lock(&lock);
    struct allocation *at = containing(address);
    if (!at || at->freed || at->address != address || at->imported != imported) return finish(INVALID_VALUE);
    if (!context->sticky) drain_all();
    munmap(at->alias, at->mapped);
    close(at->descriptor);
    at->freed = 1;
    if (imported) {
        kvasir_double_imports--;
    } else {
        used[at->device] -= at->mapped;
        kvasir_double_allocations--;
    }
    return finish(context->sticky);
}

result_t cuMemFree_v2(address_t address) { return end_of_memory(address, 0); }

result_t cuMemGetAddressRange_v2(address_t *base, size_t *bytes, address_t address) {
    ENTER_HEALTHY();
    pthread_mutex_lock(&lock);
    struct allocation *at = containing(address);
    if (!at || at->freed) return finish(NOT_FOUND);
    if (base) *base = at->address;
    if (bytes) *bytes = kvasir_double_range_bytes ? (size_t)kvasir_double_range_bytes : at->bytes;
    return finish(SUCCESS);
}

result_t cuPointerSetAttribute(const void *value, int attribute, address_t address) {
    ENTER_HEALTHY();
    pthread_mutex_lock(&lock);
    struct allocation *at = containing(address);
    if (!value || !at || at->freed || at->imported || attribute != 6) return finish(INVALID_VALUE);
    return finish(SUCCESS);
}

static struct registration *registered(address_t address) {
    for (struct registration *at = registrations; at; at = at->next)
        if (address >= at->address && address < at->address + at->bytes) return at;
    return NULL;
}

static int is_mapped(address_t address) {
    long page = sysconf(_SC_PAGESIZE);
    return msync((void *)(address / (address_t)page * (address_t)page), (size_t)page, MS_ASYNC) == 0;
}

/* What the double itself reads and writes for an address, or NULL when the range is not one's to use. */
static unsigned char *resolve(address_t address, size_t bytes) {
    struct allocation *at = containing(address);
    if (at) {
        address_t offset = address - at->address;
        return !at->freed && offset + bytes <= at->bytes ? at->alias + offset : NULL;
    }
    struct registration *pinned = registered(address);
    if (pinned) return address + bytes <= pinned->address + pinned->bytes ? (unsigned char *)address : NULL;
    if (!address || !is_mapped(address) || !is_mapped(address + bytes - 1)) return NULL;
    kvasir_double_pageable++;
    return (unsigned char *)address;
}

void *kvasir_translate(unsigned long long address) {
    pthread_mutex_lock(&lock);
    struct allocation *at = containing(address);
    void *result = !at ? (void *)address : at->freed ? NULL : at->alias + (address - at->address);
    pthread_mutex_unlock(&lock);
    return result;
}

result_t cuMemHostRegister_v2(void *start, size_t bytes, unsigned flags) {
    ENTER_HEALTHY();
    if (!start || !bytes || flags > 15) return INVALID_VALUE;
    if (kvasir_double_refuse_register) return (result_t)kvasir_double_refuse_register;
    address_t address = (address_t)start;
    if (!is_mapped(address) || !is_mapped(address + bytes - 1)) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (struct registration *at = registrations; at; at = at->next)
        if (address < at->address + at->bytes && at->address < address + bytes) return finish(ALREADY_REGISTERED);
    struct registration *new = calloc(1, sizeof *new);
    *new = (struct registration){registrations, address, bytes};
    registrations = new;
    kvasir_double_registrations++;
    return finish(SUCCESS);
}

result_t cuMemHostUnregister(void *start) {
    ENTER();
    if (kvasir_double_refuse_unregister) return (result_t)kvasir_double_refuse_unregister;
    pthread_mutex_lock(&lock);
    if (!context->sticky) drain_all();
    for (struct registration **at = &registrations; *at; at = &(*at)->next)
        if ((*at)->address == (address_t)start) {
            struct registration *old = *at;
            *at = old->next;
            free(old);
            kvasir_double_registrations--;
            return finish(context->sticky);
        }
    return finish(NOT_REGISTERED);
}

result_t cuMemHostGetDevicePointer_v2(address_t *address, void *start, unsigned flags) {
    ENTER_HEALTHY();
    pthread_mutex_lock(&lock);
    if (flags || !registered((address_t)start)) return finish(INVALID_VALUE);
    *address = (address_t)start;
    return finish(SUCCESS);
}

/* Sharing: between processes, and with other devices. */

struct ipc {
    char magic[8];
    int32_t process, descriptor, device, unused;
    uint64_t bytes, mapped;
    unsigned char rest[24];
};
_Static_assert(sizeof(struct ipc) == 64, "CUipcMemHandle");

result_t cuIpcGetMemHandle(struct ipc *handle, address_t address) {
    ENTER_HEALTHY();
    if (kvasir_double_no_ipc) return NOT_SUPPORTED;
    pthread_mutex_lock(&lock);
    struct allocation *at = containing(address);
    if (!at || at->freed || at->imported) return finish(INVALID_VALUE);
    *handle = (struct ipc){"double!", getpid(), at->descriptor, at->device, 0, at->bytes, at->mapped, {0}};
    return finish(SUCCESS);
}

result_t cuIpcOpenMemHandle_v2(address_t *address, struct ipc handle, unsigned flags) {
    ENTER_HEALTHY();
    if (memcmp(handle.magic, "double!", 8) || flags != 1) return INVALID_VALUE;
    if (handle.process == getpid()) return INVALID_CONTEXT;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.process, handle.descriptor);
    pthread_mutex_lock(&lock);
    int descriptor = open(path, O_RDWR | O_CLOEXEC);
    struct allocation *new =
        descriptor < 0 ? NULL : map(descriptor, handle.bytes, handle.mapped, handle.device, 1);
    if (!new) return finish(MAP_FAILED_ERROR);
    kvasir_double_imports++;
    *address = new->address;
    return finish(SUCCESS);
}

result_t cuIpcCloseMemHandle(address_t address) { return end_of_memory(address, 1); }

#ifndef KVASIR_DOUBLE_OLD
result_t cuMemGetHandleForAddressRange(void *handle, address_t address, size_t bytes, int type, unsigned long long flags) {
    ENTER_HEALTHY();
    if (kvasir_double_no_dmabuf || (flags == 1 && kvasir_double_no_pcie_flag)) return NOT_SUPPORTED;
    if (type != 1 || flags > 1 || address % 4096 || bytes % 4096 || !bytes) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct allocation *at = containing(address);
    if (!at || at->freed || at->imported || address + bytes > at->address + at->mapped) return finish(INVALID_VALUE);
    if (address != at->address) return finish(NOT_SUPPORTED); /* a memfd has no start of its own */
    kvasir_double_exported_bytes = (int64_t)bytes;
    *(int *)handle = fcntl(at->descriptor, F_DUPFD_CLOEXEC, 0);
    return finish(SUCCESS);
}
#endif

/* Streams and events. */

static void pass(struct event *event) {
    if (event->destroyed && !event->pending) free(event);
}

static void shuffled_copies(struct operation *operation) {
    for (size_t at = operation->count; at > 1; at--) {
        shuffle = shuffle * 1664525u + 1013904223u;
        size_t other = (shuffle >> 8) % at;
        struct piece swap = operation->pieces[at - 1];
        operation->pieces[at - 1] = operation->pieces[other];
        operation->pieces[other] = swap;
    }
}

/* With the lock held, which it gives up while it works. */
static void perform(struct stream *stream, struct operation *operation) {
    struct context *context = stream->context;
    int fault = 0;
    if (operation->kind == BATCH) shuffled_copies(operation);
    if (operation->kind == WAIT)
        while (operation->event->passed < operation->ticket && !context->sticky) pthread_cond_wait(&changed, &lock);
    for (size_t at = 0; at < operation->count && !context->sticky; at++) {
        if (counted_down(&kvasir_double_fault_copy)) {
            context->sticky = ILLEGAL_ADDRESS;
            pthread_cond_broadcast(&changed);
            break;
        }
        kvasir_double_copies++;
        struct piece piece = operation->pieces[at];
        pthread_mutex_unlock(&lock);
        for (size_t row = 0; row < piece.rows; row++)
            memmove(piece.to + row * piece.to_pitch, piece.from + row * piece.from_pitch, piece.bytes);
        pthread_mutex_lock(&lock);
    }
    if (operation->kind == LAUNCH && !context->sticky) {
        void *parameters[64];
        for (size_t at = 0; at < operation->parameter_count; at++)
            parameters[at] = operation->parameters + operation->parameter_offsets[at];
        pthread_mutex_unlock(&lock);
        fault = operation->function->emulate(operation->function->name, operation->grid, operation->block,
                                             operation->shared, parameters);
        pthread_mutex_lock(&lock);
        kvasir_double_launches++;
    }
    if (fault) context->sticky = LAUNCH_FAILED;
    if (operation->event) {
        if (operation->kind == RECORD) operation->event->passed = operation->ticket;
        operation->event->pending--;
        pass(operation->event);
    }
}

static void *run(void *argument) {
    struct stream *stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->first && !stream->closing) pthread_cond_wait(&changed, &lock);
        if (!stream->first) break;
        struct operation *operation = stream->first;
        stream->first = operation->next;
        if (!stream->first) stream->last = &stream->first;
        stream->busy = 1;
        if (kvasir_double_delay_us && operation->kind != RECORD && !stream->context->sticky) {
            pthread_mutex_unlock(&lock);
            usleep((useconds_t)kvasir_double_delay_us);
            pthread_mutex_lock(&lock);
        }
        perform(stream, operation);
        free(operation->pieces);
        free(operation->parameters);
        free(operation);
        stream->busy = 0;
        pthread_cond_broadcast(&changed);
    }
    struct stream **link = &streams;
    while (*link != stream) link = &(*link)->next;
    *link = stream->next;
    free(stream);
    pthread_mutex_unlock(&lock);
    return NULL;
}

result_t cuStreamCreateWithPriority(struct stream **stream, unsigned flags, int priority) {
    ENTER_HEALTHY();
    if (flags > 1) return INVALID_VALUE;
    struct stream *new = calloc(1, sizeof *new);
    new->context = context;
    new->priority = priority;
    new->last = &new->first;
    pthread_mutex_lock(&lock);
    new->next = streams;
    streams = new;
    if (pthread_create(&new->thread, NULL, run, new)) return finish(OUT_OF_MEMORY);
    pthread_detach(new->thread);
    kvasir_double_streams++;
    *stream = new;
    return finish(SUCCESS);
}

result_t cuStreamGetPriority(struct stream *stream, int *priority) {
    ENTER_HEALTHY();
    *priority = stream->priority;
    return SUCCESS;
}

static int is_stream(struct stream *stream) {
    for (struct stream *at = streams; at; at = at->next)
        if (at == stream) return !at->closing;
    return 0;
}

/* Returns at once; the thread ends when it has done what is queued. */
result_t cuStreamDestroy_v2(struct stream *stream) {
    ENTER();
    pthread_mutex_lock(&lock);
    if (!is_stream(stream)) return finish(INVALID_HANDLE);
    stream->closing = 1;
    pthread_cond_broadcast(&changed);
    kvasir_double_streams--;
    return finish(context->sticky);
}

result_t cuStreamSynchronize(struct stream *stream) {
    ENTER_HEALTHY();
    UNSAFE();
    if (kvasir_double_refuse_synchronise) return (result_t)kvasir_double_refuse_synchronise;
    if (!stream) return INVALID_HANDLE; /* the default stream waits for everybody: nothing here uses it */
    pthread_mutex_lock(&lock);
    if (!is_stream(stream)) return finish(INVALID_HANDLE);
    if (stream->capture) return finish(CAPTURE_UNSUPPORTED);
    drain(stream);
    return finish(context->sticky);
}

static int is_event(struct event *event) {
    for (struct event *at = events; at; at = at->next)
        if (at == event) return 1;
    return 0;
}

result_t cuEventCreate(struct event **event, unsigned flags) {
    ENTER_HEALTHY();
    if (flags > 7) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    *event = calloc(1, sizeof **event);
    (*event)->next = events;
    events = *event;
    kvasir_double_events++;
    return finish(SUCCESS);
}

result_t cuEventDestroy_v2(struct event *event) {
    ENTER();
    pthread_mutex_lock(&lock);
    for (struct event **at = &events; *at; at = &(*at)->next)
        if (*at == event) {
            *at = event->next;
            event->destroyed = 1;
            pass(event);
            kvasir_double_events--;
            return finish(context->sticky);
        }
    return finish(INVALID_HANDLE);
}

result_t cuEventQuery(struct event *event) {
    ENTER_HEALTHY();
    UNSAFE();
    pthread_mutex_lock(&lock);
    if (!is_event(event)) return finish(INVALID_HANDLE);
    return finish(event->passed >= event->recorded ? SUCCESS : NOT_READY);
}

/* Queues an operation, or puts it into the graph that is being captured. With the lock held. */
static result_t enqueue(struct context *context, struct stream *stream, struct operation operation) {
    result_t result = !is_stream(stream) || stream->context != context ? INVALID_HANDLE : SUCCESS;
    if (!result && stream->capture && operation.kind != COPY && operation.kind != LAUNCH) result = CAPTURE_UNSUPPORTED;
    if (result) {
        free(operation.pieces);
        free(operation.parameters);
        return result;
    }
    struct operation *new = malloc(sizeof *new), ***last = &stream->last;
    *new = operation;
    new->next = NULL;
    if (stream->capture) last = &stream->capture->last;
    **last = new;
    *last = &new->next;
    if (operation.event) operation.event->pending++;
    pthread_cond_broadcast(&changed);
    return SUCCESS;
}

result_t cuEventRecord(struct event *event, struct stream *stream) {
    ENTER_HEALTHY();
    UNSAFE();
    pthread_mutex_lock(&lock);
    if (!is_event(event) || counted_down(&kvasir_double_refuse_record)) return finish(INVALID_HANDLE);
    struct operation operation = {.kind = RECORD, .event = event, .ticket = event->recorded + 1};
    result_t result = enqueue(context, stream, operation);
    if (!result) event->recorded++;
    return finish(result);
}

result_t cuStreamWaitEvent(struct stream *stream, struct event *event, unsigned flags) {
    ENTER_HEALTHY();
    pthread_mutex_lock(&lock);
    if (!is_event(event) || flags) return finish(INVALID_HANDLE);
    return finish(enqueue(context, stream, (struct operation){.kind = WAIT, .event = event, .ticket = event->recorded}));
}

/* Copies. */

static result_t copies(struct context *context, struct stream *stream, enum kind kind, struct piece *pieces, size_t count) {
    struct operation operation = {.kind = kind, .count = count, .pieces = malloc(count * sizeof *pieces)};
    memcpy(operation.pieces, pieces, count * sizeof *pieces);
    return enqueue(context, stream, operation);
}

result_t cuMemcpyAsync(address_t to, address_t from, size_t bytes, struct stream *stream) {
    ENTER_HEALTHY();
    kvasir_double_copy_calls++;
    if (!bytes) return SUCCESS;
    pthread_mutex_lock(&lock);
    struct piece piece = {resolve(to, bytes), resolve(from, bytes), bytes, 1, bytes, bytes};
    if (!piece.to || !piece.from || counted_down(&kvasir_double_refuse_copy)) return finish(INVALID_VALUE);
    return finish(copies(context, stream, COPY, &piece, 1));
}

/* Done at once, behind what the stream has. */
result_t cuMemsetD8Async(address_t to, unsigned char value, size_t bytes, struct stream *stream) {
    ENTER_HEALTHY();
    pthread_mutex_lock(&lock);
    struct allocation *at = containing(to);
    unsigned char *target = at ? resolve(to, bytes) : NULL;
    if (!target || !is_stream(stream)) return finish(INVALID_VALUE);
    drain(stream);
    memset(target, value, bytes);
    return finish(SUCCESS);
}

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

result_t cuMemcpy2DAsync_v2(const struct rows *rows, struct stream *stream) {
    ENTER_HEALTHY();
    kvasir_double_row_calls++;
    if (rows->from_type != 4 || rows->to_type != 4) return NOT_SUPPORTED;
    if (rows->from_pitch < rows->width || rows->to_pitch < rows->width) return INVALID_VALUE;
    if (rows->from_pitch > 0x7FFFFFFF || rows->to_pitch > 0x7FFFFFFF) return INVALID_VALUE;
    if (!rows->width || !rows->height) return SUCCESS;
    size_t from_bytes = (rows->height - 1) * rows->from_pitch + rows->width;
    size_t to_bytes = (rows->height - 1) * rows->to_pitch + rows->width;
    pthread_mutex_lock(&lock);
    struct piece piece = {resolve(rows->to_device, to_bytes), resolve(rows->from_device, from_bytes), rows->width,
                          rows->height, rows->to_pitch, rows->from_pitch};
    if (!piece.to || !piece.from || counted_down(&kvasir_double_refuse_copy)) return finish(INVALID_VALUE);
    return finish(copies(context, stream, COPY, &piece, 1));
}

#ifndef KVASIR_DOUBLE_OLD
struct attributes {
    int order;
    int hints[4];
    unsigned flags;
};

result_t cuMemcpyBatchAsync(address_t *to, address_t *from, size_t *bytes, size_t count, struct attributes *attributes,
                            size_t *indices, size_t attribute_count, size_t *failed, struct stream *stream) {
    ENTER_HEALTHY();
    kvasir_double_batch_calls++;
    *failed = SIZE_MAX;
    if (kvasir_double_refuse_batch) return (result_t)kvasir_double_refuse_batch;
    if (!count || !stream || attribute_count != 1 || indices[0] || attributes->order != 1) return INVALID_VALUE;
    struct piece *pieces = malloc(count * sizeof *pieces);
    pthread_mutex_lock(&lock);
    for (size_t at = 0; at < count; at++) {
        pieces[at] = (struct piece){resolve(to[at], bytes[at]), resolve(from[at], bytes[at]), bytes[at], 1, 0, 0};
        if (pieces[at].to && pieces[at].from && bytes[at] && !counted_down(&kvasir_double_refuse_copy)) continue;
        *failed = at;
        free(pieces);
        return finish(INVALID_VALUE);
    }
    result_t result = copies(context, stream, BATCH, pieces, count);
    free(pieces);
    return finish(result);
}

/* The forms of 12.8; of CUDA 13's the double knows none. As with NVIDIA's library, a name that is not known is a success
 * without an address, and needs no initialised driver. */
result_t cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    if (!symbol || !function || flags) return INVALID_VALUE;
    *function = !strcmp(symbol, "cuMemcpyBatchAsync") && version == 12080 ? (void *)cuMemcpyBatchAsync : NULL;
    if (status) *status = *function ? 0 : 1;
    if (*function) kvasir_double_resolved_by_version++;
    return SUCCESS;
}
#endif

result_t cuFlushGPUDirectRDMAWrites(int target, int scope) {
    ENTER_HEALTHY();
    if (target || (scope != 100 && scope != 200)) return INVALID_VALUE;
    if (!(kvasir_double_flush_options & 1)) return NOT_SUPPORTED;
    kvasir_double_direct_flushes++;
    return SUCCESS;
}

/* Modules and kernels. */

static result_t refuse_image(unsigned count, int *options, void **values, const char *reason, result_t result) {
    for (unsigned at = 0; at + 1 < count; at++)
        if (options[at] == 5 && options[at + 1] == 6) /* ERROR_LOG_BUFFER, its size */
            snprintf(values[at], (size_t)values[at + 1], "%s", reason);
    return result;
}

result_t cuModuleLoadDataEx(struct module **module, const void *image, unsigned count, int *options, void **values) {
    ENTER_HEALTHY();
    const char *text = image, *prefix = "emulator:";
    if (!image) return INVALID_VALUE;
    if (!memcmp(text, "\x7f" "ELF", 4)) {
        if (kvasir_double_refuse_machine_code) return (result_t)kvasir_double_refuse_machine_code;
        text += 4;
    }
    const char *end = strncmp(text, prefix, strlen(prefix)) ? NULL : strchr(text, '\n');
    if (!end) return refuse_image(count, options, values, "the image names no emulator", INVALID_PTX);
    char path[1024];
    snprintf(path, sizeof path, "%.*s", (int)(end - text - 9), text + 9);
    void *library = dlopen(path, RTLD_NOW);
    if (!library) return refuse_image(count, options, values, dlerror(), INVALID_IMAGE);
    *module = calloc(1, sizeof **module);
    (*module)->library = library;
    kvasir_double_modules++;
    return SUCCESS;
}

result_t cuModuleUnload(struct module *module) {
    ENTER();
    pthread_mutex_lock(&lock);
    drain_all();
    for (struct function *at = module->functions, *next; at; at = next) {
        next = at->next;
        free(at);
    }
    dlclose(module->library);
    free(module);
    kvasir_double_modules--;
    return finish(context->sticky);
}

result_t cuModuleGetFunction(struct function **function, struct module *module, const char *name) {
    ENTER_HEALTHY();
    struct function *new = calloc(1, sizeof *new);
    *(void **)&new->emulate = dlsym(module->library, "kvasir_emulate");
    *(void **)&new->sizes = dlsym(module->library, "kvasir_parameter_sizes");
    size_t sizes[64];
    if (!new->emulate || !new->sizes || strlen(name) >= sizeof new->name || new->sizes(name, sizes, 64) < 0) {
        free(new);
        return NOT_FOUND;
    }
    strcpy(new->name, name);
    new->next = module->functions;
    module->functions = new;
    *function = new;
    return SUCCESS;
}

result_t cuLaunchKernel(struct function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, struct stream *stream, void **parameters,
                        void **extra) {
    ENTER_HEALTHY();
    if (!function) return INVALID_HANDLE;
    uint64_t threads = (uint64_t)block_x * block_y * block_z;
    if (!grid_x || !grid_y || !grid_z || !threads || threads > 1024 || shared > 48 << 10 || extra) return INVALID_VALUE;
    size_t sizes[64], bytes = 0;
    int count = function->sizes(function->name, sizes, 64);
    if (count < 0 || count > 64 || (count && !parameters)) return INVALID_VALUE;
    struct operation operation = {.kind = LAUNCH, .function = function, .shared = shared};
    memcpy(operation.grid, (unsigned[]){grid_x, grid_y, grid_z}, sizeof operation.grid);
    memcpy(operation.block, (unsigned[]){block_x, block_y, block_z}, sizeof operation.block);
    for (int at = 0; at < count; at++) {
        operation.parameter_offsets[at] = bytes;
        bytes += (sizes[at] + 15) / 16 * 16;
    }
    operation.parameter_count = (size_t)count;
    operation.parameters = malloc(bytes + 1);
    for (int at = 0; at < count; at++)
        memcpy(operation.parameters + operation.parameter_offsets[at], parameters[at], sizes[at]);
    pthread_mutex_lock(&lock);
    return finish(enqueue(context, stream, operation));
}

/* Graphs: a list of operations. */

result_t cuThreadExchangeStreamCaptureMode(int *mode) {
    if (!initialised) return NOT_INITIALIZED;
    if (kvasir_double_no_capture_mode) return NOT_SUPPORTED;
    if (*mode < 0 || *mode > 2) return INVALID_VALUE;
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}

result_t cuStreamBeginCapture_v2(struct stream *stream, int mode) {
    ENTER_HEALTHY();
    pthread_mutex_lock(&lock);
    if (!is_stream(stream) || mode < 0 || mode > 2) return finish(INVALID_VALUE);
    if (stream->capture) return finish(901);
    stream->capture = calloc(1, sizeof *stream->capture);
    stream->capture->last = &stream->capture->first;
    return finish(SUCCESS);
}

result_t cuStreamEndCapture(struct stream *stream, struct graph **graph) {
    ENTER_HEALTHY();
    pthread_mutex_lock(&lock);
    if (!is_stream(stream) || !stream->capture) return finish(INVALID_VALUE);
    *graph = stream->capture;
    stream->capture = NULL;
    kvasir_double_graphs++;
    return finish(SUCCESS);
}

static struct operation copy_of(const struct operation *operation) {
    struct operation new = *operation;
    size_t count = operation->parameter_count;
    if (operation->parameters) {
        size_t sizes[64], bytes = 0;
        operation->function->sizes(operation->function->name, sizes, 64);
        if (count) bytes = operation->parameter_offsets[count - 1] + sizes[count - 1];
        new.parameters = malloc(bytes + 1);
        memcpy(new.parameters, operation->parameters, bytes);
    }
    if (operation->pieces) {
        new.pieces = malloc(operation->count * sizeof *new.pieces);
        memcpy(new.pieces, operation->pieces, operation->count * sizeof *new.pieces);
    }
    return new;
}

result_t cuGraphInstantiateWithFlags(struct graph **executable, struct graph *graph, unsigned long long flags) {
    ENTER_HEALTHY();
    if (flags) return INVALID_VALUE;
    struct graph *new = calloc(1, sizeof *new);
    new->last = &new->first;
    for (struct operation *at = graph->first; at; at = at->next) {
        struct operation *copy = malloc(sizeof *copy);
        *copy = copy_of(at);
        copy->next = NULL;
        *new->last = copy;
        new->last = &copy->next;
    }
    kvasir_double_graphs++;
    *executable = new;
    return SUCCESS;
}

result_t cuGraphLaunch(struct graph *graph, struct stream *stream) {
    ENTER_HEALTHY();
    pthread_mutex_lock(&lock);
    for (struct operation *at = graph->first; at; at = at->next) {
        result_t result = enqueue(context, stream, copy_of(at));
        if (result) return finish(result);
    }
    return finish(SUCCESS);
}

result_t cuGraphDestroy(struct graph *graph) {
    ENTER();
    for (struct operation *at = graph->first, *next; at; at = next) {
        next = at->next;
        free(at->pieces);
        free(at->parameters);
        free(at);
    }
    free(graph);
    kvasir_double_graphs--;
    return context->sticky;
}

result_t cuGraphExecDestroy(struct graph *graph) { return cuGraphDestroy(graph); }
