/* SPDK's functions over a file, for the tests of the engine: trtype:PCIe traddr:/path/of/the/file
 * Commands wait until the queue pair is polled, and then complete in reverse order. Whatever real SPDK would not accept
 * is a violation: payloads that are neither registered nor its own memory, calls before the environment, bad arguments.
 * As the real one (24.09 to 26.05) does, it takes SIGBUS over when it is loaded, binds the thread that starts its environment to one
 * core, wants to know the length of its options, says that memory is registered which it could not map, and leaves a region with
 * pages of both kinds mapped when it is unregistered. With MOCK_NEEDS it needs a symbol of a library that it is not linked with. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct cpl { uint32_t cdw0, reserved; uint16_t sqhd, sqid, cid, status; };
typedef void (*callback)(void *, const struct cpl *);
struct command { int kind; void *payload; uint64_t lba; uint32_t count; callback call; void *argument; };
enum { READ, WRITE, FLUSH, DEPTH = 40, BLOCK = 512, TRANSFER = 128 << 10 };

struct controller { int file; uint64_t blocks; struct pair *pair; };
struct pair { struct controller *controller; struct command commands[DEPTH]; int count; };
struct memory { char *start; size_t bytes; bool own, stale; };
static struct memory memories[64];
static bool initialised;

/* For the test: what shall go wrong, and what was seen. */
int64_t mock_bad_lba = -1, mock_lose, mock_completions_errno, mock_reset_fails, mock_connect_fails, mock_register_errno, mock_unmapped,
    mock_registers;
int64_t mock_violations, mock_resets, mock_flushes, mock_out_of_memory, mock_pairs, mock_controllers;

#ifdef MOCK_NEEDS
extern int mock_needed;
int *mock_uses = &mock_needed;
#endif

/* Of the registers of a device that was pulled out: other memory comes in their place. Any other error is repeated for ever. */
static void on_bus_error(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    if (mock_registers && (int64_t)info->si_addr == mock_registers)
        mmap(info->si_addr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}
__attribute__((constructor)) static void take_over_bus_errors(void) {
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO};
    sigaction(SIGBUS, &action, NULL);
}

static void check(bool right, const char *what) {
    if (!right) {
        fprintf(stderr, "mock: %s\n", what);
        mock_violations++;
    }
}

static void remember(void *start, size_t bytes, bool own) {
    for (int i = 0; i < 64; i++)
        if (!memories[i].start) {
            memories[i] = (struct memory){start, bytes, own, false};
            return;
        }
    check(false, "too many memories");
}

/* Whether a region has whole pages of 2 MiB and parts of others. */
static bool mixed(char *start, size_t bytes) {
    uintptr_t large = 2 << 20, first = ((uintptr_t)start + large - 1) / large * large, end = (uintptr_t)start + bytes;
    return first + large <= end && ((uintptr_t)start % large || end % large);
}

static bool forget(void *start, size_t bytes, bool own) {
    for (int i = 0; i < 64; i++)
        if (memories[i].start == start && memories[i].own == own && (own || memories[i].bytes == bytes)) {
            if (mixed(memories[i].start, bytes) && !own) memories[i].stale = true;
            else memories[i].start = NULL;
            return true;
        }
    return false;
}

/* Bytes from there on that are mapped, of one registration. */
static size_t mapped(char *start) {
    for (int i = 0; i < 64; i++)
        if (memories[i].start && !memories[i].stale && start >= memories[i].start && start < memories[i].start + memories[i].bytes)
            return (size_t)(memories[i].start + memories[i].bytes - start);
    return 0;
}

static bool reachable(char *start, size_t bytes) {
    while (bytes > 0) {
        size_t there = mapped(start);
        if (there == 0) return false;
        there = there < bytes ? there : bytes;
        start += there, bytes -= there;
    }
    return true;
}

/* What the device may still access, since a reset failed while it had these commands. */
static struct memory late[DEPTH];
static int late_count;

/* The device does so; afterwards nothing of that engine is remembered. Returns the number of accesses. */
int64_t mock_late_accesses(void) {
    int64_t count = late_count;
    while (late_count > 0) {
        struct memory *memory = &late[--late_count];
        memset(memory->start, 0xEE, memory->bytes);
    }
    memset(memories, 0, sizeof memories);
    return count;
}

