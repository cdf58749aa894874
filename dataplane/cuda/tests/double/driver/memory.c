/* Device memory, and host memory that is registered. */

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

static struct registration *registered(address_t address) {
    for (struct registration *at = registrations; at; at = at->next)
        if (address >= at->address && address < at->address + at->bytes) return at;
    return NULL;
}

result_t cuMemGetAddressRange_v2(address_t *base, size_t *bytes, address_t address) {
    ENTER_HEALTHY();
    pthread_mutex_lock(&lock);
    struct allocation *at = containing(address);
    struct registration *pinned = registered(address);
    if (at ? at->freed : !pinned) return finish(NOT_FOUND);
    if (base) *base = at ? at->address : pinned->address;
    if (bytes) *bytes = at ? at->bytes : pinned->bytes;
    if (bytes && kvasir_double_range_bytes) *bytes = (size_t)kvasir_double_range_bytes;
    return finish(SUCCESS);
}

result_t cuPointerGetAttribute(void *value, int attribute, address_t address) {
    ENTER_HEALTHY();
    pthread_mutex_lock(&lock);
    struct allocation *at = containing(address);
    if (!value || (at ? at->freed : !registered(address))) return finish(INVALID_VALUE);
    if (attribute == MEMORY_TYPE)
        *(unsigned *)value = at ? MEMORY_DEVICE : MEMORY_HOST;
    else if (attribute == DEVICE_ORDINAL)
        *(int *)value = at ? at->device : context->device;
    else
        return finish(INVALID_VALUE);
    return finish(SUCCESS);
}

result_t cuPointerSetAttribute(const void *value, int attribute, address_t address) {
    ENTER_HEALTHY();
    pthread_mutex_lock(&lock);
    struct allocation *at = containing(address);
    if (!value || !at || at->freed || at->imported || attribute != SYNC_MEMOPS) return finish(INVALID_VALUE);
    return finish(SUCCESS);
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
