/* Graphs: a list of operations. */

result_t cuThreadExchangeStreamCaptureMode(int *mode) {
    if (!initialised) return NOT_INITIALIZED;
    if (kvasir_double_no_capture_mode) return NOT_SUPPORTED;
    if (*mode < 0 || *mode > 2) return INVALID_VALUE;
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}

result_t cuStreamBeginCapture_v2(struct stream *stream, int mode) {
    ENTER_HEALTHY();
    pthread_mutex_lock(&lock);
    if (!is_stream(stream) || mode < 0 || mode > 2) return finish(INVALID_VALUE);
    if (stream->capture) return finish(CAPTURE_INVALIDATED);
    stream->capture = calloc(1, sizeof *stream->capture);
    stream->capture->last = &stream->capture->first;
    return finish(SUCCESS);
}

result_t cuStreamEndCapture(struct stream *stream, struct graph **graph) {
    ENTER_HEALTHY();
    pthread_mutex_lock(&lock);
    if (!is_stream(stream) || !stream->capture) return finish(INVALID_VALUE);
    *graph = stream->capture;
    stream->capture = NULL;
    kvasir_double_graphs++;
    return finish(SUCCESS);
}

static struct operation copy_of(const struct operation *operation) {
    struct operation new = *operation;
    size_t count = operation->parameter_count;
    if (operation->parameters) {
        size_t sizes[64], bytes = 0;
        operation->function->sizes(operation->function->name, sizes, 64);
        if (count) bytes = operation->parameter_offsets[count - 1] + sizes[count - 1];
        new.parameters = malloc(bytes + 1);
        memcpy(new.parameters, operation->parameters, bytes);
    }
    if (operation->pieces) {
        new.pieces = malloc(operation->count * sizeof *new.pieces);
        memcpy(new.pieces, operation->pieces, operation->count * sizeof *new.pieces);
    }
    return new;
}

result_t cuGraphInstantiateWithFlags(struct graph **executable, struct graph *graph, unsigned long long flags) {
    ENTER_HEALTHY();
    if (flags) return INVALID_VALUE;
    struct graph *new = calloc(1, sizeof *new);
    new->last = &new->first;
    for (struct operation *at = graph->first; at; at = at->next) {
        struct operation *copy = malloc(sizeof *copy);
        *copy = copy_of(at);
        copy->next = NULL;
        *new->last = copy;
        new->last = &copy->next;
    }
    kvasir_double_graphs++;
    *executable = new;
    return SUCCESS;
}

result_t cuGraphLaunch(struct graph *graph, struct stream *stream) {
    ENTER_HEALTHY();
    pthread_mutex_lock(&lock);
    for (struct operation *at = graph->first; at; at = at->next) {
        result_t result = enqueue(context, stream, copy_of(at));
        if (result) return finish(result);
    }
    return finish(SUCCESS);
}

result_t cuGraphDestroy(struct graph *graph) {
    ENTER();
    for (struct operation *at = graph->first, *next; at; at = next) {
        next = at->next;
        free(at->pieces);
        free(at->parameters);
        free(at);
    }
    free(graph);
    kvasir_double_graphs--;
    return context->sticky;
}

result_t cuGraphExecDestroy(struct graph *graph) { return cuGraphDestroy(graph); }
