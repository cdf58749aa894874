/* Settings, faults and counts: tests set and read them by name. */

/* Settings and faults. */
int64_t kvasir_double_devices = 2;
int64_t kvasir_double_version = 12080;
int64_t kvasir_double_initialise = 0;       /* what cuInit returns */
int64_t kvasir_double_delay_us = 0;         /* before each operation of a stream */
int64_t kvasir_double_memory = 1 << 30;     /* bytes of each device */
int64_t kvasir_double_no_dmabuf = 0;        /* 1: the device cannot export */
int64_t kvasir_double_no_pcie_flag = 0;     /* 1: the mapping cannot be chosen */
int64_t kvasir_double_no_ipc = 0;
int64_t kvasir_double_fault_copy = 0;       /* n: the n-th copy from now breaks the context */
int64_t kvasir_double_fault_launch = 0;     /* n: the n-th launch from now breaks the context */
int64_t kvasir_double_damage_copies = 0;    /* n, -n: the next n copies of 2 KiB or more arrive with a bit of their middle, or first byte, flipped */
int64_t kvasir_double_refuse_copy = 0;      /* n: the n-th call of a copy from now is an invalid value */
int64_t kvasir_double_refuse_batch = 0;     /* what cuMemcpyBatchAsync returns */
int64_t kvasir_double_refuse_register = 0;  /* what cuMemHostRegister returns */
int64_t kvasir_double_refuse_record = 0;    /* n: the n-th cuEventRecord from now fails */
int64_t kvasir_double_refuse_synchronise = 0; /* what cuStreamSynchronize returns, at once */
int64_t kvasir_double_refuse_unregister = 0; /* what cuMemHostUnregister returns */
int64_t kvasir_double_capturing = 0;        /* 1: another thread records a graph and forbids unsafe calls to all */
int64_t kvasir_double_no_capture_mode = 0;  /* 1: a thread's mode cannot be exchanged */
int64_t kvasir_double_wrong_pop = 0;        /* n: the n-th cuCtxPopCurrent from now names no context */
int64_t kvasir_double_refuse_machine_code = 0; /* what cuModuleLoadDataEx returns for it */
int64_t kvasir_double_range_bytes = 0;      /* n: an allocation says that it has so many bytes: the rest is another */
int64_t kvasir_double_flush_options = 1;    /* 1: the host can flush what NICs have written */
int64_t kvasir_double_writes_ordering = 0;  /* 0: none, 100: for the owner, 200: for all devices */
/* What is alive. */
_Atomic int64_t kvasir_double_allocations, kvasir_double_events, kvasir_double_streams, kvasir_double_registrations;
_Atomic int64_t kvasir_double_modules, kvasir_double_contexts, kvasir_double_imports;
/* What was called, or done. */
_Atomic int64_t kvasir_double_copies, kvasir_double_copy_calls, kvasir_double_batch_calls, kvasir_double_row_calls;
_Atomic int64_t kvasir_double_pageable, kvasir_double_launches;
_Atomic int64_t kvasir_double_captures_spoilt, kvasir_double_direct_flushes, kvasir_double_resolved_by_version;
_Atomic int64_t kvasir_double_exported_bytes; /* of the last export */

static int counted_down(int64_t *fault) { return *fault > 0 && --*fault == 0; }
