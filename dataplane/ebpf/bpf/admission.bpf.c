/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * Who may open TCP connections to the appliance's ports, decided before the kernel allocates anything.
 *
 * Only TCP to a listed port is ever dropped; everything else, and everything that cannot be judged, passes
 * to the kernel and is counted by reason. The allow-list holds for every packet, the rates only for new
 * connections (SYN without ACK). A later fragment carries no port and passes: without its first fragment,
 * which is judged here, the kernel cannot put the packet together. A first fragment too short to show its
 * flags is taken for a new connection, because no honest TCP sends one.
 */
#include "shared.h"

#define XDP_DROP 1
#define XDP_PASS 2

#define ETHERTYPE_IPV4 0x0800
#define ETHERTYPE_IPV6 0x86dd
#define ETHERTYPE_VLAN 0x8100
#define ETHERTYPE_QINQ 0x88a8
#define VLAN_TAGS_MAX 2

#define PROTOCOL_HOP_BY_HOP 0
#define PROTOCOL_TCP 6
#define PROTOCOL_ROUTING 43
#define PROTOCOL_FRAGMENT 44
#define PROTOCOL_AUTHENTICATION 51
#define PROTOCOL_DESTINATION 60
#define EXTENSIONS_MAX 6

#define FRAGMENT_MORE_V4 0x2000
#define FRAGMENT_OFFSET_V4 0x1fff
#define FRAGMENT_MORE_V6 0x0001
#define FRAGMENT_OFFSET_V6 0xfff8

#define TCP_SYN 0x02
#define TCP_ACK 0x10

/* Another CPU takes from the same bucket between our read and our write this often at most. */
#define BUCKET_TRIES 8

struct xdp_md {
	u32 data;
	u32 data_end;
};

struct ethernet {
	u8 addresses[12];
	u16 type;
};

struct vlan {
	u16 tag;
	u16 type;
};

struct ipv4 {
	u8 version_words;
	u8 service;
	u16 bytes;
	u16 id;
	u16 fragment;
	u8 ttl;
	u8 protocol;
	u16 checksum;
	u32 source;
	u32 destination;
};

struct ipv6 {
	u32 version_flow;
	u16 payload_bytes;
	u8 next;
	u8 hops;
	u32 source[4];
	u32 destination[4];
};

/* Every extension header begins so; the fragment header has offset and flags in `rest`. */
struct extension {
	u8 next;
	u8 units;
	u16 rest;
	u32 more;
};

struct tcp_ports {
	u16 source;
	u16 destination;
};

struct tcp {
	struct tcp_ports ports;
	u32 sequence;
	u32 acknowledged;
	u8 words;
	u8 flags;
	u16 window;
	u16 checksum;
	u16 urgent;
};

/* What the IP layer says. */
struct packet {
	u32 source[4];
	void *transport;
	u32 first_fragment;
	u32 is_ipv4;
};

struct {
	UINT(type, MAP_ARRAY);
	UINT(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct admission_settings);
} settings SEC(".maps");

struct {
	UINT(type, MAP_HASH);
	UINT(max_entries, 64);
	TYPE(key, u32);
	TYPE(value, u8);
} ports SEC(".maps");

struct {
	UINT(type, MAP_LPM_TRIE);
	UINT(map_flags, NO_PREALLOC);
	UINT(max_entries, 4096);
	TYPE(key, struct prefix_v4);
	TYPE(value, u32);
} allow_v4 SEC(".maps");

struct {
	UINT(type, MAP_LPM_TRIE);
	UINT(map_flags, NO_PREALLOC);
	UINT(max_entries, 4096);
	TYPE(key, struct prefix_v6);
	TYPE(value, u32);
} allow_v6 SEC(".maps");

/* Bucket of a source: the time at which it will be full again. The least recently seen source makes room. */
struct {
	UINT(type, MAP_LRU_HASH);
	UINT(max_entries, 65536);
	TYPE(key, u32[4]);
	TYPE(value, u64);
} sources SEC(".maps");

