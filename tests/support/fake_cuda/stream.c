/* Streams, events and copies: queued work, and when it runs. */
#include "fake.h"

Stream* streams;
static Event* events;
static uint64_t random_state;

enum { LAZY, EAGER };

void pause_ns(int64_t ns) {
    if (ns <= 0) return;
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    nanosleep(&t, NULL);
}

static double clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

void drop(Op* op) {
    free(op->owned);
    free(op);
}

/* ---------------------------------------------------------------- running */

static int fault(Context* context, int code, const char* what, Ptr address) {
    fprintf(stderr, "fake CUDA: %s %llx: not live device memory of a stream that is so far\n", what, address);
    context->sticky = code;
    return code;
}

static void execute(Stream* stream, Op* op) {
    Context* context = stream->context;
    void *to, *from;
    if (context->sticky && op->kind != RECORD) return;
    switch (op->kind) {
    case COPY_HTOD:
        pause_ns(numbers[HTOD_NS]);
        to = behind(op->to, op->size);
        if (!to) fault(context, ILLEGAL_ADDRESS, "copy to", op->to);
        else memcpy(to, op->owned ? op->owned : op->host, op->size);
        break;
    case COPY_DTOH:
        pause_ns(numbers[DTOH_NS]);
        from = behind(op->from, op->size);
        if (!from) fault(context, ILLEGAL_ADDRESS, "copy from", op->from);
        else memcpy(op->host, from, op->size);
        break;
    case COPY_DTOD:
        to = behind(op->to, op->size);
        from = behind(op->from, op->size);
        if (!to || !from) fault(context, ILLEGAL_ADDRESS, "copy on the device", to ? op->from : op->to);
        else memmove(to, from, op->size);
        break;
    case MEMSET:
        to = behind(op->to, op->size);
        if (!to) fault(context, ILLEGAL_ADDRESS, "memset of", op->to);
        else memset(to, op->value, op->size);
        break;
    case LAUNCH:
        pause_ns(numbers[KERNEL_NS]);
        if (due(FAULT_KERNEL)) context->sticky = (int)numbers[FAULT_KERNEL_WITH];
        else context->sticky = run_function(op->function, op);
        break;
    case RECORD:
        if (op->version > op->event->reached) {
            op->event->reached = op->version;
            op->event->ns = clock_ns();
        }
        break;
    case ALLOC: {
        Allocation* a = find(op->to);
        if (a) a->ready = 1;
        break;
    }
    case FREE: {
        Allocation* a = find(op->to);
        if (!a) violation(INVALID_VALUE, "device memory %llx given back twice", op->to);
        else release(a);
        break;
    }
    }
}

static void run_to(Stream* stream, uint64_t position);

static int held(const Op* op) {
    const int copy = op->kind == COPY_HTOD || op->kind == COPY_DTOH || op->kind == COPY_DTOD;
    return (numbers[HOLD] == 1 && op->kind == LAUNCH) || (numbers[HOLD] == 2 && copy);
}

/* Runs a stream's next operation; 0 if it hangs or waits for a stream that does. */
static int pop(Stream* stream) {
    Op* op = stream->head;
    if (op->kind == WAIT && op->on) {
        run_to(op->on, op->version);
        if (op->on->context && op->on->done < op->version) return 0;
    }
    if (held(op) && !stream->context->sticky) return 0;
    if (stream->hung || (op->kind == LAUNCH && !stream->context->sticky && due(HANG_KERNEL))) {
        stream->hung = 1;
        return 0;
    }
    stream->head = op->next;
    if (!stream->head) stream->tail = NULL;
    stream->done = op->position;
    execute(stream, op);
    drop(op);
    return 1;
}

static void run_to(Stream* stream, uint64_t position) {
    while (stream->head && stream->head->position <= position && pop(stream)) {
    }
}

/* As run_to(), but returns only when the stream is so far (fake.h, rule 7). */
static void wait_for(Stream* stream, uint64_t position) {
    run_to(stream, position);
    if (stream->head && stream->head->position <= position && !numbers[HOLD])
        violation(OK, "a call waits for a kernel that hangs");
    while (stream->head && stream->head->position <= position) {
        run_to(stream, position);
        pthread_mutex_unlock(&lock);
        pause_ns(10000000);
        pthread_mutex_lock(&lock);
    }
}

int synchronize(Context* context) {
    for (Stream* s = streams; s; s = s->next)
        if (s->context == context) wait_for(s, UINT64_MAX);
    return context->sticky;
}

