/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * Short messages between two sockets of this host skip the TCP stack: sk_msg hands the sender's pages to
 * the receiver's own queue.
 *
 * That queue and the TCP stream are two queues, and the kernel reads the first before the second
 * (tcp_bpf_recvmsg). Bytes would be reordered, or missed by a reader that waits for an edge after a short
 * read, if both held bytes at once. So the rule is: never both.
 *  - Stream to queue: only when the peer has read all that this socket ever wrote to the stream, that is
 *    when our write_seq equals the sequence number up to which the peer had read when it last sent or was
 *    established. This also proves, in 32 bits, that the entry found is the other end of this connection.
 *  - Queue to stream: only when the peer's queue is seen to be empty.
 * The queue has no flow control of its own. Long messages therefore want the stream, which has, and so does
 * a direction in which much has once waited. What goes to the queue regardless, because it was not empty, is
 * counted, and refused with EACCES above a limit: a program here cannot make a sender wait.
 */
#include "shared.h"

#define ACTIVE_ESTABLISHED 4
#define PASSIVE_ESTABLISHED 5
#define STATE_CHANGED 10
#define STATE_CHANGED_FLAG 4
#define TCP_CLOSED 7

#define VERDICT_DROP 0
#define VERDICT_PASS 1

/* What a queued message costs in the kernel beside its bytes: a struct sk_msg. */
#define MESSAGE_OVERHEAD 1024

/* So much has to wait unread before a direction is known for bulk. */
#define BULK_BYTES (1 << 20)

/* The low bits of sk_user_data are flags (include/net/sock.h). */
#define USER_DATA_FLAGS 7ULL

struct bpf_sock_ops {
	u32 op;
	u32 args[4];
	u32 family;
	u32 remote_ip4;
	u32 local_ip4;
	u32 remote_ip6[4];
	u32 local_ip6[4];
	u32 remote_port;
	u32 local_port;
	u32 skipped[24];
	u64 bytes_received;
	u64 bytes_acked;
	void *sk;
};
_Static_assert(__builtin_offsetof(struct bpf_sock_ops, sk) == 184, "struct bpf_sock_ops");

struct sk_msg_md {
	void *data;
	void *data_end;
	u32 family;
	u32 remote_ip4;
	u32 local_ip4;
	u32 remote_ip6[4];
	u32 local_ip6[4];
	u32 remote_port;
	u32 local_port;
	u32 size;
	void *sk;
};
_Static_assert(__builtin_offsetof(struct sk_msg_md, sk) == 72, "struct sk_msg_md");

struct list_head {
	struct list_head *next;
} KERNEL_TYPE;

struct sk_psock {
	struct list_head ingress_msg;
} KERNEL_TYPE;

struct sock {
	void *sk_user_data;
} KERNEL_TYPE;

struct inet_connection_sock {
	void *icsk_ulp_ops;
} KERNEL_TYPE;

struct tcp_sock {
	struct inet_connection_sock inet_conn;
	u32 copied_seq;
	u32 write_seq;
} KERNEL_TYPE;

struct {
	UINT(type, MAP_ARRAY);
	UINT(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct redirect_settings);
} settings SEC(".maps");

struct {
	UINT(type, MAP_HASH);
	UINT(max_entries, 64);
	TYPE(key, u32);
	TYPE(value, u8);
} ports SEC(".maps");

struct {
	UINT(type, MAP_SOCKHASH);
	UINT(max_entries, 8192);
	TYPE(key, struct endpoint);
	TYPE(value, u32);
} sockets SEC(".maps");

struct {
	UINT(type, MAP_HASH);
	UINT(map_flags, NO_PREALLOC);
	UINT(max_entries, 8192);
	TYPE(key, struct endpoint);
	TYPE(value, struct endpoint_state);
} endpoints SEC(".maps");

struct {
	UINT(type, MAP_PERCPU_ARRAY);
	UINT(max_entries, REDIRECT_COUNTERS);
	TYPE(key, u32);
	TYPE(value, u64);
} counters SEC(".maps");

/* In assembly, because clang folds the same load of two branches into one at a computed address, which the
 * verifier refuses for a context. */
