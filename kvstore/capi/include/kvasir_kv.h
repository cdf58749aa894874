/*
 * libkvasir_kv: a store of KV blocks, for inference engines.
 *
 * A block has a name of 16 bytes, which stands for everything that decides what its bytes mean (model, layout, tenant
 * and all tokens up to its end), a few bytes of meta, which are the caller's own, and a payload. It may be evicted at
 * any time: a block that was there a moment ago can be a miss.
 *
 * Blocks are kept in the process's memory (in pages of 2 MiB, if the system has enough of them reserved) and, if the configuration says
 * so, on a disk below it. Each block in memory takes a slot of fixed size, whatever its own. With a disk, a block is written there after it was put (or, with `write = "back"`, when it has to
 * leave memory), and comes back into memory when it is read. A block is given out only after its checksum was verified; one that is
 * damaged is a miss and is thrown away.
 *
 * With [remote_tier] or [object_tier] new blocks are also sent to pools of other processes and nodes, or to object storage; there a
 * block of a chain (is_chain) is kept beside those before it, and one without is the first of its own chain. KVASIR_KV_FETCH brings
 * blocks back from there. Blocks of a pool on this host that is reached by shared memory stay where they are, and are read there by the
 * loads that follow within some seconds; not with [device], [disk_tier] or [object_tier], which need them in the process's memory.
 *
 * Two ways lead in and out. A block's bytes are put and got in buffers that each call names. Or an engine registers the
 * paged tensors of its KV cache once (kvasir_kv_register), and blocks are saved from there and loaded there by their
 * numbers (kvasir_kv_submit_transfer), many in one request.
 *
 * And blocks of registered tensors can be handed to another process (kvasir_kv_submit_handoff): from the engine that
 * computes a prompt to the one that generates from it, layer by layer while the rest is computed.
 *
 * After kvasir_kv_close or a crash, the blocks that had been written to the disk by then are found there again; the
 * others are misses. A block that was deleted just before a crash may be there again after it.
 *
 * Threads: every function may be called from any thread, also on the same handle at a time.
 * The store has threads of its own: one that copies blocks, those that drive the disk, `queue.threads`, with [transfer]
 * one that sends and receives, and with [device] one for saves and one for loads of CUDA memory, with both one for pushes
 * and one for arrivals, each of which carries out one transfer after the other.
 * Blocking: kvasir_kv_get, _put and _delete wait for the store's threads and for the disk; a get for about 10 seconds
 * at most, after which it is a miss. Changes of one block wait for each other. kvasir_kv_open and _close wait for the
 * disk, kvasir_kv_match, _stats and _nodes do not; kvasir_kv_unregister waits for transfers. An engine's loop uses
 * kvasir_kv_submit, kvasir_kv_submit_transfer, kvasir_kv_plan_prompt, kvasir_kv_observe_prefill, kvasir_kv_conversation, kvasir_kv_retain, the functions of hand-offs (which wait only while their thread has 16384
 * commands to take) and kvasir_kv_poll, which do not wait (poll as long as it is told to); as
 * many requests are under way at the disk as there are `queue.threads`, and for loads of several blocks up to eight
 * times as many.
 * Status: functions return a kvasir_kv_status; 0 and above are outcomes, below 0 failures, after which
 * kvasir_kv_last_error tells more. No function unwinds into C. None ends the process because of what it is given, of a
 * bug that panics (a library that was built without unwinding opens nothing), or because memory for a copy of a block,
 * for identities or for buffers is refused: that is KVASIR_KV_THROTTLED or KVASIR_KV_FAILED. What ends it is the
 * system's refusal of a small allocation, and the kernel when it has promised more memory than there is: leave room
 * beside `host_tier.capacity`, whose pages are taken as they are used, and a sixteenth of them (64 MiB to 1 GiB) ahead of that by a thread.
 * After fork(): only the parent may use its handles.
 */
#ifndef KVASIR_KV_H
#define KVASIR_KV_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The longest meta of a block. */
#define KVASIR_KV_META_BYTES_MAX 400

typedef enum kvasir_kv_status {
    KVASIR_KV_OK = 0,
    /* The block is not there. */
    KVASIR_KV_MISS = 1,
    /* The block was there already and remains as it was. */
    KVASIR_KV_PRESENT = 2,
    /* No room or bandwidth, or too many requests inside, at the moment; nothing was done. Not a failure: KV can be
     * computed again. */
    KVASIR_KV_THROTTLED = 3,
    /* A null pointer, a size that cannot be, an unknown operation. */
    KVASIR_KV_INVALID_ARGUMENT = -1,
    /* No open store has this handle, for example because it was closed. */
    KVASIR_KV_INVALID_HANDLE = -2,
    /* The block does not fit into the buffers; nothing was read, and the sizes that it needs were written. */
    KVASIR_KV_BUFFER_TOO_SMALL = -3,
    /* The store never takes blocks of this size. */
    KVASIR_KV_TOO_LARGE = -4,
    /* The configuration is wrong. */
    KVASIR_KV_CONFIGURATION = -5,
    /* The store failed: an I/O error, memory or a folder that cannot be had, a store that was closed meanwhile. */
    KVASIR_KV_FAILED = -6,
    /* A bug in the library. The store may still be used. */
    KVASIR_KV_PANICKED = -7
} kvasir_kv_status;

/* An open store. Never follow this pointer. */
typedef struct kvasir_kv kvasir_kv;

/* A range of memory; `start` may be null when `bytes` is 0. */
typedef struct kvasir_kv_buffer {
    void *start;
    size_t bytes;
} kvasir_kv_buffer;

/* Version: major * 1000000 + minor * 1000 + patch. */
uint32_t kvasir_kv_version(void);

/* What a status means, in English. Never null; not to be freed. */
const char *kvasir_kv_strerror(int32_t status);

/*
 * The text of this thread's last failure, in UTF-8. Copies at most `bytes` bytes with the final 0 (and no part of a
 * character), and returns the length of the whole text without it, so that a return of `bytes` or more says that it was
 * cut off. `text` may be null. A completion that failed counts as a failure of the thread that polls it: of several
 * polled in one call, the last one's text is kept, so whoever wants each one's polls with a `capacity` of 1.
 */
size_t kvasir_kv_last_error(char *text, size_t bytes);

