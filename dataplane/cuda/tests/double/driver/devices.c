/* Initialisation, names of results, and what a device says of itself. */

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
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"}, {NO_BINARY, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
    {MAP_FAILED_ERROR, "CUDA_ERROR_MAP_FAILED"}, {INVALID_PTX, "CUDA_ERROR_INVALID_PTX"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"}, {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
    {NOT_READY, "CUDA_ERROR_NOT_READY"}, {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"}, {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"}, {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    {OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM"}, {DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
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
    case MAX_PITCH: *value = 0x7FFFFFFF; return SUCCESS;
    case MULTIPROCESSOR_COUNT: *value = 2; return SUCCESS;
    case ASYNC_ENGINE_COUNT: *value = 3; return SUCCESS;
    case UNIFIED_ADDRESSING: *value = 1; return SUCCESS;
    case CAPABILITY_MAJOR: *value = 9; return SUCCESS;
    case CAPABILITY_MINOR: *value = 0; return SUCCESS;
    case DIRECT_RDMA_SUPPORTED: *value = 1; return SUCCESS;
    case DIRECT_FLUSH_OPTIONS: *value = (int)kvasir_double_flush_options; return SUCCESS;
    case DIRECT_WRITES_ORDERING: *value = (int)kvasir_double_writes_ordering; return SUCCESS;
#ifndef KVASIR_DOUBLE_OLD
    case DMA_BUF_SUPPORTED: *value = !kvasir_double_no_dmabuf; return SUCCESS;
#endif
    default: return INVALID_VALUE;
    }
}