#define CONTEXT_FIELD(context, field)                                                  \
	({                                                                             \
		u64 loaded_;                                                           \
		asm volatile("%0 = *(u32 *)(%1 + %2)"                                  \
			     : "=r"(loaded_)                                           \
			     : "r"(context),                                           \
			       "i"(__builtin_offsetof(typeof(*(context)), field)));    \
		(u32)loaded_;                                                          \
	})

/* Works for both contexts, whose fields have the same names. */
#define ENDPOINT_OF(context, endpoint)                                                          \
	do {                                                                                    \
		(endpoint)->netns = netns_cookie(context);                                      \
		(endpoint)->local_port = CONTEXT_FIELD(context, local_port);                    \
		(endpoint)->remote_port = FROM_NETWORK_32(CONTEXT_FIELD(context, remote_port)); \
		if (CONTEXT_FIELD(context, family) == AF_INET6_FAMILY) {                        \
			(endpoint)->local[0] = CONTEXT_FIELD(context, local_ip6[0]);            \
			(endpoint)->local[1] = CONTEXT_FIELD(context, local_ip6[1]);            \
			(endpoint)->local[2] = CONTEXT_FIELD(context, local_ip6[2]);            \
			(endpoint)->local[3] = CONTEXT_FIELD(context, local_ip6[3]);            \
			(endpoint)->remote[0] = CONTEXT_FIELD(context, remote_ip6[0]);          \
			(endpoint)->remote[1] = CONTEXT_FIELD(context, remote_ip6[1]);          \
			(endpoint)->remote[2] = CONTEXT_FIELD(context, remote_ip6[2]);          \
			(endpoint)->remote[3] = CONTEXT_FIELD(context, remote_ip6[3]);          \
		} else {                                                                        \
			(endpoint)->local[0] = 0;                                               \
			(endpoint)->local[1] = 0;                                               \
			(endpoint)->local[2] = TO_NETWORK_32(0xffff);                           \
			(endpoint)->local[3] = CONTEXT_FIELD(context, local_ip4);               \
			(endpoint)->remote[0] = 0;                                              \
			(endpoint)->remote[1] = 0;                                              \
			(endpoint)->remote[2] = TO_NETWORK_32(0xffff);                          \
			(endpoint)->remote[3] = CONTEXT_FIELD(context, remote_ip4);             \
		}                                                                               \
	} while (0)

INLINE int is_loopback_v4(const u32 *address)
{
	return address[0] == 0 && address[1] == 0 && address[2] == TO_NETWORK_32(0xffff) &&
	       (FROM_NETWORK_32(address[3]) >> 24) == 127;
}

/* Both ends are on this host beyond doubt: the same address, or the loopback net. Any other connection
 * never enters the map and so runs the kernel's own code. */
INLINE int is_local(const struct endpoint *endpoint)
{
	if (is_loopback_v4(endpoint->local) && is_loopback_v4(endpoint->remote))
		return 1;
	return endpoint->local[0] == endpoint->remote[0] && endpoint->local[1] == endpoint->remote[1] &&
	       endpoint->local[2] == endpoint->remote[2] && endpoint->local[3] == endpoint->remote[3];
}

INLINE void add(struct bpf_sock_ops *context)
{
	struct endpoint self = {};
	struct endpoint_state state = {};
	struct tcp_sock *tcp;
	void *sk;
	u32 zero = 0;
	struct redirect_settings *set = map_lookup(&settings, &zero);

	if (!set || !set->enabled)
		return;
	ENDPOINT_OF(context, &self);
	if (!map_lookup(&ports, &self.local_port) && !map_lookup(&ports, &self.remote_port))
		return;
	if (!is_local(&self))
		return;
	sk = context->sk;
	if (!sk)
		return;
	tcp = to_tcp_sock(sk);
	if (!tcp)
		return;
	state.socket = (u64)tcp;
	state.read_to = tcp->copied_seq;
	/* The callback at close comes first: without it the state would outlive the socket. */
	if (sock_ops_callbacks_set(context, STATE_CHANGED_FLAG) ||
	    map_update(&endpoints, &self, &state, UPDATE_ANY)) {
		COUNT(counters, SOCKETS_NOT_ADDED, 1);
		return;
	}
	if (sock_hash_update(context, &sockets, &self, UPDATE_ANY)) {
		map_delete(&endpoints, &self);
		COUNT(counters, SOCKETS_NOT_ADDED, 1);
		return;
	}
	COUNT(counters, SOCKETS_ADDED, 1);
}

