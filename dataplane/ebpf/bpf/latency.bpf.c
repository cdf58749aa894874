/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * How long the kernel takes for the appliance: histograms of its TCP sockets and its block requests.
 *
 * All programs are BTF tracepoints: no kprobe, no trampoline and no tracefs is needed, and the kernel
 * checks each field that is read. A socket is the appliance's by its cgroup or by the process that
 * connected it; a request by the process that issued it or by its device. Tracked sockets and requests
 * live in a map keyed by their address, and leave it when they close or complete.
 */
#include "histogram.h"

#define TCP_STATE_ESTABLISHED 1
#define TCP_STATE_SYN_SENT 2
#define TCP_STATE_CLOSE 7

#define REQUEST_OPERATION 0xff
#define REQUEST_READ 0
#define REQUEST_WRITE 1
#define REQUEST_FLUSH 2

struct kernfs_node {
	u64 id;
} KERNEL_TYPE;

struct cgroup {
	struct kernfs_node *kn;
} KERNEL_TYPE;

struct sock_cgroup_data {
	struct cgroup *cgroup;
} KERNEL_TYPE;

struct sock {
	u16 sk_protocol;
	struct sock_cgroup_data sk_cgrp_data;
} KERNEL_TYPE;

struct tcp_sock {
	u32 srtt_us;
} KERNEL_TYPE;

struct sk_buff {
	u32 len;
	unsigned char *data;
} KERNEL_TYPE;

struct gendisk {
	s32 major;
	s32 first_minor;
} KERNEL_TYPE;

struct request_queue {
	struct gendisk *disk;
} KERNEL_TYPE;

struct request {
	struct request_queue *q;
	u32 cmd_flags;
} KERNEL_TYPE;

struct socket_times {
	u64 connecting;
	u64 established;
	u64 arrived; /* first bytes that nobody read yet, 0: none */
};

struct {
	UINT(type, MAP_ARRAY);
	UINT(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct latency_settings);
} settings SEC(".maps");

struct {
	UINT(type, MAP_HASH);
	UINT(max_entries, 16384);
	TYPE(key, u64);
	TYPE(value, struct socket_times);
} sockets SEC(".maps");

struct {
	UINT(type, MAP_HASH);
	UINT(max_entries, 16384);
	TYPE(key, u64);
	TYPE(value, u64);
} requests SEC(".maps");

struct {
	UINT(type, MAP_PERCPU_ARRAY);
	UINT(max_entries, HISTOGRAMS);
	TYPE(key, u32);
	TYPE(value, struct histogram_values);
} histograms SEC(".maps");

struct {
	UINT(type, MAP_PERCPU_ARRAY);
	UINT(max_entries, LATENCY_COUNTERS);
	TYPE(key, u32);
	TYPE(value, u64);
} counters SEC(".maps");

INLINE void record(u32 histogram, u64 ns)
{
	struct histogram_values *values = map_lookup(&histograms, &histogram);
	u32 index = bucket_of(ns);

	if (!values || index >= BUCKETS)
		return;
	values->counts[index] += 1;
	values->sum_ns += ns;
}

/* A process number as the kernel's first PID namespace has it; the caller may live in another one. */
SEC("raw_tp/sched_process_exit")
int own_tgid(void *context)
{
	(void)context;
	return (int)(current_pid_tgid() >> 32);
}

/* Lets a test put a value through the histogram code. */
SEC("raw_tp/sched_process_exit")
int record_value(u64 *context)
{
	record(CONNECT, context[0]);
	return 0;
}

INLINE int is_ours(struct sock *sk, int in_process)
{
	u32 zero = 0;
	struct latency_settings *set = map_lookup(&settings, &zero);

	if (!set)
		return 0;
	if (set->cgroup)
		return sk->sk_cgrp_data.cgroup->kn->id == set->cgroup;
	if (set->tgid)
		return in_process && (u32)(current_pid_tgid() >> 32) == set->tgid;
	return 1;
}

