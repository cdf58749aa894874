/*
 * A double of NVRTC, for machines without it: it compiles nothing. Its image names the emulator of the kernels, as the
 * driver's double takes it: as machine code behind the four bytes with which ELF begins, as text without them. The
 * emulator is the one that was set, or KVASIR_DOUBLE_EMULATOR in the environment.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4, INVALID_OPTION = 5, COMPILATION = 6 };

/* The newest architecture that it knows. */
int64_t kvasir_double_architecture = 100;
/* What was compiled. */
_Atomic int64_t kvasir_double_machine_codes, kvasir_double_texts, kvasir_double_programs;
/* The number behind the last --gpu-architecture=. */
_Atomic int64_t kvasir_double_compiled_for;

static char emulator[1024];

void kvasir_double_set_emulator(const char *path) { snprintf(emulator, sizeof emulator, "%s", path); }

static const int ARCHITECTURES[] = {75, 80, 86, 89, 90, 100, 103, 120};

struct program {
    char *source;
    int is_machine_code;
    char log[256];
};

static int count(void) {
    int known = 0;
    for (size_t at = 0; at < sizeof ARCHITECTURES / sizeof *ARCHITECTURES; at++)
        known += ARCHITECTURES[at] <= kvasir_double_architecture;
    return known;
}

int nvrtcGetNumSupportedArchs(int *number) {
    *number = count();
    return SUCCESS;
}

int nvrtcGetSupportedArchs(int *architectures) {
    memcpy(architectures, ARCHITECTURES, (size_t)count() * sizeof *architectures);
    return SUCCESS;
}

const char *nvrtcGetErrorString(int code) {
    switch (code) {
    case SUCCESS: return "NVRTC_SUCCESS";
    case INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
    case INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
    case INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
    case COMPILATION: return "NVRTC_ERROR_COMPILATION";
    default: return "NVRTC_ERROR unknown";
    }
}

int nvrtcCreateProgram(struct program **program, const char *source, const char *name, int headers,
                       const char *const *texts, const char *const *names) {
    (void)name, (void)texts, (void)names;
    if (!program || !source || headers) return INVALID_INPUT;
    *program = calloc(1, sizeof **program);
    (*program)->source = strdup(source);
    kvasir_double_programs++;
    return SUCCESS;
}

int nvrtcDestroyProgram(struct program **program) {
    if (!program || !*program) return INVALID_PROGRAM;
    free((*program)->source);
    free(*program);
    *program = NULL;
    kvasir_double_programs--;
    return SUCCESS;
}

static int is_known(int architecture) {
    for (int at = 0; at < count(); at++)
        if (ARCHITECTURES[at] == architecture) return 1;
    return 0;
}

static int refuse(struct program *program, const char *option) {
    snprintf(program->log, sizeof program->log, "nvrtc: error: invalid value for %s\n", option);
    return INVALID_OPTION;
}

/* Machine code for sm_N, text for compute_N, both for an N that it knows. */
int nvrtcCompileProgram(struct program *program, int number, const char *const *options) {
    if (!program) return INVALID_PROGRAM;
    for (int at = 0; at < number; at++) {
        int architecture = 0;
        if (sscanf(options[at], "--gpu-architecture=sm_%d", &architecture) == 1) program->is_machine_code = 1;
        else if (sscanf(options[at], "--gpu-architecture=compute_%d", &architecture) != 1) {
            if (!strcmp(options[at], "--std=c++17")) continue;
            return refuse(program, options[at]);
        }
        if (!is_known(architecture)) return refuse(program, options[at]);
        kvasir_double_compiled_for = architecture;
    }
    if (!strstr(program->source, "__global__")) {
        snprintf(program->log, sizeof program->log, "no kernel\n");
        return COMPILATION;
    }
    if (program->is_machine_code) kvasir_double_machine_codes++;
    else kvasir_double_texts++;
    return SUCCESS;
}

/* Writes the image, unless there is no place for it, and returns its length with the final zero. */
static size_t image(const char *magic, char *bytes, size_t most) {
    const char *named = *emulator ? emulator : getenv("KVASIR_DOUBLE_EMULATOR");
    return (size_t)snprintf(bytes, most, "%semulator:%s\n", magic, named ? named : "") + 1;
}

static const char MAGIC[] = "\x7f" "ELF";

int nvrtcGetCUBINSize(struct program *program, size_t *bytes) {
    *bytes = program->is_machine_code ? image(MAGIC, NULL, 0) : 0;
    return SUCCESS;
}

int nvrtcGetCUBIN(struct program *program, char *bytes) {
    if (!program->is_machine_code) return INVALID_PROGRAM;
    image(MAGIC, bytes, image(MAGIC, NULL, 0));
    return SUCCESS;
}

int nvrtcGetPTXSize(struct program *program, size_t *bytes) {
    *bytes = program->is_machine_code ? 0 : image("", NULL, 0);
    return SUCCESS;
}

int nvrtcGetPTX(struct program *program, char *bytes) {
    if (program->is_machine_code) return INVALID_PROGRAM;
    image("", bytes, image("", NULL, 0));
    return SUCCESS;
}

int nvrtcGetProgramLogSize(struct program *program, size_t *bytes) {
    *bytes = strlen(program->log) + 1;
    return SUCCESS;
}

int nvrtcGetProgramLog(struct program *program, char *log) {
    strcpy(log, program->log);
    return SUCCESS;
}
