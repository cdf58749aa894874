/* Streams: a thread each, which runs operations in order. */

static void pass(struct event *event) {
    if (event->destroyed && !event->pending) free(event);
}

static void shuffled_copies(struct operation *operation) {
    for (size_t at = operation->count; at > 1; at--) {
        shuffle = shuffle * 1664525u + 1013904223u;
        size_t other = (shuffle >> 8) % at;
        struct piece swap = operation->pieces[at - 1];
        operation->pieces[at - 1] = operation->pieces[other];
        operation->pieces[other] = swap;
    }
}

/* With the lock held, which it gives up while it works. */
static void perform(struct stream *stream, struct operation *operation) {
    struct context *context = stream->context;
    int fault = 0;
    if (operation->kind == BATCH) shuffled_copies(operation);
    if (operation->kind == WAIT)
        while (operation->event->passed < operation->ticket && !context->sticky) pthread_cond_wait(&changed, &lock);
    for (size_t at = 0; at < operation->count && !context->sticky; at++) {
        if (counted_down(&kvasir_double_fault_copy)) {
            context->sticky = ILLEGAL_ADDRESS;
            pthread_cond_broadcast(&changed);
            break;
        }
        kvasir_double_copies++;
        struct piece piece = operation->pieces[at];
        pthread_mutex_unlock(&lock);
        for (size_t row = 0; row < piece.rows; row++)
            memmove(piece.to + row * piece.to_pitch, piece.from + row * piece.from_pitch, piece.bytes);
        pthread_mutex_lock(&lock);
        if (kvasir_double_damage_copies && piece.rows == 1 && piece.bytes >= 2048) {
            piece.to[kvasir_double_damage_copies > 0 ? piece.bytes / 2 : 0] ^= 1;
            kvasir_double_damage_copies += kvasir_double_damage_copies > 0 ? -1 : 1;
        }
    }
    if (operation->kind == LAUNCH && !context->sticky && counted_down(&kvasir_double_fault_launch)) {
        context->sticky = LAUNCH_FAILED;
        pthread_cond_broadcast(&changed);
    }
    if (operation->kind == LAUNCH && !context->sticky) {
        void *parameters[64];
        for (size_t at = 0; at < operation->parameter_count; at++)
            parameters[at] = operation->parameters + operation->parameter_offsets[at];
        pthread_mutex_unlock(&lock);
        fault = operation->function->emulate(operation->function->name, operation->grid, operation->block,
                                             operation->shared, parameters);
        pthread_mutex_lock(&lock);
        kvasir_double_launches++;
    }
    if (fault) context->sticky = LAUNCH_FAILED;
    if (operation->event) {
        if (operation->kind == RECORD) operation->event->passed = operation->ticket;
        operation->event->pending--;
        pass(operation->event);
    }
}

static void *run(void *argument) {
    struct stream *stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->first && !stream->closing) pthread_cond_wait(&changed, &lock);
        if (!stream->first) break;
        struct operation *operation = stream->first;
        stream->first = operation->next;
        if (!stream->first) stream->last = &stream->first;
        stream->busy = 1;
        if (kvasir_double_delay_us && operation->kind != RECORD && !stream->context->sticky) {
            pthread_mutex_unlock(&lock);
            usleep((useconds_t)kvasir_double_delay_us);
            pthread_mutex_lock(&lock);
        }
        perform(stream, operation);
        free(operation->pieces);
        free(operation->parameters);
        free(operation);
        stream->busy = 0;
        pthread_cond_broadcast(&changed);
    }
    struct stream **link = &streams;
    while (*link != stream) link = &(*link)->next;
    *link = stream->next;
    free(stream);
    pthread_mutex_unlock(&lock);
    return NULL;
}

result_t cuStreamCreateWithPriority(struct stream **stream, unsigned flags, int priority) {
    ENTER_HEALTHY();
    if (flags > 1) return INVALID_VALUE;
    struct stream *new = calloc(1, sizeof *new);
    new->context = context;
    new->priority = priority;
    new->last = &new->first;
    pthread_mutex_lock(&lock);
    new->next = streams;
    streams = new;
    if (pthread_create(&new->thread, NULL, run, new)) return finish(OUT_OF_MEMORY);
    pthread_detach(new->thread);
    kvasir_double_streams++;
    *stream = new;
    return finish(SUCCESS);
}

result_t cuStreamGetPriority(struct stream *stream, int *priority) {
    ENTER_HEALTHY();
    *priority = stream->priority;
    return SUCCESS;
}

static int is_stream(struct stream *stream) {
    for (struct stream *at = streams; at; at = at->next)
        if (at == stream) return !at->closing;
    return 0;
}

/* Returns at once; the thread ends when it has done what is queued. */
result_t cuStreamDestroy_v2(struct stream *stream) {
    ENTER();
    pthread_mutex_lock(&lock);
    if (!is_stream(stream)) return finish(INVALID_HANDLE);
    stream->closing = 1;
    pthread_cond_broadcast(&changed);
    kvasir_double_streams--;
    return finish(context->sticky);
}

result_t cuStreamSynchronize(struct stream *stream) {
    ENTER_HEALTHY();
    UNSAFE();
    if (kvasir_double_refuse_synchronise) return (result_t)kvasir_double_refuse_synchronise;
    if (!stream) return INVALID_HANDLE; /* the default stream waits for everybody: nothing here uses it */
    pthread_mutex_lock(&lock);
    if (!is_stream(stream)) return finish(INVALID_HANDLE);
    drain(stream);
    return finish(context->sticky);
}