/*
 * Opens a store. `configuration` is TOML:
 *
 *   [store]
 *   slot = "128 KiB"            # the largest payload; "4 KiB" to "512 MiB". A slot has 448 bytes more, in whole 4 KiB
 *   [host_tier]
 *   capacity = "1 GiB"          # memory of all slots; taken shortly before it is used, as far as there is some from the NUMA node of
 *                               # rdma.near, else of [device], else of the process's processors. At least one slot, at most the
 *                               # machine's or the control group's limit
 *   eviction = "s3-fifo"        # which block goes when one must: "s3-fifo" or "lru"
 *   tenant_share = 1.0          # the part of this tier, and of [disk_tier], that the blocks of one tenant (kvasir_kv_transfer) may
 *                               # fill, wherever they come from; 0.001 to 1
 *   retention_share = 0.25      # the part of [disk_tier], or of this tier without one, that retained blocks (kvasir_kv_retain) may
 *                               # fill; of it those of one tenant have `tenant_share`; 0 to 0.9
 *   retention_max = "24h"       # the longest time for which a block is retained, whatever is asked for; "1s" to "720h"
 *   prefetch = true             # bring the blocks of an idle conversation (kvasir_kv_conversation) up from the slower tiers when it
 *                               # is likely to go on: when the chance that it does within `prefetch_lead`, learnt from the
 *                               # conversations before it, is at least `prefetch_chance`. At most a quarter of `capacity` ahead
 *   prefetch_chance = 0.25      # 0 to 1
 *   prefetch_lead = "1min"      # blocks are brought up when the conversation is likely to go on within this time; "1ms" to "1h"
 *   [disk_tier]
 *   capacity = "0 B"            # space of the files, taken at the first start; "0 B" is no disk; to "1024 TiB".
 *                               # A multiple of `segment`, or less than it and a multiple of 4 KiB
 *   path = ""                   # folder of the files, made when it is not there; for one open store at a time. Of several
 *                               # devices a list of folders, ["/a", "/b"], to 64: blocks are spread over them, and `capacity`
 *                               # has as many files of `segment` in each. Or a block device, or what `engine` wants
 *   engine = "auto"             # "io_uring", "pread", or "auto": io_uring where it can be had, else pread.
 *                               # "nvme-passthrough" takes /dev/ngXnY as `path`, "nvme-user" and "spdk" the PCI address of a
 *                               # device that is bound to vfio-pci; "spdk" needs the libraries of an installed SPDK, too
 *   segment = "256 MiB"         # size of one file; "1 MiB" to "64 GiB"
 *   depth = 64                  # reads and writes in flight; 1 to 1024
 *   eviction = "s3-fifo"
 *   write = "through"           # when a block is written: as soon as memory has it, or "back": when it leaves there
 *   write_frequency = 1         # only blocks that were put so often; 1 to 15
 *   write_bandwidth = "0 B"     # bytes written per second at most; "0 B" is no limit; to "1 TiB"
 *   write_per_day = "0 B"       # bytes written per day at most; "0 B" is no limit; to "1024 TiB"
 *   reformat = false            # make the files anew when they were written for another slot, and overwrite what is on a
 *                               # device, instead of failing
 *   [remote_tier]
 *   nodes = []                  # pools of other processes and nodes (`kvasir store`), like "a=shm:/tmp/kvasir-a-pool.sock" or
 *                               # "b=tcp:10.0.0.2:7400,rdma:10.0.0.2:7401": what each prints at its start; none is no tier.
 *                               # The names decide which blocks are whose: all clients name the same nodes
 *   deadline = "200ms"          # how long a look-up and the reads that follow may take; "1ms" to "1min"
 *   bandwidth = "0 B"           # bytes read and written per second at most; "0 B" is no limit; to "1 TiB"
 *   group = 32                  # blocks of a chain that are kept on one node, equal at all clients; 1 to 64
 *   replicas = 2                # nodes that keep a group of blocks that is asked for often; 1 or 2
 *   secret_file = ""            # with the secret of the nodes; empty is that of [transfer], and then the environment's
 *                               # KVASIR_TRANSFER_SECRET, if it is set
 *   [object_tier]
 *   url = ""                    # "s3://bucket/prefix" or "file:///folder", which many may share; empty is no tier
 *   endpoint = ""               # the S3 service, when it is not Amazon's
 *   region = "us-east-1"
 *   credentials_file = ""       # in the form of AWS's `credentials`, of which `default` is read; empty: AWS_ACCESS_KEY_ID and
 *                               # AWS_SECRET_ACCESS_KEY of the environment
 *   allow_http = false          # whether plain HTTP will do
 *   run = "16"                  # blocks of a chain in one object, equal at all that share it: a power of two to "1024"
 *   ttl = "168h"                # older objects are misses and are deleted; "1min" to "87600h"
 *   buffers = "1 GiB"           # memory for objects on their way, a quarter of it for writes; "1 MiB" to "1 TiB"
 *   bandwidth = "0 B"
 *   deadline = "2s"             # "1ms" to "10min"
 *   [queue]
 *   threads = 2                 # carry out submitted requests; 1 to 64
 *   depth = 256                 # submitted and not yet polled; 1 to 65536
 *   events = 0                  # events that may wait for kvasir_kv_take_events; 0: none are noted; to 16777216
 *
 * Tensors in CUDA memory need one section more, which opens a device through the driver that is installed; without it
 * the library looks for no driver:
 *
 *     [device]
 *     ordinal = 0               # the driver's number of the device; 0 to 255
 *     staging = "64 MiB"        # memory of the device through which blocks go, half of it for saves and half for
 *                               # loads: at least a slot in each; "1 MiB" to "1 TiB"
 *     handoff_capacity = "256 MiB" # memory of the device through which blocks of hand-offs go, taken with [transfer] only
 *     direct = false            # whether blocks go between devices' memory, past the host's, where both sides have equal heads
 *                               # and a transport reaches it: RDMA of cards that do, and the driver between processes of one
 *                               # host ("cuda_ipc"); else through the host's, hand-off by hand-off
 *
 * Hand-offs need one section more, and RDMA may have another; without [transfer] nothing listens:
 *
 *       [transfer]
 *       transport = "auto"        # "shm", "rdma", "tcp", or "auto": all that this machine has; a pair uses the best. With
 *                                 # device.direct "cuda_ipc" (device memory only: what that does not reach, or has other
 *                                 # heads, is refused), "rdma" (either memory), or "auto": both, and the others for the host's
 *       listen = "127.0.0.1:0"    # where TCP listens: an address that peers reach; port 0 is one of the system's choice
 *       socket_folder = ""        # of the socket for processes of this host; empty is the system's folder for temporary files
 *       socket_name = ""          # its file is kvasir-NAME.sock, and kvasir-NAME-device.sock for the device's memory; it may not
 *                                 # end in "-device"; empty is a name that no other process has
 *       secret_file = ""          # with the secret that the processes of a cluster share, at least 32 bytes; empty is the
 *                                 # environment's KVASIR_TRANSFER_SECRET, if it is set
 *       lease = "30 s"            # how long blocks are kept for a receiver that does not come; "10 ms" to "10 min"
 *       busy_poll = false         # whether the thread that moves blocks never sleeps: it takes a core
 *       cores = ""                # cores on which that thread runs, like "0-3,8"; empty: those of the process that are on the
 *                                 # NUMA node of rdma.near, else of [device]; all of them where that is not known
 *       capacity = "256 MiB"      # memory through which blocks go, beside that of [host_tier]
 *       layers = 1                # layers of a block; 1 to 4096
 *       rows = 1                  # a layer of a block is laid out [rows][heads][head_bytes]; 1 to 1048576
 *       first_head = 0            # the first of this process's attention heads, counted over the whole model
 *       heads = 1                 # attention heads of this process
 *       head_bytes = "128 KiB"    # bytes of one head in one row
 *       fingerprint = "0000000000000000" # 16 hexadecimal digits; processes with different ones refuse each other's blocks
 *       [rdma]
 *       devices = []              # by name; empty: those nearest to the memory that `near` names
 *       near = "auto"             # "gpu0", a PCI address, "host", "host:1"; "auto": this process's GPU, else its processors
 *       listen = "127.0.0.1:0"    # where peers connect; with a port each further device takes the next one
 *       connections_per_device = 1 # to each peer, each with its own queue pairs: 1 to 8
 *       gid = "auto"              # row of the port's GID table
 *       partition = "default"     # P_Key, like "0x8001"
 *       traffic_class = 0         # of RoCE packets: the DSCP times four
 *
 * With a `socket_name` shared memory must be usable, as TCP must with a port and RDMA with devices, `near` or a partition; otherwise what the
 * machine lacks is passed over. Peers prove that they hold the secret and mean the same address; they may write the blocks
 * that a transfer asks them for (over TCP no others, over RDMA any of the library's slots, over shared memory also read
 * them). Without a secret whoever reaches an address may. Settings of the product's [transfer] and [rdma] that are not here have its defaults.
 *
 * These are the defaults; sizes have a unit (B, KiB, MiB, GiB, TiB) and times too (ms, s, min, h). All sections but [queue]
 * and [device] and their keys are those of Kvasir's own configuration (of [transfer] the first three, `secret_file`, `lease`, `busy_poll` and `cores`), and so
 * are the defaults but that of `host_tier.capacity`. What is wrong
 * in the text is KVASIR_KV_CONFIGURATION, what the machine refuses is KVASIR_KV_FAILED. With [device] the host tier's
 * memory, and with [transfer] `transfer.capacity` too, is pinned, all of it at once, and the kernels are compiled by NVIDIA's run-time compiler (NVRTC), which must
 * be installed and takes some 2 seconds of one core.
 *
 * Writes the handle to `*handle`, or null and the reason to `error` (may be null) with at most `error_bytes` bytes, of
 * which the last is 0; what is cut off are whole characters of UTF-8.
 */
