/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * What both sides of the maps see. Each structure has a mirror of the same size in src/layout.rs, and
 * each list of counters the same order there.
 */
#ifndef KVASIR_SHARED_H
#define KVASIR_SHARED_H

#include "kernel.h"

/* One end of a TCP connection as that end sees it. IPv4 is written as ::ffff:a.b.c.d, because a socket
 * that listens on [::] sees its IPv4 peers so. Ports are in host order, addresses in network order. */
struct endpoint {
	u64 netns;
	u32 local[4];
	u32 remote[4];
	u32 local_port;
	u32 remote_port;
};

/* What a socket in the map says about itself to its peer's program. */
struct endpoint_state {
	u64 socket;      /* address of its struct sock, read only with probe_read_kernel */
	u64 unread;      /* bytes redirected to it since its queue was last seen empty, overhead included */
	u32 read_to;     /* TCP sequence number up to which it has read, published when it last sent */
	u32 bulk;        /* its peer once sent faster than it read: the stream from then on */
};

struct redirect_settings {
	u32 enabled;
	u32 message_bytes_max;
	u64 unread_bytes_max;
};

enum redirect_counter {
	REDIRECTED_MESSAGES,
	REDIRECTED_BYTES,
	PASSED_LARGE,
	PASSED_NO_PEER,
	PASSED_UNREAD,
	REFUSED,
	SOCKETS_ADDED,
	SOCKETS_NOT_ADDED,
	REDIRECT_COUNTERS,
};

struct admission_settings {
	u64 source_interval_ns; /* 0: no limit per source */
	u64 source_burst_ns;
	u64 total_interval_ns;  /* 0: no limit over all sources */
	u64 total_burst_ns;
	u32 allow_list;         /* 0: every source */
	u32 overload_percent;   /* share of new connections dropped, 0 to 100 */
};

enum admission_counter {
	PASSED_OTHER,
	PASSED_ESTABLISHED,
	PASSED_CONNECTION,
	PASSED_FRAGMENT,
	PASSED_EXTENSION,
	PASSED_MALFORMED,
	DROPPED_PREFIX,
	DROPPED_OVERLOAD,
	DROPPED_SOURCE_RATE,
	DROPPED_TOTAL_RATE,
	ADMISSION_COUNTERS,
};

struct prefix_v4 {
	u32 bits;
	u32 address;
};

struct prefix_v6 {
	u32 bits;
	u32 address[4];
};

struct latency_settings {
	u64 cgroup;  /* id of the cgroup whose sockets count, 0: use tgid */
	u32 tgid;    /* process whose sockets and requests count, 0: any */
	u32 major;   /* device whose requests count, 0 and 0: any */
	u32 minor;
	u32 padding;
};

enum histogram {
	CONNECT,
	LIFETIME,
	READ_DELAY,
	ROUND_TRIP,
	BLOCK_READ,
	BLOCK_WRITE,
	BLOCK_FLUSH,
	HISTOGRAMS,
};

/* A bucket covers a quarter of an octave: two bits below the highest one. 2^40 ns are 18 minutes. */
#define OCTAVES 40
#define BUCKETS (OCTAVES * 4)

struct histogram_values {
	u64 counts[BUCKETS];
	u64 sum_ns;
};

/* A listening port within a network namespace: an engine. */
struct engine_port {
	u32 netns; /* inode number of the namespace */
	u32 port;
};

#define ENGINES_MAX 32

enum engine_histogram {
	FIRST_BYTE,
	READ_LATE,
	RUN_QUEUE,
	DISK_READ,
	ENGINE_HISTOGRAMS,
};

enum latency_counter {
	RETRANSMITS,
	UNTRACKED,
	LATENCY_COUNTERS,
};

#endif
