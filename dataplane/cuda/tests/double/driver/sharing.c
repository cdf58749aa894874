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
    if (memcmp(handle.magic, "double!", 8) || flags != IPC_LAZY_PEER_ACCESS) return INVALID_VALUE;
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
result_t cuMemGetHandleForAddressRange(void *handle, address_t address, size_t bytes, int type,
                                       unsigned long long flags) {
    ENTER_HEALTHY();
    if (kvasir_double_no_dmabuf || (flags == RANGE_PCIE && kvasir_double_no_pcie_flag)) return NOT_SUPPORTED;
    if (type != HANDLE_DMA_BUF || flags > RANGE_PCIE || address % 4096 || bytes % 4096 || !bytes) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct allocation *at = containing(address);
    if (!at || at->freed || at->imported || address + bytes > at->address + at->mapped) return finish(INVALID_VALUE);
    if (address != at->address) return finish(NOT_SUPPORTED); /* a memfd has no start of its own */
    kvasir_double_exported_bytes = (int64_t)bytes;
    *(int *)handle = fcntl(at->descriptor, F_DUPFD_CLOEXEC, 0);
    return finish(SUCCESS);
}
#endif

result_t cuFlushGPUDirectRDMAWrites(int target, int scope) {
    ENTER_HEALTHY();
    if (target != FLUSH_CURRENT_CONTEXT || (scope != FLUSH_TO_OWNER && scope != FLUSH_TO_ALL)) return INVALID_VALUE;
    if (!(kvasir_double_flush_options & 1)) return NOT_SUPPORTED;
    kvasir_double_direct_flushes++;
    return SUCCESS;
}
