/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * The few kernel definitions that the programs need, so that clang alone compiles them: no libbpf, no
 * vmlinux.h, no kernel headers. Context structures and numbers are user ABI and never change
 * (include/uapi/linux/bpf.h). Kernel structures are named parts only: `preserve_access_index` has the
 * loader put in the offsets of the kernel that runs, from its BTF.
 */
#ifndef KVASIR_KERNEL_H
#define KVASIR_KERNEL_H

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int s32;

#define SEC(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))
#define KERNEL_TYPE __attribute__((preserve_access_index))
#define UINT(name, value) int(*name)[value]
#define TYPE(name, type) typeof(type) *name
#define NULL ((void *)0)
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define FROM_NETWORK_16(x) __builtin_bswap16(x)
#define FROM_NETWORK_32(x) __builtin_bswap32(x)
#else
#define FROM_NETWORK_16(x) (x)
#define FROM_NETWORK_32(x) (x)
#endif
#define TO_NETWORK_32(x) FROM_NETWORK_32(x)

/* enum bpf_map_type and the map flags. */
#define MAP_HASH 1
#define MAP_ARRAY 2
#define MAP_PERCPU_ARRAY 6
#define MAP_LRU_HASH 9
#define MAP_LPM_TRIE 11
#define MAP_SOCKHASH 18
#define NO_PREALLOC 1

#define UPDATE_ANY 0
#define REDIRECT_TO_INGRESS 1

#define AF_INET_FAMILY 2
#define AF_INET6_FAMILY 10

/* enum bpf_func_id: the number of a helper is its address. */
static void *(*map_lookup)(void *map, const void *key) = (void *)1;
static long (*map_update)(void *map, const void *key, const void *value, u64 flags) = (void *)2;
static long (*map_delete)(void *map, const void *key) = (void *)3;
static u64 (*now_ns)(void) = (void *)5;
static u32 (*random_u32)(void) = (void *)7;
static u64 (*current_pid_tgid)(void) = (void *)14;
static long (*sock_ops_callbacks_set)(void *context, int flags) = (void *)59;
static long (*sock_hash_update)(void *context, void *map, void *key, u64 flags) = (void *)70;
static long (*message_redirect_hash)(void *context, void *map, void *key, u64 flags) = (void *)71;
static long (*probe_read_kernel)(void *to, u32 bytes, const void *from) = (void *)113;
static u64 (*netns_cookie)(void *context) = (void *)122;
static struct tcp_sock *(*to_tcp_sock)(void *socket) = (void *)137;

/* Adds to an element of a per-CPU array: no other CPU writes it, and no program here can interrupt
 * itself on one CPU, so that a plain addition is enough. */
#define COUNT(map, index, amount)                  \
	do {                                       \
		u32 count_index_ = (index);        \
		u64 *count_ = map_lookup(&map, &count_index_); \
		if (count_)                        \
			*count_ += (amount);       \
	} while (0)

#endif
