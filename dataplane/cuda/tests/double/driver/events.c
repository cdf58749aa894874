/* Events, and the queue of a stream's operations. */

static int is_event(struct event *event) {
    for (struct event *at = events; at; at = at->next)
        if (at == event) return 1;
    return 0;
}

result_t cuEventCreate(struct event **event, unsigned flags) {
    ENTER_HEALTHY();
    if (flags > 7) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    *event = calloc(1, sizeof **event);
    (*event)->next = events;
    events = *event;
    kvasir_double_events++;
    return finish(SUCCESS);
}

result_t cuEventDestroy_v2(struct event *event) {
    ENTER();
    pthread_mutex_lock(&lock);
    for (struct event **at = &events; *at; at = &(*at)->next)
        if (*at == event) {
            *at = event->next;
            event->destroyed = 1;
            pass(event);
            kvasir_double_events--;
            return finish(context->sticky);
        }
    return finish(INVALID_HANDLE);
}

result_t cuEventQuery(struct event *event) {
    ENTER_HEALTHY();
    UNSAFE();
    pthread_mutex_lock(&lock);
    if (!is_event(event)) return finish(INVALID_HANDLE);
    return finish(event->passed >= event->recorded ? SUCCESS : NOT_READY);
}

/* Queues an operation. With the lock held. */
static result_t enqueue(struct context *context, struct stream *stream, struct operation operation) {
    result_t result = !is_stream(stream) || stream->context != context ? INVALID_HANDLE : SUCCESS;
    if (result) {
        free(operation.pieces);
        free(operation.parameters);
        return result;
    }
    struct operation *new = malloc(sizeof *new);
    *new = operation;
    new->next = NULL;
    *stream->last = new;
    stream->last = &new->next;
    if (operation.event) operation.event->pending++;
    pthread_cond_broadcast(&changed);
    return SUCCESS;
}

result_t cuEventRecord(struct event *event, struct stream *stream) {
    ENTER_HEALTHY();
    UNSAFE();
    pthread_mutex_lock(&lock);
    if (!is_event(event) || counted_down(&kvasir_double_refuse_record)) return finish(INVALID_HANDLE);
    struct operation operation = {.kind = RECORD, .event = event, .ticket = event->recorded + 1};
    result_t result = enqueue(context, stream, operation);
    if (!result) event->recorded++;
    return finish(result);
}

result_t cuStreamWaitEvent(struct stream *stream, struct event *event, unsigned flags) {
    ENTER_HEALTHY();
    pthread_mutex_lock(&lock);
    if (!is_event(event) || flags) return finish(INVALID_HANDLE);
    struct operation operation = {.kind = WAIT, .event = event, .ticket = event->recorded};
    return finish(enqueue(context, stream, operation));
}