static int blocked(Stream* stream) {
    const Op* op = stream->head;
    return !op || stream->hung || held(op) || (op->kind == WAIT && op->on && op->on->done < op->version);
}

void progress(void) {
    const int64_t mode = numbers[MODE];
    if (mode == LAZY) return;
    if (mode == EAGER) {
        for (Stream* s = streams; s; s = s->next) run_to(s, UINT64_MAX);
        return;
    }
    if (!random_state) random_state = (uint64_t)mode * 0x9E3779B97F4A7C15u;
    for (;;) { /* a few steps of streams drawn by lot */
        random_state = random_state * 6364136223846793005u + 1442695040888963407u;
        const unsigned draw = (unsigned)(random_state >> 33);
        int count = 0;
        for (Stream* s = streams; s; s = s->next) count += !blocked(s);
        if (!count || draw % 3 == 0) return;
        int which = (int)(draw / 3) % count;
        for (Stream* s = streams; s; s = s->next)
            if (!blocked(s) && which-- == 0) {
                if (!pop(s)) return;
                break;
            }
    }
}

/* Work in the legacy default stream runs after all that was queued in blocking streams, and the other way round. */
static void legacy_order(Stream* stream) {
    Context* context = stream->context;
    if (stream == context->legacy) {
        for (Stream* s = streams; s; s = s->next)
            if (s->context == context && s->blocking && s->issued) push(stream, (Op){.kind = WAIT, .on = s, .version = s->issued});
    } else if (stream->blocking && context->legacy && context->legacy->issued)
        push(stream, (Op){.kind = WAIT, .on = context->legacy, .version = context->legacy->issued});
}

/* The stream that a handle means: 0 and 1 are the current context's legacy default stream. */
static Stream* meant(Stream* stream) {
    if ((uintptr_t)stream > 1) return stream;
    Context* context = current();
    if (context && !context->legacy) {
        context->legacy = calloc(1, sizeof *context->legacy);
        context->legacy->context = context;
        context->legacy->next = streams;
        streams = context->legacy;
        numbers[LIVE_STREAMS]++;
    }
    return context ? context->legacy : NULL;
}

int push(Stream* stream, Op op) {
    Op* made = malloc(sizeof *made);
    *made = op;
    made->next = NULL;
    if (stream->capturing) {
        Graph* graph = stream->capturing;
        *(graph->tail ? &graph->tail->next : &graph->head) = made;
        graph->tail = made;
        return OK;
    }
    if (op.kind != WAIT) legacy_order(stream);
    made->position = ++stream->issued;
    *(stream->tail ? &stream->tail->next : &stream->head) = made;
    stream->tail = made;
    progress();
    return OK;
}

void forget_streams(Context* context) {
    for (Stream** at = &streams; *at;) {
        Stream* s = *at;
        if (s->context != context) {
            at = &s->next;
            continue;
        }
        *at = s->next;
        for (Op *op = s->head, *next; op; op = next) {
            next = op->next;
            drop(op);
        }
        numbers[LIVE_STREAMS]--;
        if (context->legacy == s) context->legacy = NULL;
        s->context = NULL; /* not freed: a use of it is told */
    }
    for (Event* e = events; e; e = e->next)
        if (e->context == context) {
            e->context = NULL;
            numbers[LIVE_EVENTS]--;
        }
}

int usable(Stream* stream) {
    if (!stream || !stream->context) return violation(INVALID_HANDLE, "a stream that is gone was used");
    if (stream->context != current())
        return violation(INVALID_CONTEXT, "a stream was used while another context was current");
    return ready(stream->context);
}

/* ---------------------------------------------------------------- streams and events */

int cuStreamCreate(Stream** stream, unsigned flags) {
    ENTER;
    const int result = ready(current());
    if (result) return result;
    *stream = calloc(1, sizeof **stream);
    (*stream)->blocking = !(flags & 1);
    (*stream)->context = current();
    (*stream)->next = streams;
    streams = *stream;
    static int made;
    (*stream)->number = ++made;
    numbers[LIVE_STREAMS]++;
    return OK;
}

int cuStreamDestroy(Stream* stream) {
    ENTER;
    if (!stream || !stream->context) return violation(INVALID_HANDLE, "a stream was destroyed twice");
    run_to(stream, UINT64_MAX);
    for (Stream** at = &streams; *at; at = &(*at)->next)
        if (*at == stream) {
            *at = stream->next;
            break;
        }
    const int result = stream->context->sticky;
    stream->context = NULL;
    numbers[LIVE_STREAMS]--;
    return result;
}