SEC("sockops")
int track(struct bpf_sock_ops *context)
{
	switch (context->op) {
	case ACTIVE_ESTABLISHED:
	case PASSIVE_ESTABLISHED:
		add(context);
		break;
	case STATE_CHANGED:
		if (context->args[1] == TCP_CLOSED) {
			struct endpoint self = {};

			ENDPOINT_OF(context, &self);
			map_delete(&endpoints, &self);
		}
		break;
	}
	return 1;
}

/* Whether the queue of redirected messages of this socket is empty. The address is that of a socket that
 * has not closed (its entry goes first), and sockets and their queues are freed only after the RCU read
 * section that this program runs in; a wrong answer is impossible while its owner lives. */
INLINE int queue_is_empty(u64 socket)
{
	struct sock *sk = (struct sock *)socket;
	struct sk_psock *queue;
	void *user_data = NULL;
	void *first = NULL;
	void *head;

	if (probe_read_kernel(&user_data, sizeof(user_data), __builtin_preserve_access_index(&sk->sk_user_data)))
		return 0;
	queue = (struct sk_psock *)((u64)user_data & ~USER_DATA_FLAGS);
	if (!queue)
		return 1;
	head = __builtin_preserve_access_index(&queue->ingress_msg);
	if (probe_read_kernel(&first, sizeof(first), __builtin_preserve_access_index(&queue->ingress_msg.next)))
		return 0;
	return first == head;
}

SEC("sk_msg")
int forward(struct sk_msg_md *message)
{
	struct endpoint self = {};
	struct endpoint peer = {};
	struct endpoint_state *own, *other;
	struct redirect_settings *set;
	struct tcp_sock *tcp;
	u32 zero = 0, size = message->size;
	u64 cost = (u64)size + MESSAGE_OVERHEAD;
	int empty;

	set = map_lookup(&settings, &zero);
	if (!set || !message->sk)
		return VERDICT_PASS;
	tcp = to_tcp_sock(message->sk);
	if (!tcp)
		return VERDICT_PASS;
	ENDPOINT_OF(message, &self);
	peer.netns = self.netns;
	peer.local_port = self.remote_port;
	peer.remote_port = self.local_port;
	__builtin_memcpy(peer.local, self.remote, sizeof(peer.local));
	__builtin_memcpy(peer.remote, self.local, sizeof(peer.remote));

	own = map_lookup(&endpoints, &self);
	if (own)
		own->read_to = tcp->copied_seq;
	other = map_lookup(&endpoints, &peer);
	if (!other) {
		COUNT(counters, PASSED_NO_PEER, 1);
		return VERDICT_PASS;
	}
	if (tcp->write_seq != other->read_to) {
		COUNT(counters, PASSED_UNREAD, 1);
		return VERDICT_PASS;
	}
	empty = queue_is_empty(other->socket);
	if (empty) {
		/* A socket with kernel TLS would put plain text where its peer expects records. */
		if (size > set->message_bytes_max || other->bulk || !set->enabled ||
		    tcp->inet_conn.icsk_ulp_ops) {
			COUNT(counters, PASSED_LARGE, 1);
			return VERDICT_PASS;
		}
		other->unread = 0;
	} else if (other->unread + cost > set->unread_bytes_max) {
		COUNT(counters, REFUSED, 1);
		return VERDICT_DROP;
	}
	/* The peer may have closed since: then it reads no more, and the stream answers as it always does. */
	if (message_redirect_hash(message, &sockets, &peer, REDIRECT_TO_INGRESS) != VERDICT_PASS) {
		COUNT(counters, PASSED_NO_PEER, 1);
		return VERDICT_PASS;
	}
	other->unread += cost;
	if (other->unread > BULK_BYTES)
		other->bulk = 1;
	COUNT(counters, REDIRECTED_MESSAGES, 1);
	COUNT(counters, REDIRECTED_BYTES, size);
	return VERDICT_PASS;
}

char program_license[] SEC("license") = "GPL";
