/* Copies. */

static result_t copies(struct context *context, struct stream *stream, enum kind kind, struct piece *pieces,
                       size_t count) {
    struct operation operation = {.kind = kind, .count = count, .pieces = malloc(count * sizeof *pieces)};
    memcpy(operation.pieces, pieces, count * sizeof *pieces);
    return enqueue(context, stream, operation);
}

result_t cuMemcpyAsync(address_t to, address_t from, size_t bytes, struct stream *stream) {
    ENTER_HEALTHY();
    kvasir_double_copy_calls++;
    if (!bytes) return SUCCESS;
    pthread_mutex_lock(&lock);
    struct piece piece = {resolve(to, bytes), resolve(from, bytes), bytes, 1, bytes, bytes};
    if (!piece.to || !piece.from || counted_down(&kvasir_double_refuse_copy)) return finish(INVALID_VALUE);
    return finish(copies(context, stream, COPY, &piece, 1));
}

/* Done at once, behind what the stream has. */
result_t cuMemsetD8Async(address_t to, unsigned char value, size_t bytes, struct stream *stream) {
    ENTER_HEALTHY();
    pthread_mutex_lock(&lock);
    struct allocation *at = containing(to);
    unsigned char *target = at ? resolve(to, bytes) : NULL;
    if (!target || !is_stream(stream)) return finish(INVALID_VALUE);
    drain(stream);
    memset(target, value, bytes);
    return finish(SUCCESS);
}

result_t cuMemcpy2DAsync_v2(const struct rows *rows, struct stream *stream) {
    ENTER_HEALTHY();
    kvasir_double_row_calls++;
    if (rows->from_type != MEMORY_UNIFIED || rows->to_type != MEMORY_UNIFIED) return NOT_SUPPORTED;
    if (rows->from_pitch < rows->width || rows->to_pitch < rows->width) return INVALID_VALUE;
    if (rows->from_pitch > 0x7FFFFFFF || rows->to_pitch > 0x7FFFFFFF) return INVALID_VALUE;
    if (!rows->width || !rows->height) return SUCCESS;
    size_t from_bytes = (rows->height - 1) * rows->from_pitch + rows->width;
    size_t to_bytes = (rows->height - 1) * rows->to_pitch + rows->width;
    pthread_mutex_lock(&lock);
    struct piece piece = {resolve(rows->to_device, to_bytes), resolve(rows->from_device, from_bytes), rows->width,
                          rows->height, rows->to_pitch, rows->from_pitch};
    if (!piece.to || !piece.from || counted_down(&kvasir_double_refuse_copy)) return finish(INVALID_VALUE);
    return finish(copies(context, stream, COPY, &piece, 1));
}

#ifndef KVASIR_DOUBLE_OLD
result_t cuMemcpyBatchAsync(address_t *to, address_t *from, size_t *bytes, size_t count, struct attributes *attributes,
                            size_t *indices, size_t attribute_count, size_t *failed, struct stream *stream) {
    ENTER_HEALTHY();
    kvasir_double_batch_calls++;
    *failed = SIZE_MAX;
    if (kvasir_double_refuse_batch) return (result_t)kvasir_double_refuse_batch;
    if (!count || !stream || attribute_count != 1 || indices[0]) return INVALID_VALUE;
    if (attributes->order != ORDER_STREAM) return INVALID_VALUE;
    struct piece *pieces = malloc(count * sizeof *pieces);
    pthread_mutex_lock(&lock);
    for (size_t at = 0; at < count; at++) {
        pieces[at] = (struct piece){resolve(to[at], bytes[at]), resolve(from[at], bytes[at]), bytes[at], 1, 0, 0};
        if (pieces[at].to && pieces[at].from && bytes[at] && !counted_down(&kvasir_double_refuse_copy)) continue;
        *failed = at;
        free(pieces);
        return finish(INVALID_VALUE);
    }
    result_t result = copies(context, stream, BATCH, pieces, count);
    free(pieces);
    return finish(result);
}

/* The forms of 12.8; of CUDA 13's the double knows none. As with NVIDIA's library, a name that is not known is a
 * success without an address, and needs no initialised driver. */
result_t cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    if (!symbol || !function || flags) return INVALID_VALUE;
    *function = !strcmp(symbol, "cuMemcpyBatchAsync") && version == 12080 ? (void *)cuMemcpyBatchAsync : NULL;
    if (status) *status = *function ? 0 : 1;
    if (*function) kvasir_double_resolved_by_version++;
    return SUCCESS;
}
#endif