int cuStreamSynchronize(Stream* stream) {
    ENTER;
    const int refused = unsafe(__func__);
    if (refused) return refused;
    stream = meant(stream);
    const int result = usable(stream);
    if (result) return result;
    if (stream->capturing) return violation(CAPTURE_UNSUPPORTED, "a wait while a graph is recorded");
    wait_for(stream, UINT64_MAX);
    return stream->context->sticky;
}

int cuStreamQuery(Stream* stream) {
    ENTER;
    const int refused = unsafe(__func__);
    if (refused) return refused;
    numbers[QUERIES]++;
    stream = meant(stream);
    const int result = usable(stream);
    if (result) return result;
    progress();
    if (!stream->head) return stream->context->sticky;
    pop(stream);
    return stream->context->sticky ? stream->context->sticky : NOT_READY;
}

int cuEventCreate(Event** event, unsigned flags) {
    ENTER;
    const int result = ready(current());
    if (result) return result;
    *event = calloc(1, sizeof **event);
    (*event)->context = current();
    (*event)->timing = !(flags & 2);
    static int made;
    (*event)->number = ++made;
    (*event)->next = events;
    events = *event;
    numbers[LIVE_EVENTS]++;
    return OK;
}

int cuEventDestroy(Event* event) {
    ENTER;
    if (!event->context) return violation(INVALID_HANDLE, "an event was destroyed twice");
    event->context = NULL; /* not freed: its record may still be queued */
    numbers[LIVE_EVENTS]--;
    return OK;
}

int cuEventRecord(Event* event, Stream* stream) {
    ENTER;
    const int result = usable(stream);
    if (result) return result;
    if (event->context != stream->context) return violation(INVALID_HANDLE, "an event of another context was recorded");
    journal("record %d %d\n", stream->number, event->number);
    event->version++;
    event->stream = stream;
    event->position = stream->issued + 1;
    return push(stream, (Op){.kind = RECORD, .event = event, .version = event->version});
}

int cuStreamWaitEvent(Stream* stream, Event* event, unsigned flags) {
    ENTER;
    (void)flags;
    const int result = usable(stream);
    if (result) return result;
    if (stream->capturing) {
        stream->spoilt = 1;
        return violation(CAPTURE_ISOLATION, "a recording waits for an event of outside");
    }
    if (!event->version) return OK; /* never recorded: nothing to wait for */
    journal("wait %d %d\n", stream->number, event->number);
    return push(stream, (Op){.kind = WAIT, .on = event->stream, .version = event->position});
}

int cuEventQuery(Event* event) {
    ENTER;
    const int refused = unsafe(__func__);
    if (refused) return refused;
    numbers[QUERIES]++;
    const int result = ready(event->context);
    if (result) return result;
    progress();
    if (event->reached == event->version) {
        if (event->told != event->version) journal("ended %d %d\n", event->stream ? event->stream->number : 0, event->number);
        event->told = event->version;
        return event->context->sticky;
    }
    if (event->stream->head) pop(event->stream);
    return event->context->sticky ? event->context->sticky : NOT_READY;
}

int cuEventSynchronize(Event* event) {
    ENTER;
    const int refused = unsafe(__func__);
    if (refused) return refused;
    const int result = ready(event->context);
    if (result) return result;
    if (event->version) wait_for(event->stream, event->position);
    return event->context->sticky;
}

int cuEventElapsedTime(float* ms, Event* start, Event* end) {
    ENTER;
    numbers[ELAPSED]++;
    const int result = ready(start->context);
    if (result) return result;
    if (!start->timing || !end->timing || !start->version || !end->version)
        return violation(INVALID_HANDLE, "the time between events that were not recorded or have none");
    if (start->reached != start->version || end->reached != end->version) return NOT_READY;
    *ms = (float)((end->ns - start->ns) / 1e6);
    return OK;
}

int cuEventElapsedTime_v2(float* ms, Event* start, Event* end) {
    return cuEventElapsedTime(ms, start, end);
}

/* ---------------------------------------------------------------- copies */

static int known(Ptr address, size_t size, const char* what) {
    Allocation* a = find(address);
    if (a && address + size <= a->address + a->size) return OK;
    return violation(INVALID_VALUE, "%s %llx (%zu bytes): not device memory", what, address, size);
}

static int on_host(const void* pointer, const char* what) {
    return is_device(pointer) ? violation(INVALID_VALUE, "%s %p: device memory where host memory is meant", what, pointer) : OK;
}