int64_t mock_memories(void) {
    int64_t count = 0;
    for (int i = 0; i < 64; i++) count += memories[i].start != NULL;
    return count;
}

struct environment { const char *name; char rest[104]; size_t opts_size; char more[80]; };
void spdk_env_opts_init(struct environment *options) {
    check(options->opts_size >= offsetof(struct environment, more), "opts_size");
    options->name = "spdk";
    options->rest[99] = 42;
}
int spdk_env_init(const struct environment *options) {
    check(!initialised, "the environment is initialised twice");
    check(strcmp(options->name, "kvstore") == 0 && options->rest[99] == 42, "environment options");
    cpu_set_t first;
    CPU_ZERO(&first);
    CPU_SET(0, &first);
    sched_setaffinity(0, sizeof first, &first);
    initialised = true;
    return 0;
}
void *spdk_dma_zmalloc(size_t size, size_t align, uint64_t *physical) {
    check(initialised && physical == NULL, "spdk_dma_zmalloc");
    void *start = aligned_alloc(align, size);
    memset(start, 0, size);
    remember(start, size, true);
    return start;
}
void spdk_dma_free(void *start) {
    check(forget(start, 0, true), "spdk_dma_free");
    check(late_count == 0, "memory is freed that the device may still access");
    free(start);
}
int spdk_mem_register(void *start, size_t bytes) {
    check(((uintptr_t)start | bytes) % 4096 == 0, "spdk_mem_register");
    if (mock_register_errno) return (int)mock_register_errno;
    remember(start, bytes, false);
    return 0;
}
uint64_t spdk_vtophys(void *start, uint64_t *bytes) {
    check(bytes == NULL, "spdk_vtophys");
    return mock_unmapped || mapped(start) == 0 ? UINT64_MAX : (uint64_t)start;
}
int spdk_mem_unregister(void *start, size_t bytes) { return forget(start, bytes, false) ? 0 : -EINVAL; }
int spdk_nvme_transport_id_parse(char *id, const char *text) {
    for (int i = 0; i < 1300; i++) check(id[i] == 0, "the transport id is zeroed");
    const char *path = strstr(text, "traddr:");
    if (!path || strncmp(text, "trtype:PCIe ", 12)) return -EINVAL;
    snprintf(id + 600, 600, "%s", path + 7);
    return 0;
}
void *spdk_nvme_connect(const char *id, const void *options, size_t bytes) {
    check(initialised && options == NULL && bytes == 0, "spdk_nvme_connect");
    if (mock_connect_fails) return NULL;
    struct controller *controller = calloc(1, sizeof *controller);
    struct stat stat;
    controller->file = open(id + 600, O_RDWR);
    if (controller->file < 0 || fstat(controller->file, &stat)) return NULL;
    controller->blocks = stat.st_size / BLOCK;
    mock_controllers++;
    return controller;
}
int spdk_nvme_detach(struct controller *controller) {
    check(controller->pair == NULL, "detached with a queue pair");
    close(controller->file);
    free(controller);
    mock_controllers--;
    return 0;
}
void *spdk_nvme_ctrlr_get_ns(struct controller *controller, uint32_t number) { return number == 1 ? controller : NULL; }
bool spdk_nvme_ns_is_active(struct controller *namespace) { return namespace->blocks > 0; }
uint32_t spdk_nvme_ns_get_sector_size(struct controller *namespace) { return (void)namespace, BLOCK; }
uint64_t spdk_nvme_ns_get_num_sectors(struct controller *namespace) { return namespace->blocks; }
uint32_t spdk_nvme_ns_get_md_size(struct controller *namespace) { return (void)namespace, 0; }
uint32_t spdk_nvme_ns_get_max_io_xfer_size(struct controller *namespace) { return (void)namespace, TRANSFER; }
uint32_t spdk_nvme_ns_get_flags(struct controller *namespace) { return (void)namespace, 3; }
void *spdk_nvme_ctrlr_alloc_io_qpair(struct controller *controller, const void *options, size_t bytes) {
    check(options == NULL && bytes == 0 && controller->pair == NULL, "spdk_nvme_ctrlr_alloc_io_qpair");
    controller->pair = calloc(1, sizeof *controller->pair);
    controller->pair->controller = controller;
    mock_pairs++;
    return controller->pair;
}
static void complete(struct command *command, int type, int code) {
    struct cpl cpl = {.status = (uint16_t)(1 | code << 1 | type << 9)};
    command->call(command->argument, &cpl);
}
static void abort_all(struct pair *pair) {
    while (pair->count > 0) {
        struct command command = pair->commands[--pair->count];
        complete(&command, 0, 0x08);
    }
}
int spdk_nvme_ctrlr_free_io_qpair(struct pair *pair) {
    abort_all(pair);
    pair->controller->pair = NULL;
    free(pair);
    mock_pairs--;
    return 0;
}
int spdk_nvme_ctrlr_reset(struct controller *controller) {
    mock_resets++;
    if (!mock_reset_fails) return 0;
    for (int i = 0; controller->pair && i < controller->pair->count; i++) {
        struct command *command = &controller->pair->commands[i];
        if (command->payload) late[late_count++] = (struct memory){command->payload, (size_t)command->count * BLOCK, false, false};
    }
    return -1;
}
int32_t spdk_nvme_ctrlr_process_admin_completions(struct controller *controller) { return (void)controller, 0; }
static void execute(struct pair *pair, struct command *command) {
    int file = pair->controller->file;
    size_t bytes = (size_t)command->count * BLOCK;
    off_t offset = (off_t)command->lba * BLOCK;
    bool bad = mock_bad_lba >= (int64_t)command->lba && mock_bad_lba < (int64_t)(command->lba + command->count);
    if (command->kind == READ && bad) return complete(command, 2, 0x81);
    if (command->kind == READ) check(pread(file, command->payload, bytes, offset) == (ssize_t)bytes, "pread");
    if (command->kind == WRITE) check(pwrite(file, command->payload, bytes, offset) == (ssize_t)bytes, "pwrite");
    complete(command, 0, 0);
}
int32_t spdk_nvme_qpair_process_completions(struct pair *pair, uint32_t max) {
    check(max == 0, "all completions are asked for");
    if (mock_completions_errno) {
        int32_t answer = (int32_t)mock_completions_errno;
        mock_completions_errno = 0;
        return answer;
    }
    if (mock_lose) return 0;
    int count = pair->count;
    while (pair->count > 0) {
        struct command command = pair->commands[--pair->count];
        execute(pair, &command);
    }
    return count;
}
static int queue(struct pair *pair, struct command command) {
    check(pair->controller->pair == pair, "a queue pair that was freed");
    if (pair->count == DEPTH) {
        mock_out_of_memory++;
        return -ENOMEM;
    }
    pair->commands[pair->count++] = command;
    return 0;
}
static int transfer(int kind, struct controller *namespace, struct pair *pair, void *payload, uint64_t lba, uint32_t count,
                    callback call, void *argument, uint32_t flags) {
    check(pair->controller == namespace && flags == 0 && count > 0, "arguments of a transfer");
    check(lba + count <= namespace->blocks && count * BLOCK <= TRANSFER, "range of a transfer");
    check(reachable(payload, (size_t)count * BLOCK), "a payload that SPDK cannot reach");
    return queue(pair, (struct command){kind, payload, lba, count, call, argument});
}
int spdk_nvme_ns_cmd_read(struct controller *namespace, struct pair *pair, void *payload, uint64_t lba, uint32_t count,
                          callback call, void *argument, uint32_t flags) {
    return transfer(READ, namespace, pair, payload, lba, count, call, argument, flags);
}
int spdk_nvme_ns_cmd_write(struct controller *namespace, struct pair *pair, void *payload, uint64_t lba, uint32_t count,
                           callback call, void *argument, uint32_t flags) {
    return transfer(WRITE, namespace, pair, payload, lba, count, call, argument, flags);
}
int spdk_nvme_ns_cmd_flush(struct controller *namespace, struct pair *pair, callback call, void *argument) {
    check(pair->controller == namespace, "arguments of a flush");
    mock_flushes++;
    return queue(pair, (struct command){FLUSH, NULL, 0, 0, call, argument});
}
