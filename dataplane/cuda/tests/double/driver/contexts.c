/* Contexts: the primary one of each device; and a thread's capture mode. */

result_t cuDevicePrimaryCtxRetain(struct context **context, int device) {
    DEVICE(device);
    pthread_mutex_lock(&lock);
    *context = &contexts[device];
    if (!(*context)->retained++) {
        (*context)->device = device;
        (*context)->sticky = 0;
        kvasir_double_contexts++;
    }
    return finish(SUCCESS);
}

result_t cuDevicePrimaryCtxRelease_v2(int device) {
    DEVICE(device);
    pthread_mutex_lock(&lock);
    if (!contexts[device].retained) return finish(INVALID_CONTEXT);
    if (!--contexts[device].retained) kvasir_double_contexts--;
    return finish(SUCCESS);
}

result_t cuCtxPushCurrent_v2(struct context *context) {
    if (!initialised) return NOT_INITIALIZED;
    if (!context || !context->retained || depth == 32) return INVALID_CONTEXT;
    stack[depth++] = context;
    return SUCCESS;
}

result_t cuCtxPopCurrent_v2(struct context **context) {
    if (!initialised) return NOT_INITIALIZED;
    if (!depth) return INVALID_CONTEXT;
    depth--;
    if (context) *context = counted_down(&kvasir_double_wrong_pop) ? NULL : stack[depth];
    return SUCCESS;
}

result_t cuCtxGetCurrent(struct context **context) {
    *context = current();
    return SUCCESS;
}

result_t cuCtxSetCurrent(struct context *context) {
    if (!initialised) return NOT_INITIALIZED;
    if (context && !context->retained) return INVALID_CONTEXT;
    if (depth) depth--;
    if (context) stack[depth++] = context;
    return SUCCESS;
}

result_t cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER_HEALTHY();
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return SUCCESS;
}

result_t cuThreadExchangeStreamCaptureMode(int *mode) {
    if (!initialised) return NOT_INITIALIZED;
    if (kvasir_double_no_capture_mode) return NOT_SUPPORTED;
    if (*mode < 0 || *mode > 2) return INVALID_VALUE;
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}
