/* Every function of kvasir_kv.h, with right and with wrong arguments. Prints one line for each part; exits 1 at the first
 * surprise. The arguments are a path for a configuration file, and one for a folder with a disk tier. */
#include "kvasir_kv.h"

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            char text[256];                                                                                            \
            kvasir_kv_last_error(text, sizeof text);                                                                   \
            fprintf(stderr, "line %d: %s; last error: %s\n", __LINE__, #condition, text);                              \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* What the library's own assertions say of its side; fails to compile. */
#define ASSERT_LAYOUT(name, condition) typedef char layout_of_##name[(condition) ? 1 : -1]
#if UINTPTR_MAX == UINT64_MAX
ASSERT_LAYOUT(buffer, sizeof(kvasir_kv_buffer) == 16 && offsetof(kvasir_kv_buffer, bytes) == 8);
ASSERT_LAYOUT(request, sizeof(kvasir_kv_request) == 64 && offsetof(kvasir_kv_request, operation) == 8);
ASSERT_LAYOUT(request_reserved, offsetof(kvasir_kv_request, reserved) == 12);
ASSERT_LAYOUT(request_identities, offsetof(kvasir_kv_request, identities) == 16);
ASSERT_LAYOUT(request_identity_count, offsetof(kvasir_kv_request, identity_count) == 24);
ASSERT_LAYOUT(request_meta, offsetof(kvasir_kv_request, meta) == 32);
ASSERT_LAYOUT(request_payload, offsetof(kvasir_kv_request, payload) == 48);
ASSERT_LAYOUT(request_payload_count, offsetof(kvasir_kv_request, payload_count) == 56);
ASSERT_LAYOUT(completion, sizeof(kvasir_kv_completion) == 32 && offsetof(kvasir_kv_completion, status) == 8);
ASSERT_LAYOUT(completion_reserved, offsetof(kvasir_kv_completion, reserved) == 12);
ASSERT_LAYOUT(completion_meta_bytes, offsetof(kvasir_kv_completion, meta_bytes) == 16);
ASSERT_LAYOUT(completion_payload_bytes, offsetof(kvasir_kv_completion, payload_bytes) == 24);
ASSERT_LAYOUT(plane, sizeof(kvasir_kv_plane) == 24 && offsetof(kvasir_kv_plane, block_stride) == 8);
ASSERT_LAYOUT(plane_block_bytes, offsetof(kvasir_kv_plane, block_bytes) == 16);
ASSERT_LAYOUT(tensors, sizeof(kvasir_kv_tensors) == 32 && offsetof(kvasir_kv_tensors, device) == 4);
ASSERT_LAYOUT(tensors_blocks, offsetof(kvasir_kv_tensors, blocks) == 8);
ASSERT_LAYOUT(tensors_planes, offsetof(kvasir_kv_tensors, planes) == 16);
ASSERT_LAYOUT(tensors_plane_count, offsetof(kvasir_kv_tensors, plane_count) == 24);
ASSERT_LAYOUT(transfer, sizeof(kvasir_kv_transfer) == 88 && offsetof(kvasir_kv_transfer, operation) == 8);
ASSERT_LAYOUT(transfer_bytes, offsetof(kvasir_kv_transfer, bytes) == 12);
ASSERT_LAYOUT(transfer_tensors, offsetof(kvasir_kv_transfer, tensors) == 16);
ASSERT_LAYOUT(transfer_identities, offsetof(kvasir_kv_transfer, identities) == 24);
ASSERT_LAYOUT(transfer_blocks, offsetof(kvasir_kv_transfer, blocks) == 32);
ASSERT_LAYOUT(transfer_count, offsetof(kvasir_kv_transfer, count) == 40);
ASSERT_LAYOUT(transfer_event, offsetof(kvasir_kv_transfer, event) == 48);
ASSERT_LAYOUT(transfer_parent, offsetof(kvasir_kv_transfer, parent) == 56);
ASSERT_LAYOUT(transfer_position, offsetof(kvasir_kv_transfer, position) == 64);
ASSERT_LAYOUT(transfer_is_chain, offsetof(kvasir_kv_transfer, is_chain) == 68);
ASSERT_LAYOUT(transfer_deadline, offsetof(kvasir_kv_transfer, deadline_us) == 72);
ASSERT_LAYOUT(transfer_held, offsetof(kvasir_kv_transfer, held) == 76);
ASSERT_LAYOUT(prompt, sizeof(kvasir_kv_prompt) == 72 && offsetof(kvasir_kv_prompt, block_tokens) == 4);
ASSERT_LAYOUT(prompt_identities, offsetof(kvasir_kv_prompt, identities) == 8 && offsetof(kvasir_kv_prompt, count) == 16);
ASSERT_LAYOUT(prompt_held, offsetof(kvasir_kv_prompt, held) == 24 && offsetof(kvasir_kv_prompt, tokens) == 32);
ASSERT_LAYOUT(prompt_queued, offsetof(kvasir_kv_prompt, queued_tokens) == 40);
ASSERT_LAYOUT(prompt_may_fetch, offsetof(kvasir_kv_prompt, may_fetch) == 48);
ASSERT_LAYOUT(prompt_groups, offsetof(kvasir_kv_prompt, groups) == 56 && offsetof(kvasir_kv_prompt, group_count) == 64);
ASSERT_LAYOUT(group, sizeof(kvasir_kv_group) == 16 && offsetof(kvasir_kv_group, window_blocks) == 8);
ASSERT_LAYOUT(plan, sizeof(kvasir_kv_plan) == 16 && offsetof(kvasir_kv_plan, blocks) == 8);
ASSERT_LAYOUT(stage_statistics, sizeof(kvasir_kv_stage_statistics) == 216 && offsetof(kvasir_kv_stage_statistics, at_most) == 32);
ASSERT_LAYOUT(node_statistics, sizeof(kvasir_kv_node_statistics) == 216 && offsetof(kvasir_kv_node_statistics, failures) == 168);
ASSERT_LAYOUT(rail_statistics, sizeof(kvasir_kv_rail_statistics) == 104 && offsetof(kvasir_kv_rail_statistics, block_bytes) == 64);
ASSERT_LAYOUT(statistics, sizeof(kvasir_kv_statistics) == 248 && offsetof(kvasir_kv_statistics, hits) == 24);
ASSERT_LAYOUT(statistics_evicted, offsetof(kvasir_kv_statistics, evicted) == 56);
ASSERT_LAYOUT(statistics_disk_blocks, offsetof(kvasir_kv_statistics, disk_blocks) == 64);
ASSERT_LAYOUT(statistics_damaged, offsetof(kvasir_kv_statistics, damaged) == 104);
ASSERT_LAYOUT(event, sizeof(kvasir_kv_event) == 24 && offsetof(kvasir_kv_event, tier) == 20);
ASSERT_LAYOUT(statistics_far_written, offsetof(kvasir_kv_statistics, far_written) == 120);
ASSERT_LAYOUT(statistics_late, offsetof(kvasir_kv_statistics, late) == 152);
ASSERT_LAYOUT(statistics_prefetch_wasted, offsetof(kvasir_kv_statistics, prefetch_wasted) == 176);
ASSERT_LAYOUT(statistics_checksummed_bytes, offsetof(kvasir_kv_statistics, checksummed_bytes) == 184);
ASSERT_LAYOUT(statistics_disk_write_failures, offsetof(kvasir_kv_statistics, disk_write_failures) == 192);
ASSERT_LAYOUT(statistics_far_searches, offsetof(kvasir_kv_statistics, far_searches) == 200);
ASSERT_LAYOUT(statistics_far_not_asked, offsetof(kvasir_kv_statistics, far_not_asked) == 224);
ASSERT_LAYOUT(statistics_retention_refused, offsetof(kvasir_kv_statistics, retention_refused) == 240);
ASSERT_LAYOUT(handoff, sizeof(kvasir_kv_handoff) == 104 && offsetof(kvasir_kv_handoff, operation) == 8);
ASSERT_LAYOUT(handoff_first_block, offsetof(kvasir_kv_handoff, first_block) == 12);
ASSERT_LAYOUT(handoff_content, offsetof(kvasir_kv_handoff, content) == 16);
ASSERT_LAYOUT(handoff_tensors, offsetof(kvasir_kv_handoff, tensors) == 32);
ASSERT_LAYOUT(handoff_blocks, offsetof(kvasir_kv_handoff, blocks) == 40);
ASSERT_LAYOUT(handoff_count, offsetof(kvasir_kv_handoff, count) == 48);
ASSERT_LAYOUT(handoff_transfers, offsetof(kvasir_kv_handoff, transfers) == 56);
ASSERT_LAYOUT(handoff_transfer_count, offsetof(kvasir_kv_handoff, transfer_count) == 64);
ASSERT_LAYOUT(handoff_addresses, offsetof(kvasir_kv_handoff, addresses) == 72);
ASSERT_LAYOUT(handoff_layers, offsetof(kvasir_kv_handoff, first_layer) == 80 && offsetof(kvasir_kv_handoff, layers) == 84);
ASSERT_LAYOUT(handoff_deadline, offsetof(kvasir_kv_handoff, deadline_ms) == 88);
ASSERT_LAYOUT(handoff_own_bytes, offsetof(kvasir_kv_handoff, bytes) == 92);
ASSERT_LAYOUT(handoff_event, offsetof(kvasir_kv_handoff, event) == 96);
ASSERT_LAYOUT(handoff_statistics, sizeof(kvasir_kv_handoff_statistics) == 112);
ASSERT_LAYOUT(handoff_bytes_sent, offsetof(kvasir_kv_handoff_statistics, bytes_sent) == 48);
ASSERT_LAYOUT(handoff_slots_used, offsetof(kvasir_kv_handoff_statistics, slots_used) == 64);
ASSERT_LAYOUT(handoff_sent_directly, offsetof(kvasir_kv_handoff_statistics, sent_directly) == 72);
ASSERT_LAYOUT(handoff_received_staged, offsetof(kvasir_kv_handoff_statistics, received_staged) == 96);
ASSERT_LAYOUT(handoff_slots, offsetof(kvasir_kv_handoff_statistics, slots) == 104);
#endif

#define BLOCK (3 * 1000 * 1000)
#define MANY 200
/* Of a store that takes payloads of 3 MiB. */
#define SLOT ((3 << 20) + 4096)

static void identity(uint8_t out[16], unsigned number) {
    memset(out, 0, 16);
    memcpy(out, &number, sizeof number);
}

static unsigned char *block(unsigned seed, size_t bytes) {
    unsigned char *made = (unsigned char *)malloc(bytes);
    for (size_t at = 0; at < bytes; at++) made[at] = (unsigned char)(seed * 31 + at * 7 + (at >> 8));
    return made;
}

static void opening(const char *path) {
    char error[128] = "untouched";
    kvasir_kv *kv = (kvasir_kv *)error;
    CHECK(kvasir_kv_open("[store]\nmemory = 3\n", &kv, error, sizeof error) == KVASIR_KV_CONFIGURATION);
    CHECK(kv == NULL && strstr(error, "memory") != NULL);
    CHECK(kvasir_kv_open("[store]\nmemory_bytes = 4096\n", &kv, error, sizeof error) == KVASIR_KV_CONFIGURATION);
    CHECK(strstr(error, "host_tier.capacity") != NULL);
    CHECK(kvasir_kv_open("[disk_tier]\ncapacity = \"1 GiB\"\n", &kv, error, sizeof error) == KVASIR_KV_CONFIGURATION);
    CHECK(strstr(error, "disk_tier.path") != NULL);
    CHECK(kvasir_kv_open("[disk_tier]\ncapacity = \"1 GiB\"\npath = \"/proc/none\"\n", &kv, error, sizeof error) ==
          KVASIR_KV_FAILED);
    CHECK(kv == NULL && strstr(error, "disk_tier.path = \"/proc/none\"") != NULL);
    CHECK(kvasir_kv_open("[device]\nstaging = \"256 KiB\"\n", &kv, error, sizeof error) == KVASIR_KV_CONFIGURATION);
    CHECK(strstr(error, "device.staging") != NULL);
    /* No machine has so many: the driver refuses, or there is none. */
    CHECK(kvasir_kv_open("[device]\nordinal = 255\n", &kv, error, sizeof error) == KVASIR_KV_FAILED);
    CHECK(kv == NULL && strstr(error, "open: ") == error && strstr(error, "device") != NULL);
    memset(error, 'x', sizeof error);
    CHECK(kvasir_kv_open("[queue]\nthreads = 0\n", &kv, error, 8) == KVASIR_KV_CONFIGURATION);
    CHECK(strcmp(error, "queue.t") == 0 && error[8] == 'x');
    CHECK(kvasir_kv_open(NULL, &kv, NULL, 0) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_open("", NULL, NULL, 0) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_open_file("/nonexistent", &kv, error, sizeof error) == KVASIR_KV_CONFIGURATION);
    CHECK(kvasir_kv_open_file(path, &kv, error, sizeof error) == KVASIR_KV_CONFIGURATION);
    FILE *file = fopen(path, "w");
    CHECK(file != NULL && fputs("[queue]\ndepth = 3\n", file) >= 0 && fclose(file) == 0);
    CHECK(kvasir_kv_open_file(path, &kv, error, sizeof error) == KVASIR_KV_OK && kv != NULL && error[0] == 0);
    CHECK(kvasir_kv_close(kv) == KVASIR_KV_OK && remove(path) == 0);
    CHECK(kvasir_kv_close(kv) == KVASIR_KV_INVALID_HANDLE);
    CHECK(kvasir_kv_close(NULL) == KVASIR_KV_INVALID_HANDLE);
    CHECK(kvasir_kv_close((kvasir_kv *)&kv) == KVASIR_KV_INVALID_HANDLE);
    CHECK(kvasir_kv_version() >= 1000);
    CHECK(strcmp(kvasir_kv_strerror(KVASIR_KV_THROTTLED), "no room or bandwidth at the moment") == 0);
    CHECK(strcmp(kvasir_kv_strerror(12345), "unknown status") == 0);
    CHECK(kvasir_kv_last_error(NULL, 0) > 0);
    puts("ok: open and close");
}

static void blocking(kvasir_kv *kv) {
    uint8_t names[4][16];
    for (unsigned at = 0; at < 4; at++) identity(names[at], at);
    const uint8_t(*ids)[16] = (const uint8_t(*)[16])names;
    unsigned char *source = block(1, BLOCK), *target = (unsigned char *)malloc(BLOCK);
    char meta[] = "layout 7", got_meta[16] = "";
    kvasir_kv_buffer whole = {source, BLOCK}, about = {meta, sizeof meta};
    kvasir_kv_buffer parts[3] = {{target, 1}, {NULL, 0}, {target + 1, BLOCK - 1}};
    kvasir_kv_buffer got_about = {got_meta, sizeof got_meta};
    size_t matched = 99, meta_bytes = 99, payload_bytes = 99;

    CHECK(kvasir_kv_match(kv, ids, 4, &matched) == KVASIR_KV_OK && matched == 0);
    CHECK(kvasir_kv_get(kv, ids, NULL, parts, 3, &meta_bytes, &payload_bytes) == KVASIR_KV_MISS);
    CHECK(meta_bytes == 0 && payload_bytes == 0);
    for (unsigned at = 0; at < 4; at++)
        if (at != 2) CHECK(kvasir_kv_put(kv, &ids[at], &about, &whole, 1) == KVASIR_KV_OK);
    CHECK(kvasir_kv_put(kv, ids, &about, &whole, 1) == KVASIR_KV_PRESENT);
    CHECK(kvasir_kv_match(kv, ids, 4, &matched) == KVASIR_KV_OK && matched == 2);
    CHECK(kvasir_kv_match(kv, ids, 0, &matched) == KVASIR_KV_OK && matched == 0);
    CHECK(kvasir_kv_get(kv, &ids[3], &got_about, parts, 3, &meta_bytes, &payload_bytes) == KVASIR_KV_OK);
    CHECK(meta_bytes == sizeof meta && strcmp(got_meta, meta) == 0);
    CHECK(payload_bytes == BLOCK && memcmp(source, target, BLOCK) == 0);
    CHECK(kvasir_kv_get(kv, ids, NULL, parts, 3, &meta_bytes, &payload_bytes) == KVASIR_KV_BUFFER_TOO_SMALL);
    CHECK(meta_bytes == sizeof meta && payload_bytes == BLOCK);
    CHECK(kvasir_kv_get(kv, ids, &got_about, parts, 2, NULL, &payload_bytes) == KVASIR_KV_BUFFER_TOO_SMALL);
    CHECK(kvasir_kv_delete(kv, ids) == KVASIR_KV_OK && kvasir_kv_delete(kv, ids) == KVASIR_KV_MISS);
    puts("ok: match, put, get and delete");

    kvasir_kv_statistics statistics;
    CHECK(kvasir_kv_stats(kv, &statistics, sizeof statistics) == KVASIR_KV_OK);
    CHECK(statistics.blocks == 2 && statistics.stored == 3 && statistics.hits == 1 && statistics.misses == 1);
    CHECK(statistics.bytes == 2 * SLOT && statistics.disk_blocks == 0 && statistics.disk_bytes_max == 0);
    /* A header of an earlier version has fewer fields, one of a later version more. */
    struct {
        kvasir_kv_statistics known;
        uint64_t later;
    } longer_statistics = {statistics, 77};
    statistics.hits = 99;
    statistics.blocks = 99;
    CHECK(kvasir_kv_stats(kv, &statistics, offsetof(kvasir_kv_statistics, hits)) == KVASIR_KV_OK);
    CHECK(statistics.blocks == 2 && statistics.hits == 99);
    CHECK(kvasir_kv_stats(kv, &longer_statistics.known, sizeof longer_statistics) == KVASIR_KV_OK);
    CHECK(longer_statistics.known.hits == 1 && longer_statistics.later == 77);
    CHECK(kvasir_kv_stats(kv, NULL, sizeof statistics) == KVASIR_KV_INVALID_ARGUMENT);
    puts("ok: statistics");

    kvasir_kv_buffer null = {NULL, 1}, longer = {source, SIZE_MAX}, twice[2] = {{source, SIZE_MAX / 2}, {source, SIZE_MAX / 2}};
    CHECK(kvasir_kv_match(kv, NULL, 1, &matched) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_match(kv, ids, SIZE_MAX, &matched) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_match(kv, ids, 1, NULL) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_get(kv, NULL, NULL, parts, 3, NULL, NULL) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_get(kv, ids, NULL, NULL, 3, NULL, NULL) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_get(kv, ids, NULL, &null, 1, NULL, NULL) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_get(kv, ids, NULL, &longer, 1, NULL, NULL) == KVASIR_KV_INVALID_ARGUMENT);
    /* There are 3: only the count may be looked at. */
    CHECK(kvasir_kv_get(kv, ids, NULL, parts, 5000, NULL, NULL) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_put(kv, ids, NULL, twice, 2) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_put(kv, NULL, NULL, &whole, 1) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_delete(kv, NULL) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_get((kvasir_kv *)8, ids, NULL, parts, 3, NULL, NULL) == KVASIR_KV_INVALID_HANDLE);
    kvasir_kv_buffer larger = {source, BLOCK};
    kvasir_kv_buffer all[8] = {larger, larger, larger, larger, larger, larger, larger, larger};
    CHECK(kvasir_kv_put(kv, ids, NULL, all, 8) == KVASIR_KV_TOO_LARGE);
    kvasir_kv_buffer long_meta = {source, KVASIR_KV_META_BYTES_MAX + 1};
    CHECK(kvasir_kv_put(kv, ids, &long_meta, &whole, 1) == KVASIR_KV_TOO_LARGE);
    puts("ok: wrong arguments");
    free(source);
    free(target);
}

static void submitted(kvasir_kv *kv) {
    static uint8_t names[MANY][16];
    static unsigned char payload[MANY][4096], back[MANY][4096];
    static kvasir_kv_buffer buffers[MANY];
    kvasir_kv_request requests[MANY];
    kvasir_kv_completion completions[7];
    memset(requests, 0, sizeof requests);
    for (unsigned round = 0; round < 2; round++) {
        for (unsigned at = 0; at < MANY; at++) {
            identity(names[at], 1000 + at);
            memset(payload[at], (int)at, 4096);
            buffers[at].start = round == 0 ? payload[at] : back[at];
            buffers[at].bytes = 4096;
            requests[at].user = at;
            requests[at].operation = round == 0 ? KVASIR_KV_PUT : KVASIR_KV_GET;
            requests[at].identities = (const uint8_t(*)[16])names[at];
            requests[at].identity_count = 1;
            requests[at].payload = &buffers[at];
            requests[at].payload_count = 1;
        }
        size_t sent = 0, done = 0, throttled = 0;
        char seen[MANY] = {0};
        while (done < MANY) {
            size_t accepted = 99, count = 99;
            int32_t status = kvasir_kv_submit(kv, requests + sent, MANY - sent, &accepted);
            CHECK(status == KVASIR_KV_OK || (status == KVASIR_KV_THROTTLED && accepted < MANY - sent));
            throttled += status == KVASIR_KV_THROTTLED;
            sent += accepted;
            struct pollfd event = {kvasir_kv_event_fd(kv), POLLIN, 0};
            CHECK(event.fd >= 0 && poll(&event, 1, 20000) == 1);
            CHECK(kvasir_kv_poll(kv, completions, 7, 0, &count) == KVASIR_KV_OK && count > 0 && count <= 7);
            for (size_t at = 0; at < count; at++) {
                CHECK(completions[at].user < MANY && !seen[completions[at].user]);
                CHECK(completions[at].status == KVASIR_KV_OK);
                CHECK(completions[at].payload_bytes == (round == 0 ? 0u : 4096u));
                seen[completions[at].user] = 1;
            }
            done += count;
        }
        CHECK(throttled > 0);
    }
    CHECK(memcmp(payload, back, sizeof back) == 0);
    puts("ok: submit and poll, more than the queue takes");

    size_t accepted, count;
    struct pollfd event = {kvasir_kv_event_fd(kv), POLLIN, 0};
    CHECK(poll(&event, 1, 0) == 0);
    CHECK(kvasir_kv_poll(kv, completions, 7, 30, &count) == KVASIR_KV_OK && count == 0);
    kvasir_kv_request match = requests[0];
    match.operation = KVASIR_KV_MATCH;
    match.identities = (const uint8_t(*)[16])names;
    match.identity_count = MANY;
    CHECK(kvasir_kv_submit(kv, &match, 1, &accepted) == KVASIR_KV_OK && accepted == 1);
    CHECK(kvasir_kv_poll(kv, completions, 7, -1, &count) == KVASIR_KV_OK && count == 1);
    CHECK(completions[0].status == KVASIR_KV_OK && completions[0].payload_bytes == MANY);
    kvasir_kv_request small = requests[0];
    buffers[0].bytes = 4095;
    CHECK(kvasir_kv_submit(kv, &small, 1, &accepted) == KVASIR_KV_OK);
    CHECK(kvasir_kv_poll(kv, completions, 7, 20000, &count) == KVASIR_KV_OK && count == 1);
    CHECK(completions[0].status == KVASIR_KV_BUFFER_TOO_SMALL && completions[0].payload_bytes == 4096);
    char last[128];
    CHECK(kvasir_kv_last_error(last, sizeof last) < sizeof last && strstr(last, "4096 of payload") != NULL);
    kvasir_kv_request wrong[2] = {requests[1], requests[2]};
    wrong[1].operation = 77;
    CHECK(kvasir_kv_submit(kv, wrong, 2, &accepted) == KVASIR_KV_INVALID_ARGUMENT && accepted == 1);
    CHECK(kvasir_kv_poll(kv, completions, 7, 20000, &count) == KVASIR_KV_OK && count == 1);
    wrong[1].operation = KVASIR_KV_GET;
    wrong[1].reserved = 1;
    CHECK(kvasir_kv_submit(kv, wrong + 1, 1, &accepted) == KVASIR_KV_INVALID_ARGUMENT && accepted == 0);
    /* Without other nodes a fetch tells what is here; of the blocks that the caller has it does not ask. */
    kvasir_kv_transfer fetch;
    memset(&fetch, 0, sizeof fetch);
    fetch.bytes = sizeof fetch;
    fetch.operation = KVASIR_KV_FETCH;
    fetch.identities = (const uint8_t(*)[16])names;
    fetch.count = MANY;
    fetch.held = 2;
    CHECK(kvasir_kv_submit_transfer(kv, &fetch) == KVASIR_KV_OK);
    CHECK(kvasir_kv_poll(kv, completions, 7, 20000, &count) == KVASIR_KV_OK && count == 1);
    CHECK(completions[0].status == KVASIR_KV_OK && completions[0].payload_bytes == MANY);
    fetch.held = MANY + 1;
    CHECK(kvasir_kv_submit_transfer(kv, &fetch) == KVASIR_KV_INVALID_ARGUMENT);
    fetch.held = 0;
    fetch.position = 1;
    CHECK(kvasir_kv_submit_transfer(kv, &fetch) == KVASIR_KV_INVALID_ARGUMENT);
    fetch.position = 0;
    fetch.tensors = 1;
    CHECK(kvasir_kv_submit_transfer(kv, &fetch) == KVASIR_KV_INVALID_ARGUMENT);
    fetch.tensors = 0;
    fetch.operation = KVASIR_KV_LOAD;
    fetch.held = 1;
    CHECK(kvasir_kv_submit_transfer(kv, &fetch) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_last_error(last, sizeof last) < sizeof last && strstr(last, "held is not 0") != NULL);
    fetch.operation = KVASIR_KV_SAVE;
    fetch.held = 0;
    fetch.deadline_us = 1;
    CHECK(kvasir_kv_submit_transfer(kv, &fetch) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_last_error(last, sizeof last) < sizeof last && strstr(last, "deadline_us") != NULL);
    kvasir_kv_prompt prompt;
    memset(&prompt, 0, sizeof prompt);
    prompt.bytes = sizeof prompt;
    prompt.block_tokens = 16;
    prompt.identities = match.identities;
    prompt.count = MANY;
    prompt.held = 1;
    prompt.tokens = (MANY + 1) * 16 + 1;
    kvasir_kv_plan plan;
    CHECK(kvasir_kv_plan_prompt(kv, &prompt, &plan) == KVASIR_KV_OK && plan.operation == KVASIR_KV_LOAD);
    CHECK(plan.blocks > 0 && plan.blocks <= MANY && plan.deadline_us > 0);
    prompt.tokens = (MANY + 1) * 16 - 1;
    CHECK(kvasir_kv_plan_prompt(kv, &prompt, &plan) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_last_error(last, sizeof last) < sizeof last && strstr(last, "tokens is") != NULL);
    prompt.tokens = (MANY + 1) * 16 + 1;
    prompt.bytes = 8;
    CHECK(kvasir_kv_plan_prompt(kv, &prompt, &plan) == KVASIR_KV_INVALID_ARGUMENT);
    prompt.bytes = sizeof prompt;
    prompt.may_fetch = 3;
    CHECK(kvasir_kv_plan_prompt(kv, &prompt, &plan) == KVASIR_KV_INVALID_ARGUMENT);
    prompt.may_fetch = 1;
    prompt.others = 1;
    CHECK(kvasir_kv_plan_prompt(kv, &prompt, &plan) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_last_error(last, sizeof last) < sizeof last && strstr(last, "others") != NULL);
    prompt.may_fetch = 2;
    CHECK(kvasir_kv_plan_prompt(kv, &prompt, &plan) == KVASIR_KV_OK && plan.operation == KVASIR_KV_LOAD);
    prompt.may_fetch = prompt.others = 0;
    CHECK(kvasir_kv_plan_prompt(kv, &prompt, NULL) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_plan_prompt(kv, NULL, &plan) == KVASIR_KV_INVALID_ARGUMENT);
    /* Of a group the last block before the next one is needed: a load ends behind one that is stored. */
    uint8_t of_group[MANY][16];
    memset(of_group, 0xA5, sizeof of_group);
    const size_t last_stored = MANY - 2;
    memcpy(of_group[last_stored], match.identities[0], 16);
    kvasir_kv_group group = {(const uint8_t (*)[16])of_group, 1};
    prompt.groups = &group;
    prompt.group_count = 1;
    CHECK(kvasir_kv_plan_prompt(kv, &prompt, &plan) == KVASIR_KV_OK && plan.operation == KVASIR_KV_LOAD);
    CHECK(plan.blocks == last_stored + 1);
    group.window_blocks = 2;
    CHECK(kvasir_kv_plan_prompt(kv, &prompt, &plan) == KVASIR_KV_OK && plan.operation == 0);
    group.identities = NULL;
    CHECK(kvasir_kv_plan_prompt(kv, &prompt, &plan) == KVASIR_KV_INVALID_ARGUMENT);
    group.identities = (const uint8_t (*)[16])of_group;
    prompt.may_fetch = 1; /* no other tier is there to ask */
    CHECK(kvasir_kv_plan_prompt(kv, &prompt, &plan) == KVASIR_KV_OK && plan.operation == 0);
    prompt.may_fetch = 0;
    prompt.group_count = 65;
    CHECK(kvasir_kv_plan_prompt(kv, &prompt, &plan) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_last_error(last, sizeof last) < sizeof last && strstr(last, "group_count") != NULL);
    prompt.groups = NULL;
    prompt.group_count = 0;
    /* Callers of the version before groups. */
    prompt.bytes = offsetof(kvasir_kv_prompt, groups);
    CHECK(kvasir_kv_plan_prompt(kv, &prompt, &plan) == KVASIR_KV_OK && plan.operation == KVASIR_KV_LOAD);
    prompt.bytes = sizeof prompt;
    /* An engine that computes a million tokens in a microsecond needs nothing of what is stored. */
    for (int at = 0; at < 100; at++) {
        CHECK(kvasir_kv_observe_prefill(kv, 1000000, 0, 1) == KVASIR_KV_OK);
    }
    CHECK(kvasir_kv_observe_prefill(kv, UINT64_MAX, 0, 1) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_plan_prompt(kv, &prompt, &plan) == KVASIR_KV_OK && plan.operation == 0 && plan.blocks == 0);
    /* Conversations: no more than hints, which are checked. */
    CHECK(kvasir_kv_conversation(kv, KVASIR_KV_IDLE, prompt.identities, prompt.count) == KVASIR_KV_OK);
    CHECK(kvasir_kv_conversation(kv, KVASIR_KV_CONTINUED, prompt.identities, 1) == KVASIR_KV_OK);
    CHECK(kvasir_kv_conversation(kv, 2, prompt.identities, 1) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_conversation(kv, KVASIR_KV_IDLE, prompt.identities, 0) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_conversation(kv, KVASIR_KV_IDLE, NULL, 1) == KVASIR_KV_INVALID_ARGUMENT);
    /* Blocks that are to be kept. */
    CHECK(kvasir_kv_retain(kv, prompt.identities, prompt.count, 60) == KVASIR_KV_OK);
    CHECK(kvasir_kv_retain(kv, prompt.identities, prompt.count, 0) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_retain(kv, prompt.identities, 0, 60) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_retain(kv, NULL, 1, 60) == KVASIR_KV_INVALID_ARGUMENT);
    kvasir_kv_statistics kept;
    memset(&kept, 0, sizeof kept);
    struct timespec pause;
    memset(&pause, 0, sizeof pause);
    pause.tv_nsec = 10000000;
    for (int at = 0; at < 1000 && kept.retained == 0; at++) {
        nanosleep(&pause, NULL);
        CHECK(kvasir_kv_stats(kv, &kept, sizeof kept) == KVASIR_KV_OK);
    }
    CHECK(kept.retained > 0);
    kvasir_kv_event events[4];
    CHECK(kvasir_kv_take_events(kv, events, 4, &count) == KVASIR_KV_OK && count == 0);
    CHECK(kvasir_kv_take_events(kv, events, 0, &count) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_take_events(kv, NULL, 4, &count) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_submit(kv, NULL, 1, &accepted) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_submit(kv, wrong, 1, NULL) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_poll(kv, NULL, 7, 0, &count) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_poll(kv, completions, 0, 0, &count) == KVASIR_KV_INVALID_ARGUMENT);
    puts("ok: matches and mistakes, submitted");
}

#define PAGES 60
#define PIECE 700
#define STRIDE 900

/* Submits a transfer, waits for its completion, and returns how many blocks it moved. */
static size_t moved(kvasir_kv *kv, kvasir_kv_transfer *transfer, int32_t status) {
    kvasir_kv_completion done;
    size_t count = 0;
    transfer->user += 1;
    CHECK(kvasir_kv_submit_transfer(kv, transfer) == KVASIR_KV_OK);
    CHECK(kvasir_kv_poll(kv, &done, 1, 20000, &count) == KVASIR_KV_OK && count == 1);
    CHECK(done.user == transfer->user && done.status == status && done.meta_bytes == 0);
    return (size_t)done.payload_bytes;
}

static void refused(kvasir_kv *kv, const kvasir_kv_transfer *transfer, const char *field) {
    char text[256];
    CHECK(kvasir_kv_submit_transfer(kv, transfer) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_last_error(text, sizeof text) < sizeof text && strstr(text, field) != NULL);
}

/* Saves blocks of an engine's tensors and loads them to other blocks: three planes with gaps between their blocks. */
static void paged(kvasir_kv *kv) {
    static unsigned char memory[3][PAGES * STRIDE], before[3][PAGES * STRIDE], payload[3 * PIECE];
    static uint8_t names[PAGES][16];
    const uint8_t(*ids)[16] = (const uint8_t(*)[16])names;
    uint64_t pages[PAGES], id = 99, other = 99;
    kvasir_kv_plane planes[3];
    for (unsigned plane = 0; plane < 3; plane++) {
        planes[plane].start = memory[plane];
        planes[plane].block_stride = STRIDE;
        planes[plane].block_bytes = PIECE;
        for (size_t at = 0; at < sizeof memory[plane]; at++)
            memory[plane][at] = (unsigned char)(plane * 89 + at * 13 + (at >> 8));
    }
    memcpy(before, memory, sizeof memory);
    for (unsigned at = 0; at < PAGES; at++) {
        identity(names[at], 5000 + at);
        pages[at] = (at * 7) % PAGES;
    }
    kvasir_kv_tensors tensors = {KVASIR_KV_HOST, 0, PAGES, planes, 3};
    CHECK(kvasir_kv_register(kv, &tensors, &id) == KVASIR_KV_OK && id != 0 && id != 99);
    kvasir_kv_transfer transfer = {70, KVASIR_KV_SAVE, sizeof transfer, id, ids, pages, PAGES, NULL, NULL, 0, 1, 0, 0, 0, 0};
    CHECK(moved(kv, &transfer, KVASIR_KV_OK) == PAGES);
    CHECK(memcmp(memory, before, sizeof memory) == 0);
    /* A tenant's number, which is checked; callers of the version before tenants have none. */
    transfer.tenant = UINT32_MAX;
    CHECK(kvasir_kv_submit_transfer(kv, &transfer) == KVASIR_KV_INVALID_ARGUMENT);
    transfer.tenant = 7;
    CHECK(moved(kv, &transfer, KVASIR_KV_OK) == PAGES);
    transfer.bytes = offsetof(kvasir_kv_transfer, tenant);
    CHECK(moved(kv, &transfer, KVASIR_KV_OK) == PAGES);
    transfer.bytes = sizeof transfer;
    transfer.tenant = 0;
    CHECK(moved(kv, &transfer, KVASIR_KV_OK) == PAGES);
    kvasir_kv_buffer whole = {payload, sizeof payload};
    size_t payload_bytes = 0;
    CHECK(kvasir_kv_get(kv, &ids[3], NULL, &whole, 1, NULL, &payload_bytes) == KVASIR_KV_OK);
    CHECK(payload_bytes == sizeof payload);
    for (unsigned plane = 0; plane < 3; plane++)
        CHECK(memcmp(payload + plane * PIECE, before[plane] + 21 * STRIDE, PIECE) == 0);

    /* Each to the block that is its own from the other end, and only what belongs to blocks is written. */
    uint64_t elsewhere[PAGES];
    memset(memory, 0xEE, sizeof memory);
    for (unsigned at = 0; at < PAGES; at++) elsewhere[at] = PAGES - 1 - pages[at];
    transfer.operation = KVASIR_KV_LOAD;
    transfer.is_chain = 0;
    transfer.blocks = elsewhere;
    CHECK(moved(kv, &transfer, KVASIR_KV_OK) == PAGES);
    for (unsigned plane = 0; plane < 3; plane++)
        for (unsigned page = 0; page < PAGES; page++) {
            unsigned char *loaded = memory[plane] + page * STRIDE;
            CHECK(memcmp(loaded, before[plane] + (PAGES - 1 - page) * STRIDE, PIECE) == 0);
            for (unsigned at = PIECE; at < STRIDE; at++) CHECK(loaded[at] == 0xEE);
        }
    /* A miss in the middle, and blocks that are not what these tensors have: with a meta, or longer. */
    char meta[] = "m";
    kvasir_kv_buffer about = {meta, sizeof meta}, longer = {before, 3 * PIECE + 1};
    for (unsigned round = 0; round < 3; round++) {
        unsigned missing = 41 - round * 10;
        CHECK(kvasir_kv_delete(kv, &ids[missing]) == KVASIR_KV_OK);
        if (round > 0)
            CHECK(kvasir_kv_put(kv, &ids[missing], round == 1 ? &about : NULL, round == 1 ? &whole : &longer, 1) ==
                  KVASIR_KV_OK);
        CHECK(moved(kv, &transfer, KVASIR_KV_MISS) == missing);
    }
    transfer.count = 21;
    CHECK(moved(kv, &transfer, KVASIR_KV_OK) == 21);
    transfer.count = 0;
    CHECK(moved(kv, &transfer, KVASIR_KV_OK) == 0);
    puts("ok: blocks of paged tensors, saved and loaded");

    transfer.count = 2;
    kvasir_kv_transfer wrong = transfer;
    wrong.operation = KVASIR_KV_GET;
    refused(kv, &wrong, "operation 1");
    wrong = transfer, wrong.bytes = 55;
    refused(kv, &wrong, "bytes is 55");
    wrong = transfer, wrong.is_chain = 1;
    refused(kv, &wrong, "is_chain is 1, and the operation is no save");
    wrong = transfer, wrong.is_chain = 2;
    refused(kv, &wrong, "is_chain is 2");
    wrong = transfer, wrong.position = 1;
    refused(kv, &wrong, "parent or position");
    wrong = transfer, wrong.operation = KVASIR_KV_SAVE, wrong.is_chain = 1, wrong.position = 0x7FFFFFFE;
    refused(kv, &wrong, "position 2147483646");
    wrong = transfer, wrong.tensors = id + 1;
    refused(kv, &wrong, "tensors");
    wrong = transfer, wrong.identities = NULL;
    refused(kv, &wrong, "identities");
    wrong = transfer, wrong.blocks = NULL;
    refused(kv, &wrong, "blocks");
    wrong = transfer, wrong.count = (1 << 20) + 1;
    refused(kv, &wrong, "count");
    wrong = transfer, wrong.event = &wrong;
    refused(kv, &wrong, "event");
    elsewhere[1] = PAGES;
    refused(kv, &transfer, "blocks[1] is 60");
    CHECK(kvasir_kv_submit_transfer(kv, NULL) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_submit_transfer((kvasir_kv *)8, &transfer) == KVASIR_KV_INVALID_HANDLE);
    CHECK(kvasir_kv_register(kv, NULL, &other) == KVASIR_KV_INVALID_ARGUMENT);
    CHECK(kvasir_kv_register(kv, &tensors, NULL) == KVASIR_KV_INVALID_ARGUMENT);
    tensors.planes = NULL;
    CHECK(kvasir_kv_register(kv, &tensors, &other) == KVASIR_KV_INVALID_ARGUMENT && other == 0);
    tensors.planes = planes;
    tensors.memory = KVASIR_KV_CUDA;
    CHECK(kvasir_kv_register(kv, &tensors, &other) == KVASIR_KV_INVALID_ARGUMENT && other == 0);
    char text[256];
    CHECK(kvasir_kv_last_error(text, sizeof text) < sizeof text && strstr(text, "[device]") != NULL);
    tensors.memory = KVASIR_KV_HOST;
    planes[0].block_stride = planes[0].block_bytes = 4 << 20;
    tensors.blocks = 1;
    CHECK(kvasir_kv_register(kv, &tensors, &other) == KVASIR_KV_TOO_LARGE && other == 0);
    CHECK(kvasir_kv_unregister(kv, id + 1) == KVASIR_KV_INVALID_ARGUMENT);
    elsewhere[1] = 0;
    CHECK(kvasir_kv_submit_transfer(kv, &transfer) == KVASIR_KV_OK);
    CHECK(kvasir_kv_unregister(kv, id) == KVASIR_KV_OK);
    CHECK(kvasir_kv_unregister(kv, id) == KVASIR_KV_INVALID_ARGUMENT);
    refused(kv, &transfer, "tensors");
    kvasir_kv_completion done;
    size_t count = 0;
    // The tensors were given back before the completion is there.
    CHECK(kvasir_kv_poll(kv, &done, 1, 5000, &count) == KVASIR_KV_OK && count == 1 && done.payload_bytes == 2);
    puts("ok: paged tensors and transfers that are refused, and an end");
}

struct worker {
    kvasir_kv *kv;
    unsigned number;
};

static void *work(void *argument) {
    struct worker *worker = (struct worker *)argument;
    unsigned char *source = block(worker->number, 50000), *target = (unsigned char *)malloc(50000);
    for (unsigned at = 0; at < 100; at++) {
        uint8_t name[1][16];
        identity(name[0], worker->number * 100000 + at);
        kvasir_kv_buffer from = {source, 50000}, to = {target, 50000};
        CHECK(kvasir_kv_put(worker->kv, (const uint8_t(*)[16])name, NULL, &from, 1) == KVASIR_KV_OK);
        memset(target, 0, 50000);
        int32_t status = kvasir_kv_get(worker->kv, (const uint8_t(*)[16])name, NULL, &to, 1, NULL, NULL);
        /* The store is too small for all: what is evicted is a miss, what is there is right. */
        CHECK(status == KVASIR_KV_MISS || (status == KVASIR_KV_OK && memcmp(source, target, 50000) == 0));
    }
    free(source);
    free(target);
    return NULL;
}

static void *wait_for_completion(void *argument) {
    kvasir_kv_completion completion;
    size_t count = 99;
    int32_t status = kvasir_kv_poll((kvasir_kv *)argument, &completion, 1, -1, &count);
    CHECK((status == KVASIR_KV_OK && count == 0) || status == KVASIR_KV_INVALID_HANDLE);
    return NULL;
}

/* Puts blocks over a disk, closes, opens again and finds them, also those that are more than memory holds. */
static void restarted(const char *folder) {
    char configuration[4096], error[512];
    int length = snprintf(configuration, sizeof configuration,
                          "[store]\nslot = \"64 KiB\"\n[host_tier]\ncapacity = \"1 MiB\"\n[disk_tier]\n"
                          "capacity = \"16 MiB\"\nsegment = \"8 MiB\"\nengine = \"pread\"\npath = \"%s\"\n",
                          folder);
    CHECK(length > 0 && (size_t)length < sizeof configuration);
    kvasir_kv *kv = NULL, *second = NULL;
    CHECK(kvasir_kv_open(configuration, &kv, error, sizeof error) == KVASIR_KV_OK);
    CHECK(kvasir_kv_open(configuration, &second, error, sizeof error) == KVASIR_KV_FAILED && second == NULL);
    CHECK(strstr(error, folder) != NULL);
    unsigned char *target = (unsigned char *)malloc(64 << 10);
    uint8_t names[40][16];
    const uint8_t(*ids)[16] = (const uint8_t(*)[16])names;
    kvasir_kv_statistics statistics;
    for (unsigned at = 0; at < 40; at++) {
        identity(names[at], at);
        unsigned char *source = block(at, at * 1600);
        kvasir_kv_buffer about = {&at, sizeof at}, whole = {source, at * 1600};
        CHECK(kvasir_kv_put(kv, &ids[at], &about, &whole, 1) == KVASIR_KV_OK);
        memset(source, 0, at * 1600);
        free(source);
        time_t deadline = time(NULL) + 60;
        do {
            CHECK(time(NULL) < deadline);
            CHECK(kvasir_kv_stats(kv, &statistics, sizeof statistics) == KVASIR_KV_OK);
        } while (statistics.disk_written <= at && poll(NULL, 0, 1) == 0);
    }
    CHECK(statistics.disk_blocks == 40 && statistics.blocks < 40 && statistics.evicted > 0);
    CHECK(kvasir_kv_delete(kv, &ids[20]) == KVASIR_KV_OK);
    CHECK(kvasir_kv_close(kv) == KVASIR_KV_OK);
    CHECK(kvasir_kv_open(configuration, &kv, error, sizeof error) == KVASIR_KV_OK);
    size_t matched = 99, meta_bytes = 99, payload_bytes = 99;
    CHECK(kvasir_kv_match(kv, ids, 40, &matched) == KVASIR_KV_OK && matched == 20);
    for (unsigned at = 0; at < 40; at++) {
        unsigned about = 99;
        unsigned char *source = block(at, at * 1600);
        kvasir_kv_buffer meta = {&about, sizeof about}, whole = {target, 64 << 10};
        int32_t status = kvasir_kv_get(kv, &ids[at], &meta, &whole, 1, &meta_bytes, &payload_bytes);
        CHECK(status == (at == 20 ? KVASIR_KV_MISS : KVASIR_KV_OK));
        CHECK(payload_bytes == (at == 20 ? 0 : at * 1600) && meta_bytes == (at == 20 ? 0 : sizeof about));
        CHECK(at == 20 || (about == at && memcmp(source, target, at * 1600) == 0));
        free(source);
    }
    CHECK(kvasir_kv_stats(kv, &statistics, sizeof statistics) == KVASIR_KV_OK);
    CHECK(statistics.disk_blocks == 39 && statistics.disk_read == 39 && statistics.damaged == 0);
    CHECK(kvasir_kv_close(kv) == KVASIR_KV_OK);
    /* The files are of another slot: refused, unless they may be made anew. */
    char *digit = strstr(configuration, "64 KiB");
    CHECK(digit != NULL);
    *digit = '3';
    CHECK(kvasir_kv_open(configuration, &kv, error, sizeof error) == KVASIR_KV_FAILED && kv == NULL);
    CHECK(strstr(error, "reformat") != NULL);
    strcat(configuration, "reformat = true\n");
    CHECK(kvasir_kv_open(configuration, &kv, error, sizeof error) == KVASIR_KV_OK);
    CHECK(kvasir_kv_match(kv, ids, 40, &matched) == KVASIR_KV_OK && matched == 0);
    CHECK(kvasir_kv_close(kv) == KVASIR_KV_OK);
    free(target);
    puts("ok: a disk, and what it has kept");
}

int main(int count, char **arguments) {
    CHECK(count == 3);
    opening(arguments[1]);
    kvasir_kv *kv = NULL;
    char error[256];
    CHECK(kvasir_kv_open("[store]\nslot = \"3 MiB\"\n[host_tier]\ncapacity = \"900 MiB\"\n[queue]\nthreads = 3\n"
                         "depth = 32\n",
                         &kv, error, sizeof error) == KVASIR_KV_OK);
    blocking(kv);
    submitted(kv);
    paged(kv);
    struct worker workers[4];
    pthread_t threads[4], waiting;
    for (unsigned at = 0; at < 4; at++) {
        workers[at].kv = kv;
        workers[at].number = at + 1;
        CHECK(pthread_create(&threads[at], NULL, work, &workers[at]) == 0);
    }
    for (unsigned at = 0; at < 4; at++) CHECK(pthread_join(threads[at], NULL) == 0);
    kvasir_kv_statistics statistics;
    CHECK(kvasir_kv_stats(kv, &statistics, sizeof statistics) == KVASIR_KV_OK);
    CHECK(statistics.bytes <= 900 << 20 && statistics.evicted > 0);
    puts("ok: four threads in a store that is too small");
    CHECK(pthread_create(&waiting, NULL, wait_for_completion, kv) == 0);
    CHECK(kvasir_kv_close(kv) == KVASIR_KV_OK);
    CHECK(pthread_join(waiting, NULL) == 0);
    uint8_t name[1][16] = {{0}};
    CHECK(kvasir_kv_delete(kv, (const uint8_t(*)[16])name) == KVASIR_KV_INVALID_HANDLE);
    puts("ok: closed, and closed for good");
    restarted(arguments[2]);
    return 0;
}
