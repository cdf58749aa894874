// Runs a launch of the kernels on the processor. Interface: emulator_api.h. Compile with
//   c++ -std=c++17 -O2 -fno-strict-aliasing -shared -fPIC emulator.cpp -o libkvasir_emulator.so

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "emulator.h"
#include "emulator_api.h"

#if defined(__SANITIZE_ADDRESS__)
#define KVASIR_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVASIR_ASAN 1
#endif
#endif
#ifdef KVASIR_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

dim3 threadIdx, blockIdx, blockDim, gridDim;

#include "../../kernels/base.cu"
#include "../../kernels/checksum.cu"
#include "../../kernels/copy.cu"

extern "C" __attribute__((weak)) void *kvasir_translate(unsigned long long address);

namespace {

constexpr size_t STACK_BYTES = 256 << 10;
constexpr unsigned THREADS_MAX = 1024;

struct Kernel {
    const char *name;
    size_t bytes;
    void (*run)(const void *parameters);
};

#define ENTRY(name, Parameters)                                                                                        \
    {#name, sizeof(Parameters), [](const void *parameters) { name(*static_cast<const Parameters *>(parameters)); }},
#define CHECKSUM_ENTRY(name, ...) ENTRY(name, ChecksumParameters)
#define COPY_ENTRY(name, ...) ENTRY(name, CopyParameters)
const Kernel KERNELS[] = {KVASIR_CHECKSUM_KERNELS(CHECKSUM_ENTRY) KVASIR_COPY_KERNELS(COPY_ENTRY)};

enum class State { READY, BARRIER, SHUFFLE, DONE };

struct Fiber {
    ucontext_t context;
    char *stack = nullptr;
    void *shadow = nullptr;
    State state = State::DONE;
    unsigned generation = 0;
};

struct Warp {
    unsigned long long value[2][32];
    unsigned arrived = 0;
};

// One launch at a time.
std::mutex lock;
kvasir_translate_function translator = nullptr;
uint64_t order = 1;
Fiber fibers[THREADS_MAX];
Warp warps[THREADS_MAX / 32];
ucontext_t scheduler;
void *scheduler_shadow = nullptr;
const void *scheduler_stack = nullptr;
size_t scheduler_stack_bytes = 0;
unsigned current = 0, waiting = 0;
const Kernel *kernel = nullptr;
const void *arguments = nullptr;
std::vector<unsigned> ready;

unsigned random_below(unsigned bound) {
    order = order * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<unsigned>((order >> 33) % bound);
}

void enter(void **save, const void *bottom, size_t bytes) {
#ifdef KVASIR_ASAN
    __sanitizer_start_switch_fiber(save, bottom, bytes);
#else
    (void)save, (void)bottom, (void)bytes;
#endif
}

void entered(void *saved, const void **bottom, size_t *bytes) {
#ifdef KVASIR_ASAN
    __sanitizer_finish_switch_fiber(saved, bottom, bytes);
#else
    (void)saved, (void)bottom, (void)bytes;
#endif
}

void make_ready(unsigned thread) {
    fibers[thread].state = State::READY;
    ready.push_back(thread);
}

// From a fiber back to the scheduler, until it is chosen again.
void suspend() {
    Fiber &fiber = fibers[current];
    enter(fiber.state == State::DONE ? nullptr : &fiber.shadow, scheduler_stack, scheduler_stack_bytes);
    swapcontext(&fiber.context, &scheduler);
    entered(fiber.shadow, &scheduler_stack, &scheduler_stack_bytes);
}

void fiber_main() {
    entered(nullptr, &scheduler_stack, &scheduler_stack_bytes);
    kernel->run(arguments);
    fibers[current].state = State::DONE;
    suspend();
}

void start(unsigned thread) {
    Fiber &fiber = fibers[thread];
    if (!fiber.stack) {
        void *stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stack == MAP_FAILED) abort();
        fiber.stack = static_cast<char *>(stack);
    }
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
    fiber.generation = 0;
    fiber.shadow = nullptr;
    make_ready(thread);
}

void resume(unsigned thread) {
    current = thread;
    threadIdx = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y};
    enter(&scheduler_shadow, fibers[thread].stack, STACK_BYTES);
    swapcontext(&scheduler, &fibers[thread].context);
    entered(scheduler_shadow, nullptr, nullptr);
}