int32_t kvasir_kv_open(const char *configuration, kvasir_kv **handle, char *error, size_t error_bytes);

/* The same with the configuration in a file. */
int32_t kvasir_kv_open_file(const char *path, kvasir_kv **handle, char *error, size_t error_bytes);

/*
 * Closes a store. From here on other calls with the handle are KVASIR_KV_INVALID_HANDLE, so completions that wait are
 * to be polled before. Requests that have not begun, fetches and expectations are forgotten without a completion, others
 * that have begun are waited for;
 * after the return no submitted request's memory is touched. Threads inside kvasir_kv_poll return with the completions
 * that wait, or with none; those inside a blocking function with what they were asked for or KVASIR_KV_FAILED. The file
 * descriptor of kvasir_kv_event_fd becomes readable, so that whoever waits for it wakes, and then goes: its number may
 * be another file's when this returns, so take it out of an event loop before. What had been handed to the disk is on
 * stable storage at the return, if the disk answers within 5 seconds, and its folder may be opened again.
 */
int32_t kvasir_kv_close(kvasir_kv *handle);

/* How many of `count` blocks, from the first on, are there: the length of the stored prefix. */
int32_t kvasir_kv_match(kvasir_kv *handle, const uint8_t (*identities)[16], size_t count, size_t *matched);

/*
 * Reads a block: its meta into `meta` (may be null when it has none), its payload into `payload_count` buffers, one
 * after the other. Writes the sizes to `meta_bytes` and `payload_bytes` (may be null): what was read, or what is needed
 * with KVASIR_KV_BUFFER_TOO_SMALL, or 0. At most 4096 buffers. OK, MISS, THROTTLED (too many requests are inside to
 * look for it) or a failure; after anything but OK the buffers may hold anything.
 */
int32_t kvasir_kv_get(kvasir_kv *handle, const uint8_t (*identity)[16], const kvasir_kv_buffer *meta,
                      const kvasir_kv_buffer *payload, size_t payload_count, size_t *meta_bytes,
                      size_t *payload_bytes);

/*
 * Stores a block. The buffers are only read; after OK the block is in memory. OK, PRESENT, THROTTLED or a failure, of
 * which KVASIR_KV_TOO_LARGE says that the payload is above `store.slot` or the meta above KVASIR_KV_META_BYTES_MAX.
 */
int32_t kvasir_kv_put(kvasir_kv *handle, const uint8_t (*identity)[16], const kvasir_kv_buffer *meta,
                      const kvasir_kv_buffer *payload, size_t payload_count);

/*
 * Forgets a block, also on the disk. OK, MISS or a failure. A block that is just on its way between memory and the disk
 * is forgotten too, but the answer may be MISS.
 */
int32_t kvasir_kv_delete(kvasir_kv *handle, const uint8_t (*identity)[16]);

