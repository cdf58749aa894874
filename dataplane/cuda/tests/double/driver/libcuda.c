/*
 * A double of the CUDA driver, for machines without one: the functions that this crate calls, with their
 * documented checks and error codes, over host memory.
 *
 * Device memory is a memfd that is mapped twice. The address that is handed out is a mapping nobody may touch, so
 * that a processor that reads device memory by mistake faults, as it would on hardware; the double copies through
 * the second mapping. A stream is a thread that runs its operations in order. The copies of one batch run in a
 * shuffled order, since the driver promises none. The address of freed memory is never used again, so that a stale
 * pointer is always an error.
 *
 * Variables named kvasir_double_* are settings, faults and counts; see the list. Kernels: an image that begins
 * with "emulator:PATH\n", as machine code behind ELF's first four bytes, is a shared object with kvasir_emulate and
 * kvasir_parameter_sizes; it may call kvasir_translate. Compile with -DKVASIR_DOUBLE_OLD for a driver without what
 * came after 11.4.
 *
 * The files of this folder are one text, in the order that mod.rs gives them: this one, abi.h (what is cuda.h's),
 * faults.c, objects.c, then the driver's functions by theme.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