/* (sk, old state, new state) */
SEC("tp_btf/inet_sock_set_state")
int socket_state(u64 *context)
{
	struct sock *sk = (struct sock *)context[0];
	u64 key = context[0];
	int state = (int)context[2];
	struct socket_times *times;
	struct socket_times fresh = {};

	if (state == TCP_STATE_CLOSE) {
		times = map_lookup(&sockets, &key);
		if (times && times->established)
			record(LIFETIME, now_ns() - times->established);
		map_delete(&sockets, &key);
		return 0;
	}
	if (sk->sk_protocol != 6)
		return 0;
	if (state == TCP_STATE_SYN_SENT) {
		/* connect(2) runs in the process that asks. */
		if (!is_ours(sk, 1))
			return 0;
		fresh.connecting = now_ns();
		if (map_update(&sockets, &key, &fresh, UPDATE_ANY))
			COUNT(counters, UNTRACKED, 1);
	} else if (state == TCP_STATE_ESTABLISHED) {
		times = map_lookup(&sockets, &key);
		if (times) {
			times->established = now_ns();
			record(CONNECT, times->established - times->connecting);
		} else if (is_ours(sk, 0)) {
			/* An accepted connection: nobody waits for it, but it lives and is read. */
			fresh.established = now_ns();
			if (map_update(&sockets, &key, &fresh, UPDATE_ANY))
				COUNT(counters, UNTRACKED, 1);
		}
	}
	return 0;
}

/* (sk, skb): a segment has arrived for an established connection. */
SEC("tp_btf/tcp_probe")
int segment_arrives(u64 *context)
{
	u64 key = context[0];
	struct sk_buff *skb = (struct sk_buff *)context[1];
	struct socket_times *times = map_lookup(&sockets, &key);
	struct tcp_sock *tcp;
	u8 words = 0;

	if (!times)
		return 0;
	tcp = to_tcp_sock((void *)context[0]);
	/* The smoothed round-trip time, in eighths of a microsecond. */
	if (tcp && tcp->srtt_us)
		record(ROUND_TRIP, (u64)tcp->srtt_us * 125);
	/* skb->data is at the TCP header, whose length in words is in the upper half of its byte 12. */
	if (probe_read_kernel(&words, 1, skb->data + 12))
		return 0;
	if (skb->len > (words >> 4) * 4u && !times->arrived)
		times->arrived = now_ns();
	return 0;
}

/* (sk): a reader has taken bytes out of the socket. */
SEC("tp_btf/tcp_rcv_space_adjust")
int socket_read(u64 *context)
{
	u64 key = context[0];
	struct socket_times *times = map_lookup(&sockets, &key);

	if (times && times->arrived) {
		record(READ_DELAY, now_ns() - times->arrived);
		times->arrived = 0;
	}
	return 0;
}

/* (sk, skb, ...) */
SEC("tp_btf/tcp_retransmit_skb")
int segment_resent(u64 *context)
{
	u64 key = context[0];

	if (map_lookup(&sockets, &key))
		COUNT(counters, RETRANSMITS, 1);
	return 0;
}

/* (request) */
SEC("tp_btf/block_rq_issue")
int request_issued(u64 *context)
{
	struct request *request = (struct request *)context[0];
	u64 key = context[0], now;
	u32 zero = 0;
	struct latency_settings *set = map_lookup(&settings, &zero);

	if (!set || (request->cmd_flags & REQUEST_OPERATION) > REQUEST_FLUSH)
		return 0;
	if (set->tgid && (u32)(current_pid_tgid() >> 32) != set->tgid)
		return 0;
	if (set->major || set->minor) {
		struct gendisk *disk = request->q->disk;

		if (!disk || (u32)disk->major != set->major || (u32)disk->first_minor != set->minor)
			return 0;
	}
	now = now_ns();
	if (map_update(&requests, &key, &now, UPDATE_ANY))
		COUNT(counters, UNTRACKED, 1);
	return 0;
}

/* (request, error, bytes): the first part of a request that completes in parts is what counts. */
SEC("tp_btf/block_rq_complete")
int request_done(u64 *context)
{
	struct request *request = (struct request *)context[0];
	u64 key = context[0];
	u64 *issued = map_lookup(&requests, &key);
	u64 elapsed;

	if (!issued)
		return 0;
	elapsed = now_ns() - *issued;
	map_delete(&requests, &key);
	record(BLOCK_READ + (request->cmd_flags & REQUEST_OPERATION), elapsed);
	return 0;
}

char program_license[] SEC("license") = "GPL";