typedef struct kvasir_kv_statistics {
    uint64_t blocks;    /* in memory now */
    uint64_t bytes;     /* of their slots */
    uint64_t bytes_max; /* of all slots in memory */
    uint64_t hits;      /* blocks read that were there */
    uint64_t misses;    /* blocks read that were not */
    uint64_t stored;
    uint64_t throttled; /* not stored for lack of room, bandwidth or memory */
    uint64_t evicted;   /* left memory to make room; the disk may have them */
    uint64_t disk_blocks;    /* on the disk now; many of them are in memory too */
    uint64_t disk_bytes_max; /* of all slots on the disk */
    uint64_t disk_read;      /* blocks that came from the disk */
    uint64_t disk_written;   /* blocks written to the disk */
    uint64_t disk_evicted;   /* left the disk to make room */
    uint64_t damaged;        /* were found not to be what had been stored, in memory, on the disk or on the way to a
                              * device */
    uint64_t far_read;       /* blocks that came from other nodes or object storage, or are read in a pool's memory */
    uint64_t far_written;    /* blocks sent there */
    uint64_t far_too_large;  /* blocks that do not fit the slots of other nodes: their `store.slot` is too small */
    uint64_t events_lost;    /* events that `queue.events` had no room for */
    uint64_t recomputed;     /* blocks that plans left to be computed although they were here, at each kvasir_kv_plan_prompt */
    uint64_t late;           /* blocks that the disk was asked for and did not give before the deadlines of their loads */
    uint64_t prefetched;     /* blocks brought into memory because their conversations were likely to go on */
    uint64_t prefetch_used;  /* of those, blocks whose conversations did */
    uint64_t prefetch_wasted; /* of those, blocks whose conversations did not in time */
    uint64_t checksummed_bytes; /* bytes whose checksums processors have taken, in all stores of the process */
    uint64_t disk_write_failures; /* writes to the disk that failed; with write = "through" they are tried again while the blocks are
                                   * in memory */
    uint64_t far_searches;   /* searches of prompts' blocks on other nodes or in object storage: a fetch each */
    uint64_t far_unanswered; /* questions of these searches to a tier that were not answered in time */
    uint64_t far_cut;        /* such searches that found blocks for which there was no room here */
    uint64_t far_not_asked;  /* blocks that `others` said were there and that plans did not ask for, at each kvasir_kv_plan_prompt */
    uint64_t retained;       /* blocks that are retained now (kvasir_kv_retain), on the disk or, without one, in memory */
    uint64_t retention_refused; /* blocks that were not: as many are as may be, or the block before it is not, or too many requests wait */
} kvasir_kv_statistics;

/*
 * Writes counters. `bytes` is sizeof(kvasir_kv_statistics) of the caller's header. Fields are only ever appended, and
 * those are written that the caller's header and the library both know: a caller with a newer header than the library
 * sets the structure to zero before.
 */
int32_t kvasir_kv_stats(kvasir_kv *handle, kvasir_kv_statistics *statistics, size_t bytes);

/* One node of [remote_tier] as this store sees it. Later versions append fields. */
typedef struct kvasir_kv_node_statistics {
    char name[128];          /* as in `remote_tier.nodes`, before the "="; longer names are cut */
    uint64_t is_usable;      /* 1 while it is asked; 0 until it has first answered, and while it cannot be reached, or failed and is left
                              * alone */
    uint64_t latency_us;     /* of a look-up, smoothed */
    uint64_t requests;       /* sent to it */
    uint64_t timeouts;       /* requests that it did not answer in time */
    uint64_t refused;        /* requests that it had no room for */
    uint64_t failures;       /* times that it was left alone because it could not be reached or failed */
    uint64_t read_blocks;    /* read and verified, or read in its memory */
    uint64_t read_bytes;     /* of blocks read and verified */
    uint64_t damaged_blocks; /* read with a wrong checksum */
    uint64_t stored_blocks;  /* that it has taken */
    uint64_t leases;         /* held there now */
} kvasir_kv_node_statistics;

/*
 * Writes state and counters of at most `room` nodes, in the configuration's order, each into `node_bytes` bytes
 * (sizeof(kvasir_kv_node_statistics); of a shorter structure the first fields are written); `*count` is how many there are, 0
 * without [remote_tier]. `nodes` may be null when `room` is 0. OK, KVASIR_KV_INVALID_ARGUMENT for a null pointer, or
 * KVASIR_KV_INVALID_HANDLE.
 */
int32_t kvasir_kv_nodes(kvasir_kv *handle, kvasir_kv_node_statistics *nodes, size_t node_bytes, size_t room, size_t *count);

typedef enum kvasir_kv_event_kind { KVASIR_KV_STORED = 1, KVASIR_KV_REMOVED = 2 } kvasir_kv_event_kind;

typedef enum kvasir_kv_tier { KVASIR_KV_HOST_TIER = 1, KVASIR_KV_DISK_TIER = 2 } kvasir_kv_tier;

/* A tier of this node has gained or lost a block. */
typedef struct kvasir_kv_event {
    uint8_t identity[16];
    uint32_t kind; /* kvasir_kv_event_kind */
    uint32_t tier; /* kvasir_kv_tier */
} kvasir_kv_event;

/*
 * Takes at most `capacity` events, in the order in which they happened, and writes how many to `count`. Does not wait. Blocks
 * that a disk has kept from before the store was opened are not told as stored. When `queue.events` is half full news of stored
 * blocks are dropped, and when it is full those of removed ones: `events_lost` counts both. With `queue.events` 0 there are none. OK,
 * KVASIR_KV_INVALID_ARGUMENT (a null pointer, or a `capacity` of 0) or KVASIR_KV_INVALID_HANDLE.
 */
int32_t kvasir_kv_take_events(kvasir_kv *handle, kvasir_kv_event *events, size_t capacity, size_t *count);

typedef enum kvasir_kv_operation {
    KVASIR_KV_GET = 1,
    KVASIR_KV_PUT = 2,
    KVASIR_KV_DELETE = 3,
    KVASIR_KV_MATCH = 4,
    KVASIR_KV_SAVE = 5, /* of kvasir_kv_submit_transfer only, as the next one */
    KVASIR_KV_LOAD = 6,
    KVASIR_KV_PUSH = 7, /* of kvasir_kv_submit_handoff only, as the next one */
    KVASIR_KV_EXPECT = 8,
    KVASIR_KV_FETCH = 9 /* of kvasir_kv_submit_transfer only */
} kvasir_kv_operation;

