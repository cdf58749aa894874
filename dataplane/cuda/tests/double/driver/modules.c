/* Modules and kernels. */

static result_t refuse_image(unsigned count, int *options, void **values, const char *reason, result_t result) {
    for (unsigned at = 0; at + 1 < count; at++)
        if (options[at] == JIT_ERROR_LOG && options[at + 1] == JIT_ERROR_LOG_BYTES)
            snprintf(values[at], (size_t)values[at + 1], "%s", reason);
    return result;
}

result_t cuModuleLoadDataEx(struct module **module, const void *image, unsigned count, int *options, void **values) {
    ENTER_HEALTHY();
    const char *text = image, *prefix = "emulator:";
    if (!image) return INVALID_VALUE;
    if (!memcmp(text, "\x7f" "ELF", 4)) {
        if (kvasir_double_refuse_machine_code) return (result_t)kvasir_double_refuse_machine_code;
        text += 4;
    }
    const char *end = strncmp(text, prefix, strlen(prefix)) ? NULL : strchr(text, '\n');
    if (!end) return refuse_image(count, options, values, "the image names no emulator", INVALID_PTX);
    char path[1024];
    snprintf(path, sizeof path, "%.*s", (int)(end - text - 9), text + 9);
    void *library = dlopen(path, RTLD_NOW);
    if (!library) return refuse_image(count, options, values, dlerror(), INVALID_IMAGE);
    *module = calloc(1, sizeof **module);
    (*module)->library = library;
    kvasir_double_modules++;
    return SUCCESS;
}

result_t cuModuleUnload(struct module *module) {
    ENTER();
    pthread_mutex_lock(&lock);
    drain_all();
    for (struct function *at = module->functions, *next; at; at = next) {
        next = at->next;
        free(at);
    }
    dlclose(module->library);
    free(module);
    kvasir_double_modules--;
    return finish(context->sticky);
}

result_t cuModuleGetFunction(struct function **function, struct module *module, const char *name) {
    ENTER_HEALTHY();
    struct function *new = calloc(1, sizeof *new);
    *(void **)&new->emulate = dlsym(module->library, "kvasir_emulate");
    *(void **)&new->sizes = dlsym(module->library, "kvasir_parameter_sizes");
    size_t sizes[64];
    if (!new->emulate || !new->sizes || strlen(name) >= sizeof new->name || new->sizes(name, sizes, 64) < 0) {
        free(new);
        return NOT_FOUND;
    }
    strcpy(new->name, name);
    new->next = module->functions;
    module->functions = new;
    *function = new;
    return SUCCESS;
}

result_t cuLaunchKernel(struct function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, struct stream *stream, void **parameters,
                        void **extra) {
    ENTER_HEALTHY();
    if (!function) return INVALID_HANDLE;
    uint64_t threads = (uint64_t)block_x * block_y * block_z;
    if (!grid_x || !grid_y || !grid_z || !threads || threads > 1024 || shared > 48 << 10 || extra) return INVALID_VALUE;
    size_t sizes[64], bytes = 0;
    int count = function->sizes(function->name, sizes, 64);
    if (count < 0 || count > 64 || (count && !parameters)) return INVALID_VALUE;
    struct operation operation = {.kind = LAUNCH, .function = function, .shared = shared};
    memcpy(operation.grid, (unsigned[]){grid_x, grid_y, grid_z}, sizeof operation.grid);
    memcpy(operation.block, (unsigned[]){block_x, block_y, block_z}, sizeof operation.block);
    for (int at = 0; at < count; at++) {
        operation.parameter_offsets[at] = bytes;
        bytes += (sizes[at] + 15) / 16 * 16;
    }
    operation.parameter_count = (size_t)count;
    operation.parameters = malloc(bytes + 1);
    for (int at = 0; at < count; at++)
        memcpy(operation.parameters + operation.parameter_offsets[at], parameters[at], sizes[at]);
    pthread_mutex_lock(&lock);
    return finish(enqueue(context, stream, operation));
}
