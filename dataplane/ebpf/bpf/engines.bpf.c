/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * Why an engine is slow, as the kernel sees it: histograms for each engine, which is a listening port and the processes behind
 * it. Nothing of the engine is changed.
 *
 * All attached programs are BTF tracepoints (`own_tgid` is only run once); that of sends is there since Linux 6.3. A socket is an engine's by its network namespace
 * and its local port, which an accepted connection has from its listener; a task or a disk read by its process.
 */
#include "histogram.h"

#define TCP_STATE_CLOSE 7
#define REQUEST_OPERATION 0xff
#define REQUEST_READ 0
#define STILL_RUNNABLE 0

struct ns_common {
	u32 inum;
} KERNEL_TYPE;

struct net {
	struct ns_common ns;
} KERNEL_TYPE;

typedef struct {
	struct net *net;
} KERNEL_TYPE possible_net_t;

struct sock_common {
	u16 skc_num;
	possible_net_t skc_net;
} KERNEL_TYPE;

struct sock {
	struct sock_common __sk_common;
} KERNEL_TYPE;

struct sk_buff {
	u32 len;
	unsigned char *data;
} KERNEL_TYPE;

struct task_struct {
	s32 pid;
	s32 tgid;
} KERNEL_TYPE;

struct request {
	u32 cmd_flags;
} KERNEL_TYPE;

/* What a client has asked on a connection. A next request may come before the call that sent the last answer has ended, whose
 * tracepoint comes only then: what was not read and what was not answered are kept apart. */
struct asked {
	u64 unread_since; /* when the first bytes came that the engine has not read, or 0 */
	u64 arrived;      /* when the request came that the engine has read and not answered, or 0 */
};

struct issued {
	u64 at;
	u64 engine;
};

struct {
	UINT(type, MAP_HASH);
	UINT(max_entries, ENGINES_MAX);
	TYPE(key, struct engine_port);
	TYPE(value, u32);
} ports SEC(".maps");

struct {
	UINT(type, MAP_HASH);
	UINT(max_entries, 4096);
	TYPE(key, u32);
	TYPE(value, u32);
} processes SEC(".maps");

struct {
	UINT(type, MAP_LRU_HASH);
	UINT(max_entries, 16384);
	TYPE(key, u64);
	TYPE(value, struct asked);
} asked_of SEC(".maps");

struct {
	UINT(type, MAP_LRU_HASH);
	UINT(max_entries, 16384);
	TYPE(key, u32);
	TYPE(value, u64);
} runnable SEC(".maps");

struct {
	UINT(type, MAP_LRU_HASH);
	UINT(max_entries, 16384);
	TYPE(key, u64);
	TYPE(value, struct issued);
} reads SEC(".maps");

struct {
	UINT(type, MAP_PERCPU_ARRAY);
	UINT(max_entries, ENGINES_MAX * ENGINE_HISTOGRAMS);
	TYPE(key, u32);
	TYPE(value, struct histogram_values);
} histograms SEC(".maps");

struct {
	UINT(type, MAP_PERCPU_ARRAY);
	UINT(max_entries, ENGINES_MAX);
	TYPE(key, u32);
	TYPE(value, u64);
} resent SEC(".maps");