typedef struct kvasir_kv_request {
    uint64_t user;      /* comes back in the completion */
    uint32_t operation; /* kvasir_kv_operation */
    uint32_t reserved;  /* 0 */
    const uint8_t (*identities)[16];
    size_t identity_count; /* 1; for a match at most 2^20, also of all matches, fetches and transfers under way together */
    kvasir_kv_buffer meta;
    const kvasir_kv_buffer *payload;
    size_t payload_count;
} kvasir_kv_request;

typedef struct kvasir_kv_completion {
    uint64_t user;
    int32_t status;     /* kvasir_kv_status, as the blocking function returns it */
    uint32_t reserved;
    uint64_t meta_bytes;    /* for an expectation: a kvasir_kv_ending */
    uint64_t payload_bytes; /* for a match, a fetch, a transfer and a hand-off: how many blocks */
} kvasir_kv_completion;

/*
 * Submits requests, in order, without waiting. Writes how many were taken to `accepted`: fewer than `count` with
 * KVASIR_KV_THROTTLED when `queue.depth` requests are under way or the matches, fetches and transfers under way would
 * have more than 2^20 identities together (poll, then submit the rest), with KVASIR_KV_INVALID_ARGUMENT when the next one is
 * invalid, with KVASIR_KV_FAILED when there is no memory for it, or with KVASIR_KV_INVALID_HANDLE when the store is
 * closed meanwhile. The requests, identities and arrays of buffers are copied; the memory that the buffers name must
 * stay as it is until the completion was polled or kvasir_kv_close returned. Requests run side by side and complete in
 * any order.
 */
int32_t kvasir_kv_submit(kvasir_kv *handle, const kvasir_kv_request *requests, size_t count, size_t *accepted);

/*
 * Takes at most `capacity` completions, and writes how many to `count`. Waits for the first at most `timeout_ms`
 * milliseconds; 0 does not wait, below 0 has no end. Completions that failed have their text in kvasir_kv_last_error.
 */
int32_t kvasir_kv_poll(kvasir_kv *handle, kvasir_kv_completion *completions, size_t capacity, int32_t timeout_ms,
                       size_t *count);

/*
 * A file descriptor that is readable exactly while completions wait, for epoll or asyncio. It belongs to the store:
 * never read or close it, and do not use it after kvasir_kv_close was called. Below 0 is a status.
 */
int32_t kvasir_kv_event_fd(kvasir_kv *handle);

/*
 * Paged tensors: the memory in which an engine keeps the KV of its blocks. They are registered once; then blocks are
 * saved from there and loaded there by their numbers.
 */
typedef enum kvasir_kv_memory { KVASIR_KV_HOST = 0, KVASIR_KV_CUDA = 1 } kvasir_kv_memory;

/* One plane: a layer's keys, or its values, or its latents. Block b is `block_bytes` at start + b * block_stride. */
typedef struct kvasir_kv_plane {
    void *start;           /* of block 0; an address of the device for KVASIR_KV_CUDA */
    uint64_t block_stride; /* no less than block_bytes, unless there is one block */
    uint64_t block_bytes;  /* not 0 */
} kvasir_kv_plane;

typedef struct kvasir_kv_tensors {
    uint32_t memory; /* kvasir_kv_memory */
    int32_t device;  /* the driver's ordinal of the device; 0 for KVASIR_KV_HOST */
    uint64_t blocks; /* of each plane */
    const kvasir_kv_plane *planes;
    size_t plane_count; /* 1 to 4096 */
} kvasir_kv_tensors;

/*
 * Registers tensors and writes their number, which is never 0 and never given twice, to `id`. The arrays are copied. A
 * stored block's payload is its bytes in each plane, one plane after the other; it has no meta. At most 64 may be
 * registered at a time: KVASIR_KV_THROTTLED says that so many are, and nothing was done. KVASIR_KV_INVALID_ARGUMENT has
 * a text that names the field; KVASIR_KV_TOO_LARGE says that a block of all planes is above `store.slot`.
 *
 * KVASIR_KV_CUDA: `device` is the configuration's `device.ordinal`; without a section [device] this is
 * KVASIR_KV_INVALID_ARGUMENT. The memory is the engine's own, of whatever kind the driver knows the range of: from
 * cudaMalloc, or mapped in pieces. Each plane must be mapped from its first block to its last, which is checked here;
 * it must be memory of that device, and stays mapped until kvasir_kv_unregister or kvasir_kv_close returned.
 * `block_stride` and `block_bytes` may change 15 times from one plane to the next, and each change costs a launch for
 * each transfer's round. Registering waits for the device, takes 2 MiB of its memory for each shape of planes,
 * and as much again with [transfer] (KVASIR_KV_FAILED when it has them not, or is lost), and is not for an engine's loop.
 */
int32_t kvasir_kv_register(kvasir_kv *handle, const kvasir_kv_tensors *tensors, uint64_t *id);

/*
 * Waits until no transfer works on these tensors any more, those included that have not begun, and forgets them; their
 * memory may go afterwards. Expectations into them are cancelled: they complete with MISS and KVASIR_KV_CANCELLED.
 * Completions stay to be polled. KVASIR_KV_INVALID_ARGUMENT: there are none of this number.
 */
int32_t kvasir_kv_unregister(kvasir_kv *handle, uint64_t id);

typedef struct kvasir_kv_transfer {
    uint64_t user;      /* comes back in the completion */
    uint32_t operation; /* KVASIR_KV_SAVE, KVASIR_KV_LOAD or KVASIR_KV_FETCH */
    uint32_t bytes;     /* sizeof(kvasir_kv_transfer); 0: the fields up to `event` */
    uint64_t tensors;   /* what kvasir_kv_register wrote; of a fetch 0 */
    const uint8_t (*identities)[16];
    const uint64_t *blocks; /* the number of each identity's block, below `blocks` of the tensors; of a fetch null */
    size_t count;           /* of both; at most 2^20, also of all matches, fetches and transfers under way together */
    void *event;            /* KVASIR_KV_CUDA: a CUevent (cudaEvent_t), or null; otherwise null */
    /* Of a save, what hangs on what: */
    const uint8_t (*parent)[16]; /* the block before the first in its chain, or null */
    uint32_t position;           /* how many blocks are before the first in its chain; with count below 2^31 */
    uint32_t is_chain;           /* 1: each block hangs on the one before it, the first on `parent`; 0: each stands for itself,
                                    and `parent` is null, `position` 0 */
    uint32_t deadline_us; /* of a load or a fetch: how long it may take, as a plan says; 0: 10 s, or the tiers' deadlines together */
    uint32_t held;        /* of a fetch: how many of the blocks, from the first on, the caller has or does not need; else 0 */
    uint32_t tenant;      /* of a save or a fetch: whose `host_tier.tenant_share` the blocks count against, below 2^32 - 1; 0: that of all
                             who have no number. Of a load 0. Who finds and reads a block is a matter of its identity alone */
    uint32_t reserved;    /* 0 */
} kvasir_kv_transfer;