struct {
	UINT(type, MAP_ARRAY);
	UINT(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, u64);
} total SEC(".maps");

struct {
	UINT(type, MAP_PERCPU_ARRAY);
	UINT(max_entries, ADMISSION_COUNTERS);
	TYPE(key, u32);
	TYPE(value, u64);
} counters SEC(".maps");

INLINE int finish(int verdict, u32 reason)
{
	COUNT(counters, reason, 1);
	return verdict;
}

/* Takes a token, or says no. The bucket is one number: when it will be full. It is full now if that time is
 * past; a token moves it by one interval; it is empty when it lies more than `burst` intervals ahead.
 * src/bucket.rs is the same in Rust. */
INLINE int take(u64 *full_at, u64 interval_ns, u64 burst_ns)
{
	u64 now = now_ns();

	for (int try = 0; try < BUCKET_TRIES; try++) {
		u64 seen = *(volatile u64 *)full_at;
		u64 next = (seen > now ? seen : now) + interval_ns;

		if (next - now > burst_ns)
			return 0;
		if (__sync_val_compare_and_swap(full_at, seen, next) == seen)
			return 1;
	}
	return 0;
}

/* An IPv6 source is its /64: one host owns that many addresses and could use each of them once. */
INLINE int source_has_token(const struct packet *packet, const struct admission_settings *set)
{
	u32 key[4] = {packet->source[0], packet->source[1], 0, 0};
	u64 *full_at;

	if (packet->is_ipv4) {
		key[2] = packet->source[2];
		key[3] = packet->source[3];
	}
	full_at = map_lookup(&sources, key);
	if (!full_at) {
		u64 first = now_ns() + set->source_interval_ns;

		map_update(&sources, key, &first, UPDATE_ANY);
		return 1;
	}
	return take(full_at, set->source_interval_ns, set->source_burst_ns);
}

INLINE int is_allowed(const struct packet *packet)
{
	if (packet->is_ipv4) {
		struct prefix_v4 key = {.bits = 32, .address = packet->source[3]};

		return map_lookup(&allow_v4, &key) != NULL;
	} else {
		struct prefix_v6 key = {.bits = 128};

		__builtin_memcpy(key.address, packet->source, sizeof(key.address));
		return map_lookup(&allow_v6, &key) != NULL;
	}
}

INLINE int admit_connection(const struct packet *packet, const struct admission_settings *set)
{
	u32 zero = 0;

	if (set->overload_percent && random_u32() % 100 < set->overload_percent)
		return finish(XDP_DROP, DROPPED_OVERLOAD);
	/* Sources first, so that one of them cannot empty the bucket of all. */
	if (set->source_interval_ns && !source_has_token(packet, set))
		return finish(XDP_DROP, DROPPED_SOURCE_RATE);
	if (set->total_interval_ns) {
		u64 *full_at = map_lookup(&total, &zero);

		if (full_at && !take(full_at, set->total_interval_ns, set->total_burst_ns))
			return finish(XDP_DROP, DROPPED_TOTAL_RATE);
	}
	return finish(XDP_PASS, PASSED_CONNECTION);
}

