// The emulator's C interface, for tests and for a stand-in of the CUDA driver.
#pragma once

#include <cstddef>

enum { KVASIR_OK = 0, KVASIR_UNKNOWN_FUNCTION = 1, KVASIR_BAD_LAUNCH = 2, KVASIR_DEADLOCK = 3 };

typedef void *(*kvasir_translate_function)(unsigned long long device_address);

extern "C" {
// Runs a launch to its end. `parameters` as cuLaunchKernel takes them. One launch at a time; any thread may
// call.
int kvasir_emulate(const char *function, const unsigned grid[3], const unsigned block[3], unsigned shared_bytes,
                   void **parameters);
// How many parameters a kernel has, and the bytes of at most `max` of them; -1: no such kernel.
int kvasir_parameter_sizes(const char *function, size_t *sizes, int max);
// How device addresses become addresses of this process. Otherwise the weak symbol `kvasir_translate` of the
// process is asked, and where there is none, addresses stand for themselves.
void kvasir_set_translate(kvasir_translate_function function);
// The seed of the order in which thread blocks and threads run.
void kvasir_set_order(unsigned long long seed);
}