/*
 * Submits one transfer without waiting. KVASIR_KV_THROTTLED when as many requests are under way as may be (see
 * kvasir_kv_submit; poll, then submit it again), KVASIR_KV_INVALID_ARGUMENT with a text that names the field,
 * KVASIR_KV_FAILED when there is no memory for it. The arrays are copied. The completion comes through kvasir_kv_poll.
 *
 * A save stores the blocks that are not there, and only reads the tensors. Tell their chain (`is_chain`): a block is evicted
 * before the one that it hangs on, so that what is left of a chain can be found from its beginning; blocks that stand for
 * themselves go in the order of their last use. Blocks that are there count as used. `payload_bytes` of its completion is how
 * many of the blocks the store took or had already; like all blocks they may be evicted at any time, the first of them
 * to make room for the last. The status is OK when it is all of them, THROTTLED when there was no room or bandwidth for
 * some, or a failure.
 *
 * A load fills the blocks in order. `payload_bytes` of its completion is the length of the loaded prefix, which ends at
 * the first block that is a miss: one that is not there, is damaged, does not come in time, or has another size or a
 * meta. The status is OK when all came, MISS when fewer did, or a failure. Blocks beyond the prefix may hold anything.
 * A block must not be named twice in a load. Blocks that are in memory come whatever the deadline is: it bounds the wait for the
 * disk.
 *
 * A fetch looks for blocks in the tiers that are not on this node ([remote_tier], then [object_tier]) and brings what it finds into
 * memory, or makes it readable in the memory of a pool on this host. Its identities are a chain from its very first block: each hangs on the one before it, as a save of a chain
 * told. The caller has the first `held` of them, or does not need them. `payload_bytes` of its completion is how many of the
 * blocks, from the first on, are here now, those that the caller has included: in memory, on the disk, or so. It ends within
 * `deadline_us` and the tiers' deadlines together, and at once when all blocks are here or there are no such tiers. Blocks that it
 * brought may be evicted like all others: load them soon.
 *
 * The blocks' memory must stay, untouched by others (a save: unchanged), until the completion was polled or
 * kvasir_kv_close returned. Transfers may run side by side, also parts of one; of two transfers that name the same
 * block the second is submitted after the first's completion was polled.
 *
 * `event` is null when earlier work on the blocks is over. Else the device's work on them waits for it: it was recorded
 * before the call, and is neither recorded again nor destroyed before the completion was polled. When a completion can
 * be polled, the device's work is over: whatever is put on any stream from then on finds a load's bytes.
 */
int32_t kvasir_kv_submit_transfer(kvasir_kv *handle, const kvasir_kv_transfer *transfer);

/*
 * A group of layers whose blocks have names of their own, with the prompt's tokens and bytes of a block: sliding windows, for one. To
 * compute block k of the prompt the engine needs the group's blocks from max(held, k - window_blocks) to k - 1. Blocks before `held`
 * are in the engine for every group. For attention in chunks give the blocks of a chunk: a plan then wants up to as many, although
 * fewer are loaded.
 */
typedef struct kvasir_kv_group {
    const uint8_t (*identities)[16]; /* one for each of the prompt's `identities` */
    uint64_t window_blocks;          /* UINT64_MAX: all of them */
} kvasir_kv_group;

/* A prompt that an engine is about to compute. Later versions append fields. */
typedef struct kvasir_kv_prompt {
    uint32_t bytes;                  /* sizeof(kvasir_kv_prompt) */
    uint32_t block_tokens;           /* tokens of a block; not 0 */
    const uint8_t (*identities)[16]; /* its whole blocks behind the `held` ones, in order */
    size_t count;                    /* at most 2^20 */
    uint64_t held;                   /* blocks from its beginning that the engine has; at most 2^20 */
    uint64_t tokens;                 /* of the prompt; no less than its blocks have, and below 2^31 */
    uint64_t queued_tokens;          /* of other prompts, which the engine computes before this one; below 2^31 */
    uint32_t may_fetch;              /* 1: the tiers that are not on this node come into question; 0: they have been asked; 2: see below */
    uint32_t others;                 /* with `may_fetch` 2: so many identities, from the first on, are known to be there; else 0 */
    const kvasir_kv_group *groups;   /* beside the blocks above, which all layers need that are in none of them */
    size_t group_count;              /* at most 64 */
} kvasir_kv_prompt;

/* Never grows. */
typedef struct kvasir_kv_plan {
    uint32_t operation;   /* KVASIR_KV_LOAD, KVASIR_KV_FETCH, or 0: compute all of it */
    uint32_t deadline_us; /* of the kvasir_kv_transfer that follows */
    uint64_t blocks;      /* of a load: how many of `identities`, from the first on, with what groups need before the next one */
} kvasir_kv_plan;

/*
 * Says what gives a prompt's first token soonest: to compute it, to load blocks that this node has and compute the rest, or to
 * fetch blocks from other nodes and then plan again without `may_fetch`. With groups the prompt's own chain is fetched first. If n of its
 * blocks are here then, the first n of each group are fetched, with `held` = max(n - window_blocks, the prompt's `held`) and the same
 * deadline; then it is planned again. Where n is known before (`others`), all may be fetched at once. With `may_fetch` 1 the library judges by what earlier
 * fetches have found; with 2 the first `others` identities are known to be there, and they are fetched if that takes less time than
 * computing them. The library measures its tiers by the loads and fetches
 * that it carries out, and learns from kvasir_kv_observe_prefill how fast the engine is; before that it takes both for what is usual, and
 * loads few blocks at a time from a disk that it has not measured. A load that waits longer than its deadline costs more than it can still
 * save. Does not wait; may have a few blocks of a disk that is not used read in the background, so that its speed stays known. OK,
 * KVASIR_KV_INVALID_ARGUMENT (the text names the field) or KVASIR_KV_INVALID_HANDLE.
 */