INLINE int judge(const struct packet *packet, void *end)
{
	struct tcp_ports *tcp_ports = packet->transport;
	struct tcp *tcp = packet->transport;
	struct admission_settings *set;
	u32 zero = 0, port;

	if ((void *)(tcp_ports + 1) > end)
		return finish(XDP_PASS, PASSED_MALFORMED);
	port = FROM_NETWORK_16(tcp_ports->destination);
	if (!map_lookup(&ports, &port))
		return finish(XDP_PASS, PASSED_OTHER);
	set = map_lookup(&settings, &zero);
	if (!set)
		return XDP_PASS;
	if (set->allow_list && !is_allowed(packet))
		return finish(XDP_DROP, DROPPED_PREFIX);
	if ((void *)(tcp + 1) > end) {
		if (packet->first_fragment)
			return admit_connection(packet, set);
		return finish(XDP_PASS, PASSED_MALFORMED);
	}
	if ((tcp->flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
		return finish(XDP_PASS, PASSED_ESTABLISHED);
	return admit_connection(packet, set);
}

INLINE int judge_v4(void *header, void *end)
{
	struct packet packet = {.is_ipv4 = 1};
	struct ipv4 *ip = header;
	u32 header_bytes;
	u16 fragment;

	if ((void *)(ip + 1) > end)
		return finish(XDP_PASS, PASSED_MALFORMED);
	header_bytes = (ip->version_words & 15) * 4;
	if (ip->version_words >> 4 != 4 || header_bytes < sizeof(*ip))
		return finish(XDP_PASS, PASSED_MALFORMED);
	if (ip->protocol != PROTOCOL_TCP)
		return finish(XDP_PASS, PASSED_OTHER);
	fragment = FROM_NETWORK_16(ip->fragment);
	if (fragment & FRAGMENT_OFFSET_V4)
		return finish(XDP_PASS, PASSED_FRAGMENT);
	packet.first_fragment = fragment & FRAGMENT_MORE_V4;
	packet.source[2] = TO_NETWORK_32(0xffff);
	packet.source[3] = ip->source;
	packet.transport = header + header_bytes;
	return judge(&packet, end);
}

INLINE int judge_v6(void *header, void *end)
{
	struct packet packet = {};
	struct ipv6 *ip = header;
	void *at = ip + 1;
	u8 next;

	if (at > end || (*(u8 *)header >> 4) != 6)
		return finish(XDP_PASS, PASSED_MALFORMED);
	next = ip->next;
	__builtin_memcpy(packet.source, ip->source, sizeof(packet.source));
#pragma unroll
	for (int i = 0; i < EXTENSIONS_MAX; i++) {
		struct extension *extension = at;

		if (next == PROTOCOL_TCP) {
			packet.transport = at;
			return judge(&packet, end);
		}
		if (next != PROTOCOL_HOP_BY_HOP && next != PROTOCOL_ROUTING && next != PROTOCOL_FRAGMENT &&
		    next != PROTOCOL_AUTHENTICATION && next != PROTOCOL_DESTINATION)
			return finish(XDP_PASS, PASSED_OTHER);
		if ((void *)(extension + 1) > end)
			return finish(XDP_PASS, PASSED_MALFORMED);
		if (next == PROTOCOL_FRAGMENT) {
			u16 fragment = FROM_NETWORK_16(extension->rest);

			if (fragment & FRAGMENT_OFFSET_V6)
				return finish(XDP_PASS, PASSED_FRAGMENT);
			packet.first_fragment |= fragment & FRAGMENT_MORE_V6;
			at += sizeof(*extension);
		} else if (next == PROTOCOL_AUTHENTICATION) {
			at += (extension->units + 2) * 4;
		} else {
			at += (extension->units + 1) * 8;
		}
		next = extension->next;
	}
	return finish(XDP_PASS, PASSED_EXTENSION);
}

SEC("xdp.frags")
int admit(struct xdp_md *context)
{
	void *at = (void *)(long)context->data;
	void *end = (void *)(long)context->data_end;
	struct ethernet *ethernet = at;
	u16 type;

	if ((void *)(ethernet + 1) > end)
		return finish(XDP_PASS, PASSED_MALFORMED);
	type = FROM_NETWORK_16(ethernet->type);
	at = ethernet + 1;
#pragma unroll
	for (int i = 0; i < VLAN_TAGS_MAX; i++) {
		struct vlan *vlan = at;

		if (type != ETHERTYPE_VLAN && type != ETHERTYPE_QINQ)
			break;
		if ((void *)(vlan + 1) > end)
			return finish(XDP_PASS, PASSED_MALFORMED);
		type = FROM_NETWORK_16(vlan->type);
		at = vlan + 1;
	}
	if (type == ETHERTYPE_IPV4)
		return judge_v4(at, end);
	if (type == ETHERTYPE_IPV6)
		return judge_v6(at, end);
	return finish(XDP_PASS, PASSED_OTHER);
}

char program_license[] SEC("license") = "Apache-2.0";
