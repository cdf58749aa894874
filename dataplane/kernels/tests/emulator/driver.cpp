// Emulates launches that it reads from standard input, with memory of exactly the stated sizes, so that the
// address sanitizer sees each access outside. Numbers are 64-bit, least significant byte first.
//
// Request: order, length and bytes of the function's name, grid (3), block (3), length and bytes of the
// parameters, count of regions, for each its device address, length and bytes. Answer: result, microseconds,
// the bytes of each region.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "emulator_api.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(from, bytes) ((void)(from), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(from, bytes) ((void)(from), (void)(bytes))
#endif

namespace {

constexpr uint64_t ALIGNMENT = 256;

struct Region {
    uint64_t address, bytes;
    char *memory, *start;
};
std::vector<Region> regions;

void *translate(unsigned long long address) {
    for (const Region &region : regions)
        if (address >= region.address && address <= region.address + region.bytes)
            return region.start + (address - region.address);
    std::fprintf(stderr, "device address %#llx is in no region\n", address);
    std::abort();
}

bool read_bytes(void *to, size_t bytes) { return std::fread(to, 1, bytes, stdin) == bytes; }

uint64_t read_number() {
    uint64_t number = 0;
    if (!read_bytes(&number, sizeof number)) std::exit(2);
    return number;
}

void write_number(uint64_t number) { std::fwrite(&number, sizeof number, 1, stdout); }

// Memory whose address has the remainder that the device address has, so that alignment is as on the device.
Region read_region() {
    Region region = {};
    region.address = read_number();
    region.bytes = read_number();
    const uint64_t before = region.address % ALIGNMENT;
    void *memory = nullptr;
    if (posix_memalign(&memory, ALIGNMENT, before + region.bytes)) std::exit(3);
    region.memory = static_cast<char *>(memory);
    region.start = region.memory + before;
    if (!read_bytes(region.start, region.bytes)) std::exit(2);
    ASAN_POISON_MEMORY_REGION(region.memory, before & ~7ULL);
    return region;
}

}

int main() {
    kvasir_set_translate(translate);
    for (;;) {
        uint64_t order = 0;
        if (!read_bytes(&order, sizeof order)) return 0;
        kvasir_set_order(order);
        std::string name(read_number(), '\0');
        if (!read_bytes(name.data(), name.size())) return 2;
        unsigned dimensions[6];
        for (unsigned &dimension : dimensions) dimension = static_cast<unsigned>(read_number());
        std::vector<uint64_t> parameters((read_number() + 7) / 8);
        size_t bytes = 0;
        if (kvasir_parameter_sizes(name.c_str(), &bytes, 1) != 1 || (bytes + 7) / 8 != parameters.size()) {
            std::fprintf(stderr, "%s has %zu bytes of parameters here\n", name.c_str(), bytes);
            return 4;
        }
        if (!read_bytes(parameters.data(), bytes)) return 2;
        for (uint64_t count = read_number(); count; --count) regions.push_back(read_region());
        void *pointers[] = {parameters.data()};
        const auto start = std::chrono::steady_clock::now();
        const int result = kvasir_emulate(name.c_str(), dimensions, dimensions + 3, 0, pointers);
        const auto took = std::chrono::steady_clock::now() - start;
        write_number(static_cast<uint64_t>(result));
        write_number(static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(took).count()));
        for (const Region &region : regions) {
            std::fwrite(region.start, 1, region.bytes, stdout);
            ASAN_UNPOISON_MEMORY_REGION(region.memory, region.address % ALIGNMENT);
            std::free(region.memory);
        }
        regions.clear();
        std::fflush(stdout);
    }
}