// The place among the ready ones of the thread that runs next: any, but one warp (or none) only when no other is
// ready, so that the others run as far ahead of it as barriers let them.
unsigned choose(unsigned slow_warp) {
    const unsigned count = static_cast<unsigned>(ready.size());
    const unsigned first = random_below(count);
    for (unsigned step = 0; step < count; ++step) {
        const unsigned at = (first + step) % count;
        if (ready[at] / 32 != slow_warp) return at;
    }
    return first;
}

// Whether all threads came to an end.
bool run_block(unsigned threads) {
    ready.clear();
    waiting = 0;
    for (unsigned warp = 0; warp < (threads + 31) / 32; ++warp) warps[warp].arrived = 0;
    for (unsigned thread = 0; thread < threads; ++thread) start(thread);
    unsigned done = 0;
    const unsigned slow_warp = random_below(2) ? random_below(threads / 32) * random_below(2) : THREADS_MAX;
    while (!ready.empty()) {
        const unsigned at = choose(slow_warp);
        const unsigned thread = ready[at];
        ready[at] = ready.back();
        ready.pop_back();
        resume(thread);
        if (fibers[thread].state == State::DONE) ++done;
        // As on the device, threads that ended are not waited for.
        if (waiting && waiting + done == threads) {
            for (unsigned other = 0; other < threads; ++other) {
                if (fibers[other].state != State::BARRIER) continue;
                make_ready(other);
            }
            waiting = 0;
        }
    }
    return done == threads;
}

const Kernel *find(const char *function) {
    for (const Kernel &candidate : KERNELS)
        if (std::strcmp(candidate.name, function) == 0) return &candidate;
    return nullptr;
}

}

namespace emulator {

void *translate(unsigned long long address) {
    if (translator) return translator(address);
    if (kvasir_translate) return kvasir_translate(address);
    return reinterpret_cast<void *>(address);
}

void barrier() {
    ++waiting;
    fibers[current].state = State::BARRIER;
    suspend();
}

unsigned lane() { return current % 32; }

unsigned long long exchange(unsigned mask, unsigned long long value, unsigned from) {
    Warp &warp = warps[current / 32];
    Fiber &fiber = fibers[current];
    unsigned long long *values = warp.value[fiber.generation++ & 1];
    values[lane()] = value;
    fiber.state = State::SHUFFLE;
    if (++warp.arrived == static_cast<unsigned>(__builtin_popcount(mask))) {
        warp.arrived = 0;
        const unsigned first = current / 32 * 32;
        for (unsigned other = first; other < first + 32; ++other)
            if (fibers[other].state == State::SHUFFLE) make_ready(other);
    }
    suspend();
    return values[from];
}

void yield() {
    if (random_below(4)) return;
    make_ready(current);
    suspend();
}

}

extern "C" void kvasir_set_translate(kvasir_translate_function function) {
    const std::lock_guard<std::mutex> guard(lock);
    translator = function;
}

extern "C" void kvasir_set_order(unsigned long long seed) {
    const std::lock_guard<std::mutex> guard(lock);
    order = seed;
}

extern "C" int kvasir_parameter_sizes(const char *function, size_t *sizes, int max) {
    const Kernel *found = find(function);
    if (!found) return -1;
    if (max >= 1) sizes[0] = found->bytes;
    return 1;
}

extern "C" int kvasir_emulate(const char *function, const unsigned grid[3], const unsigned block[3], unsigned,
                              void **parameters) {
    const std::lock_guard<std::mutex> guard(lock);
    kernel = find(function);
    if (!kernel) return KVASIR_UNKNOWN_FUNCTION;
    const uint64_t blocks = uint64_t(grid[0]) * grid[1] * grid[2];
    const uint64_t threads = uint64_t(block[0]) * block[1] * block[2];
    // A warp that is not full could not shuffle with a full mask; the kernels have none.
    if (blocks == 0 || blocks > 1U << 24 || threads == 0 || threads > THREADS_MAX || threads % 32)
        return KVASIR_BAD_LAUNCH;
    arguments = parameters[0];
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    std::vector<unsigned> numbers(blocks);
    for (unsigned number = 0; number < blocks; ++number) numbers[number] = number;
    for (unsigned left = static_cast<unsigned>(blocks); left > 1; --left)
        std::swap(numbers[left - 1], numbers[random_below(left)]);
    for (const unsigned number : numbers) {
        blockIdx = {number % grid[0], number / grid[0] % grid[1], number / grid[0] / grid[1]};
        if (!run_block(static_cast<unsigned>(threads))) return KVASIR_DEADLOCK;
    }
    return KVASIR_OK;
}