int32_t kvasir_kv_plan_prompt(kvasir_kv *handle, const kvasir_kv_prompt *prompt, kvasir_kv_plan *plan);

/*
 * Tells how long the engine took to compute `tokens` tokens of prompts behind `context` tokens: of several prompts in one step the
 * sum of tokens, and the context of one prompt of that sum with as many pairs of a token and one that it attends to. Both are below 2^31;
 * `elapsed_us` are microseconds. 0 tokens or microseconds change nothing. OK, KVASIR_KV_INVALID_ARGUMENT or KVASIR_KV_INVALID_HANDLE.
 */
int32_t kvasir_kv_observe_prefill(kvasir_kv *handle, uint64_t tokens, uint64_t context, uint64_t elapsed_us);

/* What has become of a conversation. */
typedef enum kvasir_kv_conversation_event {
    KVASIR_KV_CONTINUED = 0, /* a prompt of it has come */
    KVASIR_KV_IDLE = 1       /* its answer is complete: it waits for its user */
} kvasir_kv_conversation_event;

/*
 * Tells of a conversation, so that the library learns when conversations go on and brings the blocks of one that is about to into
 * memory before its prompt comes (`host_tier.prefetch`). `event` is one of kvasir_kv_conversation_event. IDLE: `identities` are all
 * blocks of the conversation, from the first; the last one identifies it. CONTINUED: `identities` are the prompt's blocks; the idle
 * conversation that the latest of them identifies goes on. The identifying block alone is enough. The call is a hint: no completion
 * follows, and it is dropped when 64 messages wait or prefetching is off. Blocks that come from other nodes and objects are not
 * counted as prefetched. OK, KVASIR_KV_INVALID_ARGUMENT or KVASIR_KV_INVALID_HANDLE.
 */
int32_t kvasir_kv_conversation(kvasir_kv *handle, uint32_t event, const uint8_t (*identities)[16], size_t count);

/*
 * Retains blocks for `seconds`, counted from now, or `host_tier.retention_max` if that is less: on the disk, or in memory without one, and in the
 * pools of [remote_tier]. No retained block is evicted. A block that is not there is awaited for a minute, and retained when it comes. It is
 * refused when as many are retained as may be (`host_tier.retention_share`), or as many awaited, or when the block before it is there and
 * not retained: `identities` are at most 2^17 blocks of one chain, from its first one on. A later call can make the time longer. kvasir_kv_delete and the
 * end of the process end it. A hint, without a completion. OK, KVASIR_KV_THROTTLED (too many requests wait), KVASIR_KV_INVALID_ARGUMENT
 * or KVASIR_KV_INVALID_HANDLE.
 */
int32_t kvasir_kv_retain(kvasir_kv *handle, const uint8_t (*identities)[16], size_t count, uint32_t seconds);

/* How a transfer that was expected has ended. */
typedef enum kvasir_kv_ending {
    KVASIR_KV_COMPLETE = 0,
    KVASIR_KV_CORRUPTED = 1,      /* a checksum did not match */
    KVASIR_KV_SENDER_STOPPED = 2, /* before the end, or it has another content or layout */
    KVASIR_KV_PEER_DOWN = 3,      /* the connection could not be made, or ended */
    KVASIR_KV_DEADLINE = 4,
    KVASIR_KV_REFUSED = 5, /* no memory for its blocks, more than 4096 transfers, a bad address, no transport between the memory
                              of both sides, or the device failed */
    KVASIR_KV_CANCELLED = 6
} kvasir_kv_ending;

typedef struct kvasir_kv_handoff {
    uint64_t user;        /* comes back in the completion */
    uint32_t operation;   /* KVASIR_KV_PUSH or KVASIR_KV_EXPECT */
    uint32_t first_block; /* number of the first block, counted from the beginning of the prompt */
    uint8_t content[16];  /* what is handed over as a whole: equal on both sides of one prompt, and on no others */
    uint64_t tensors;     /* what kvasir_kv_register wrote */
    const uint64_t *blocks; /* their numbers in the tensors, in the order of the prompt, below `blocks` of the tensors */
    size_t count; /* of a push 1 to 2^20, also of all that is under way together; of an expectation 1 to 65536 */
    const uint64_t *transfers; /* one between each pair of processes, equal on both sides; at random, never twice */
    size_t transfer_count;     /* how many processes take a share of a push, or send one of an expectation; 1 to 64 */
    const char *const *addresses; /* of an expectation: the sender of each transfer, a line of its
                                   * kvasir_kv_handoff_address; otherwise null */
    uint32_t first_layer; /* of a push: the first layer that is computed; otherwise 0 */
    uint32_t layers;      /* of a push: how many; otherwise 0 */
    uint32_t deadline_ms; /* of an expectation: how long to wait for all of it; otherwise 0 */
    uint32_t bytes;       /* sizeof(kvasir_kv_handoff): later versions append fields */
    void *event;          /* null, or a recorded CUDA event (CUevent) of all earlier work on the blocks; null for host memory */
} kvasir_kv_handoff;