int cuMemcpyHtoDAsync(Ptr to, const void* from, size_t size, Stream* stream) {
    ENTER;
    int result = usable(stream);
    if (!result) result = known(to, size, "copy to");
    if (!result) result = on_host(from, "copy from");
    if (!result && stream->capturing && !is_pinned(from, size))
        result = violation(CAPTURE_UNSUPPORTED, "a copy from pageable memory was recorded");
    if (result) return result;
    numbers[HTOD]++;
    numbers[HTOD_BYTES] += (int64_t)size;
    journal("htod %d %zu %s\n", stream->number, size, is_pinned(from, size) ? "pinned" : "pageable");
    Op op = {.kind = COPY_HTOD, .to = to, .size = size, .host = (void*)from};
    if (!is_pinned(from, size)) {
        op.owned = malloc(size ? size : 1);
        memcpy(op.owned, from, size);
    }
    return push(stream, op);
}

int cuMemcpyDtoHAsync(void* to, Ptr from, size_t size, Stream* stream) {
    ENTER;
    int result = usable(stream);
    if (!result) result = known(from, size, "copy from");
    if (!result) result = on_host(to, "copy to");
    if (!result && stream->capturing && !is_pinned(to, size))
        result = violation(CAPTURE_UNSUPPORTED, "a copy to pageable memory was recorded");
    if (result) return result;
    numbers[DTOH]++;
    numbers[DTOH_BYTES] += (int64_t)size;
    journal("dtoh %d %zu %s\n", stream->number, size, is_pinned(to, size) ? "pinned" : "pageable");
    push(stream, (Op){.kind = COPY_DTOH, .from = from, .size = size, .host = to});
    if (!is_pinned(to, size)) wait_for(stream, UINT64_MAX);
    return stream->context->sticky;
}

static int on_device(Ptr to, Ptr from, size_t size, Stream* stream, int counter) {
    int result = usable(stream);
    if (!result) result = known(from, size, "copy from");
    if (!result) result = known(to, size, "copy to");
    if (result) return result;
    if (counter == DTOD && find(to)->device != find(from)->device)
        return violation(INVALID_VALUE, "cuMemcpyDtoDAsync between GPUs");
    journal("dtod %d %zu\n", stream->number, size);
    numbers[counter]++;
    numbers[DTOD_BYTES] += (int64_t)size;
    return push(stream, (Op){.kind = COPY_DTOD, .to = to, .from = from, .size = size});
}

int cuMemcpyDtoDAsync(Ptr to, Ptr from, size_t size, Stream* stream) {
    ENTER;
    return on_device(to, from, size, stream, DTOD);
}

int cuMemcpyPeerAsync(Ptr to, Context* there, Ptr from, Context* here, size_t size, Stream* stream) {
    ENTER;
    const Allocation *a = find(to), *b = find(from);
    if (a && b && (a->device != there->device || b->device != here->device))
        return violation(INVALID_VALUE, "cuMemcpyPeerAsync: contexts and memory do not belong together");
    if (!numbers[NO_PEERS] && b && b->pool && !(b->pool->peers & 1u << there->device))
        return violation(INVALID_VALUE, "cuMemcpyPeerAsync: GPU %d has no access to the pool of GPU %d", there->device, here->device);
    return on_device(to, from, size, stream, PEER);
}

int cuMemsetD8Async(Ptr to, unsigned char value, size_t size, Stream* stream) {
    ENTER;
    stream = meant(stream);
    int result = usable(stream);
    if (!result) result = known(to, size, "memset of");
    if (result) return result;
    numbers[MEMSETS]++;
    return push(stream, (Op){.kind = MEMSET, .to = to, .size = size, .value = value});
}

int cuMemcpyHtoD(Ptr to, const void* from, size_t size) {
    ENTER;
    const int refused = unsafe(__func__);
    if (refused) return refused;
    int result = ready(current());
    if (!result) result = known(to, size, "copy to");
    if (!result) result = on_host(from, "copy from");
    if (result) return result;
    void* at = behind(to, size);
    if (!at) return violation(INVALID_VALUE, "copy to %llx: its stream is not so far", to);
    numbers[HTOD]++;
    memcpy(at, from, size);
    return OK;
}

int cuMemcpyDtoH(void* to, Ptr from, size_t size) {
    ENTER;
    const int refused = unsafe(__func__);
    if (refused) return refused;
    int result = ready(current());
    if (!result) result = known(from, size, "copy from");
    if (!result) result = on_host(to, "copy to");
    if (result) return result;
    void* at = behind(from, size);
    if (!at) return violation(INVALID_VALUE, "copy from %llx: its stream is not so far", from);
    numbers[DTOH]++;
    memcpy(to, at, size);
    return OK;
}