INLINE void record(u32 engine, u32 histogram, u64 ns)
{
	u32 key = engine * ENGINE_HISTOGRAMS + histogram;
	struct histogram_values *values = map_lookup(&histograms, &key);
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

INLINE u32 *engine_of(struct sock *sk)
{
	struct engine_port key = {};

	key.netns = sk->__sk_common.skc_net.net->ns.inum;
	key.port = sk->__sk_common.skc_num;
	return map_lookup(&ports, &key);
}

/* (sk, skb): a segment has arrived for an established connection. */
SEC("tp_btf/tcp_probe")
int request_arrives(u64 *context)
{
	struct sk_buff *skb = (struct sk_buff *)context[1];
	u64 key = context[0];
	struct asked fresh = {};
	struct asked *asked;
	u8 words = 0;

	if (!engine_of((struct sock *)context[0]))
		return 0;
	asked = map_lookup(&asked_of, &key);
	if (asked && asked->unread_since)
		return 0;
	/* skb->data is at the TCP header, whose length in words is in the upper half of its byte 12. */
	if (probe_read_kernel(&words, 1, skb->data + 12) || skb->len <= (words >> 4) * 4u)
		return 0;
	fresh.unread_since = now_ns();
	if (asked)
		asked->unread_since = fresh.unread_since;
	else
		map_update(&asked_of, &key, &fresh, UPDATE_ANY);
	return 0;
}

/* (sk, bytes, flags): the engine has read. */
SEC("tp_btf/sock_recv_length")
int request_read(u64 *context)
{
	u64 key = context[0];
	struct asked *asked;
	u32 *engine;

	if ((int)context[1] <= 0)
		return 0;
	engine = engine_of((struct sock *)context[0]);
	if (!engine)
		return 0;
	asked = map_lookup(&asked_of, &key);
	if (!asked || !asked->unread_since)
		return 0;
	/* What comes before an answer belongs to the same request. */
	if (!asked->arrived) {
		asked->arrived = asked->unread_since;
		record(*engine, READ_LATE, now_ns() - asked->arrived);
	}
	asked->unread_since = 0;
	return 0;
}

/* (sk, bytes, flags): the engine has sent; the first bytes end a request's wait. */
SEC("tp_btf/sock_send_length")
int answer_begins(u64 *context)
{
	u64 key = context[0];
	struct asked *asked;
	u32 *engine;

	if ((int)context[1] <= 0)
		return 0;
	engine = engine_of((struct sock *)context[0]);
	if (!engine)
		return 0;
	asked = map_lookup(&asked_of, &key);
	if (asked && asked->arrived) {
		record(*engine, FIRST_BYTE, now_ns() - asked->arrived);
		asked->arrived = 0;
	}
	return 0;
}

/* (sk, old state, new state): the address of a socket that ends may be another one's next. */
SEC("tp_btf/inet_sock_set_state")
int socket_ends(u64 *context)
{
	u64 key = context[0];

	if ((int)context[2] == TCP_STATE_CLOSE)
		map_delete(&asked_of, &key);
	return 0;
}

/* (sk, skb, ...) */
SEC("tp_btf/tcp_retransmit_skb")
int engine_resends(u64 *context)
{
	u32 *engine = engine_of((struct sock *)context[0]);

	if (engine)
		COUNT(resent, *engine, 1);
	return 0;
}

INLINE void begins_to_wait(struct task_struct *task)
{
	u32 tgid = (u32)task->tgid, pid = (u32)task->pid;
	u64 now = now_ns();

	if (map_lookup(&processes, &tgid))
		map_update(&runnable, &pid, &now, UPDATE_ANY);
}

/* (task) */
SEC("tp_btf/sched_wakeup")
int task_wakes(u64 *context)
{
	begins_to_wait((struct task_struct *)context[0]);
	return 0;
}

/* (task) */
SEC("tp_btf/sched_wakeup_new")
int task_begins(u64 *context)
{
	begins_to_wait((struct task_struct *)context[0]);
	return 0;
}

/* (preempted, task before, task after, state of the task before) */
SEC("tp_btf/sched_switch")
int task_switches(u64 *context)
{
	struct task_struct *next = (struct task_struct *)context[2];
	u32 pid = (u32)next->pid, tgid;
	u64 *since;
	u32 *engine;

	if ((u32)context[3] == STILL_RUNNABLE)
		begins_to_wait((struct task_struct *)context[1]);
	since = map_lookup(&runnable, &pid);
	if (!since)
		return 0;
	tgid = (u32)next->tgid;
	engine = map_lookup(&processes, &tgid);
	if (engine)
		record(*engine, RUN_QUEUE, now_ns() - *since);
	map_delete(&runnable, &pid);
	return 0;
}

/* (request) */
SEC("tp_btf/block_rq_issue")
int read_issued(u64 *context)
{
	struct request *request = (struct request *)context[0];
	u32 tgid = (u32)(current_pid_tgid() >> 32);
	u64 key = context[0];
	struct issued issued = {};
	u32 *engine;

	if ((request->cmd_flags & REQUEST_OPERATION) != REQUEST_READ)
		return 0;
	engine = map_lookup(&processes, &tgid);
	if (!engine)
		return 0;
	issued.at = now_ns();
	issued.engine = *engine;
	map_update(&reads, &key, &issued, UPDATE_ANY);
	return 0;
}

/* (request, error, bytes) */
SEC("tp_btf/block_rq_complete")
int read_done(u64 *context)
{
	u64 key = context[0];
	struct issued *issued = map_lookup(&reads, &key);

	if (!issued)
		return 0;
	record((u32)issued->engine, DISK_READ, now_ns() - issued->at);
	map_delete(&reads, &key);
	return 0;
}

char program_license[] SEC("license") = "GPL";
