/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 *
 * The bucket of a duration. src/histogram.rs computes the same, and is tested against this.
 */
#ifndef KVASIR_HISTOGRAM_H
#define KVASIR_HISTOGRAM_H

#include "shared.h"

/* The position of the highest set bit, in six steps: this instruction set has no such operation. */
INLINE u32 highest_bit(u64 value)
{
	u32 bit = 0;

	if (value >> 32) {
		bit += 32;
		value >>= 32;
	}
	if (value >> 16) {
		bit += 16;
		value >>= 16;
	}
	if (value >> 8) {
		bit += 8;
		value >>= 8;
	}
	if (value >> 4) {
		bit += 4;
		value >>= 4;
	}
	if (value >> 2) {
		bit += 2;
		value >>= 2;
	}
	return bit + (u32)(value >> 1);
}

INLINE u32 bucket_of(u64 ns)
{
	u32 bit, index;

	if (ns < 4)
		return (u32)ns;
	bit = highest_bit(ns);
	index = bit * 4 + (u32)((ns >> (bit - 2)) & 3);
	return index < BUCKETS ? index : BUCKETS - 1;
}

#endif