/*
 * Submits one part of a hand-off without waiting. Two processes meet by the number of their transfer, in any order: the
 * sender pushes layers of blocks as they are computed, in as many pushes as it likes, a block's layers in order; the
 * receiver says once which blocks it wants, those before them being there already, and where they go. Nothing is sent
 * that was not asked for. The status is that of kvasir_kv_submit_transfer; a second expectation of a transfer that is
 * expected is KVASIR_KV_INVALID_ARGUMENT.
 *
 * Processes of one engine may each have some heads of every block, and those of the other engine others: what two of them
 * have in common goes from one to the other, in a transfer of its own. All pushes of a hand-off name the same transfers
 * (others are KVASIR_KV_INVALID_ARGUMENT); calls that name a hand-off by one transfer name it by the first.
 *
 * The senders of an expectation must have all of its heads between them: what each of them sends is verified, and not
 * that none is missing. Who learns from others how many processes there are, as kvasir_kv/handoff.py does, makes these
 * numbers a part of `content`, so that sides that disagree on them hand nothing over.
 *
 * Every hand-off that was pushed is ended by kvasir_kv_end_handoff or kvasir_kv_cancel_handoff, whatever became of it:
 * until then the library keeps a record of it.
 *
 * The planes of the tensors are layers in equal groups: with `transfer.layers` = 32 and 64 planes,
 * the first two are the first layer's. Each group has `rows` * `heads` * `head_bytes` bytes of a block. The tensors lie in
 * host memory, or with [device] in that device's: a kernel copies their blocks into memory of the library's on the device
 * (`device.handoff_capacity`), from where they take the way through pinned host memory (`transfer.capacity`, of which half
 * is for what is received, so that an expectation of more blocks than that is THROTTLED or a MISS; blocks from several
 * processes count once for each). With `device.direct`
 * network cards, or the copy engines of a device of the same host, read and write the device's memory instead, and the
 * devices verify, where they reach the peer and it has equal heads; every other hand-off takes the way through the host's
 * memory. The two sides of a hand-off need not be alike in any of this. The device's work begins when `event` has passed.
 *
 * A push completes when its layers were copied into memory of the library's: the blocks may change from then on. OK, MISS
 * (nobody wants the transfer any more: pushes need not go on), or THROTTLED (no memory: the transfer is given up, and the
 * receiver told). Blocks are kept for `transfer.lease` when no receiver comes.
 *
 * An expectation completes when all blocks are in the tensors (OK), or when no more will come (MISS, or THROTTLED without
 * memory). `payload_bytes` is how many of them are there, from the first on: each byte of those has been verified.
 * Blocks beyond them are untouched. `meta_bytes` is the reason.
 *
 * The blocks' memory and the event must stay, the memory untouched by others (a push: unchanged), until the completion was
 * polled or kvasir_kv_close returned; tensors of a device until they were unregistered. Peers never reach it: they write to the library's memory.
 */
int32_t kvasir_kv_submit_handoff(kvasir_kv *handle, const kvasir_kv_handoff *handoff);

/* Says that nothing more will be pushed for a hand-off. Pushes that were submitted before still count. */
int32_t kvasir_kv_end_handoff(kvasir_kv *handle, uint64_t transfer);

/*
 * Stops a hand-off on whichever side this is, and tells the other one. An expectation completes at once with MISS and
 * KVASIR_KV_CANCELLED; pushes that were submitted complete. Of an unknown transfer it is remembered for a while that it
 * was cancelled, so that its other half, which may be on its way, starts nothing.
 */
int32_t kvasir_kv_cancel_handoff(kvasir_kv *handle, uint64_t transfer);

/*
 * Tells the sender at `address` that nothing of a transfer is wanted. Does nothing for a transfer that is expected here;
 * OK also when nobody is at the address.
 */
int32_t kvasir_kv_decline_handoff(kvasir_kv *handle, uint64_t transfer, const char *address);

/*
 * Copies how peers reach this process: a line for each way, best first, such as `shm:/tmp/kvasir-1.sock` for those of
 * this host and `rdma:10.0.0.2:18500,tcp:10.0.0.2:7400` for all; with `device.direct` the line for processes of this host
 * names every transport. At most `bytes` bytes with the final 0; `*length` is
 * that of the whole text without it. KVASIR_KV_INVALID_ARGUMENT without a section [transfer].
 */
int32_t kvasir_kv_handoff_address(kvasir_kv *handle, char *text, size_t bytes, size_t *length);

typedef struct kvasir_kv_handoff_statistics {
    uint64_t blocks_received;      /* and verified */
    uint64_t transfers_completed;  /* received whole */
    uint64_t transfers_incomplete; /* ended with blocks missing */
    uint64_t transfers_cancelled;  /* by either side */
    uint64_t leases_expired;       /* the receiver never came */
    uint64_t peers_lost;           /* connections that ended */
    uint64_t bytes_sent;
    uint64_t checksum_failures;
    uint64_t slots_used; /* now */
    /* Transfers of tensors of a device: by network cards or copy engines alone, and through the host's memory. */
    uint64_t sent_directly;
    uint64_t sent_staged;
    uint64_t received_directly;
    uint64_t received_staged;
    uint64_t slots; /* blocks for which there are slots; of a device, in its memory */
} kvasir_kv_handoff_statistics;

/* Writes counters, as kvasir_kv_stats does. */
int32_t kvasir_kv_handoff_stats(kvasir_kv *handle, kvasir_kv_handoff_statistics *statistics, size_t bytes);

/* One transport of hand-offs. Later versions append fields. */
typedef struct kvasir_kv_rail_statistics {
    char name[64];                /* "shm", "cuda_ipc", "tcp" or "rdma DEVICE"; longer names are cut */
    uint64_t block_bytes;         /* of blocks that it was given to write or read */
    uint64_t slices_retried;      /* posted again because a connection had failed */
    uint64_t links_failed;        /* connections that ended while their peer went on over others */
    uint64_t nanoseconds_per_kib; /* queue included, smoothed; 0 where no peer has several rails */
    uint64_t is_slow;             /* 1 while it takes 3 times as long for a KiB as the best of equal preference */
} kvasir_kv_rail_statistics;

/*
 * Writes counters of at most `room` transports, each into `rail_bytes` bytes (sizeof(kvasir_kv_rail_statistics); of a shorter
 * structure the first fields are written); `*count` is how many there are. `rails` may be null when `room` is 0.
 */
int32_t kvasir_kv_handoff_rails(kvasir_kv *handle, kvasir_kv_rail_statistics *rails, size_t rail_bytes, size_t room,
                                size_t *count);

/* How long one stage of hand-offs took. Later versions append fields. */
typedef struct kvasir_kv_stage_statistics {
    /* Of the receiver: "reserve" (until the sender knows the slots), "first_part" (until the first layers are there), "verify",
     * "whole"; of the sender: "write", "sum", "finish" (until the receiver has its last word). */
    char name[16];
    uint64_t sum_us;      /* all of them together */
    uint64_t count;
    uint64_t at_most[23]; /* how many took at most 16 microseconds times two to the power of the index: up to 67 s */
} kvasir_kv_stage_statistics;

/* Writes times of at most `room` stages, as kvasir_kv_handoff_rails does. */
int32_t kvasir_kv_handoff_stages(kvasir_kv *handle, kvasir_kv_stage_statistics *stages, size_t stage_bytes, size_t room,
                                 size_t *count);

#ifdef __cplusplus
}
#endif

#endif
