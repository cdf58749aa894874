/* Everything that a handle or an address can name, in tables behind one lock, and how a call begins and ends. */

struct context {
    int device, retained;
    _Atomic int sticky;
};

struct allocation {
    struct allocation *next;
    address_t address;
    size_t bytes, mapped;
    unsigned char *alias;
    int descriptor, device, imported, freed;
};

struct registration {
    struct registration *next;
    address_t address;
    size_t bytes;
};

struct event {
    struct event *next;
    uint64_t recorded, passed;
    int pending, destroyed;
};

enum kind { COPY, BATCH, RECORD, LAUNCH, WAIT };

struct piece {
    unsigned char *to;
    const unsigned char *from;
    size_t bytes, rows, to_pitch, from_pitch;
};

struct function {
    struct function *next;
    char name[128];
    int (*emulate)(const char *, const unsigned *, const unsigned *, unsigned, void **);
    int (*sizes)(const char *, size_t *, int);
};

struct operation {
    struct operation *next;
    enum kind kind;
    size_t count;
    struct piece *pieces;
    struct event *event;
    uint64_t ticket;
    struct function *function;
    unsigned grid[3], block[3], shared;
    size_t parameter_count, parameter_offsets[64];
    unsigned char *parameters;
};

struct stream {
    struct stream *next;
    struct context *context;
    pthread_t thread;
    struct operation *first, **last;
    int busy, closing, priority;
};

struct module {
    void *library;
    struct function *functions;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct context contexts[64];
static struct allocation *allocations;
static struct registration *registrations;
static struct event *events;
static struct stream *streams;
static size_t used[64];
static int initialised;
static uint32_t shuffle = 12345;
static __thread struct context *stack[32];
static __thread int depth;

static struct context *current(void) { return depth > 0 ? stack[depth - 1] : NULL; }

/* Every call that needs a context begins so. */
#define ENTER()                                                                                        \
    if (!initialised) return NOT_INITIALIZED;                                                          \
    struct context *context = current();                                                               \
    if (!context || !context->retained) return INVALID_CONTEXT

#define ENTER_HEALTHY()                                                                                \
    ENTER();                                                                                           \
    if (context->sticky) return context->sticky

/* While another thread records in the global mode, calls that may wait for the device are refused, and spoil the
 * recording, unless this thread's own mode is the relaxed one. */
static __thread int capture_mode;

static int is_forbidden(void) {
    if (!kvasir_double_capturing || capture_mode == CAPTURE_MODE_RELAXED) return 0;
    kvasir_double_captures_spoilt++;
    return 1;
}

#define UNSAFE()                                                                                       \
    if (is_forbidden()) return CAPTURE_UNSUPPORTED

static result_t finish(result_t result) {
    pthread_mutex_unlock(&lock);
    return result;
}

/* Wait until nothing is queued on a stream, or on any stream, the destroyed ones too. With the lock held. */
static void drain(struct stream *stream) {
    while (stream->first || stream->busy) pthread_cond_wait(&changed, &lock);
}

static void drain_all(void) {
    for (struct stream *stream = streams; stream;)
        if (stream->first || stream->busy) {
            pthread_cond_wait(&changed, &lock);
            stream = streams; /* some may be gone */
        } else {
            stream = stream->next;
        }
}
