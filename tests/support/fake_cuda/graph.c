/* Graphs: what a stream is given while it captures, to be launched as often as wanted. */
#include "fake.h"

static Op* copied(const Op* op) {
    Op* made = malloc(sizeof *made);
    *made = *op;
    if (op->owned) {
        made->owned = malloc(op->size ? op->size : 1);
        memcpy(made->owned, op->owned, op->size);
    }
    made->next = NULL;
    return made;
}

static Graph* new_graph(Context* context, const Graph* from) {
    Graph* graph = calloc(1, sizeof *graph);
    graph->context = context;
    for (const Op* op = from ? from->head : NULL; op; op = op->next) {
        Op* made = copied(op);
        *(graph->tail ? &graph->tail->next : &graph->head) = made;
        graph->tail = made;
    }
    return graph;
}

static void drop_graph(Graph* graph) {
    for (Op *op = graph->head, *next; op; op = next) {
        next = op->next;
        drop(op);
    }
    free(graph);
}

int cuStreamBeginCapture(Stream* stream, int mode) {
    ENTER;
    const int result = usable(stream);
    if (result) return result;
    if (stream == stream->context->legacy) return violation(CAPTURE_UNSUPPORTED, "the legacy stream can't be recorded");
    if (stream->capturing) return violation(CAPTURE_UNSUPPORTED, "a graph is being recorded already");
    stream->capturing = new_graph(stream->context, NULL);
    stream->capturer = pthread_self();
    stream->mode = mode;
    stream->spoilt = 0;
    numbers[LIVE_GRAPHS]++;
    return OK;
}

int cuStreamEndCapture(Stream* stream, Graph** graph) {
    ENTER;
    const int result = usable(stream);
    *graph = NULL;
    if (!stream->capturing) return violation(INVALID_VALUE, "no graph is being recorded");
    if (stream->mode != 2 && !pthread_equal(stream->capturer, pthread_self()))
        return violation(CAPTURE_WRONG_THREAD, "a recording was ended by another thread than began it");
    Graph* made = stream->capturing;
    stream->capturing = NULL;
    if (due(SPOIL)) stream->spoilt = 1;
    if (result || stream->spoilt) {
        drop_graph(made);
        numbers[LIVE_GRAPHS]--;
        return result ? result : CAPTURE_INVALIDATED;
    }
    *graph = made;
    return OK;
}

static __thread int thread_mode; /* 0 GLOBAL, 1 THREAD_LOCAL, 2 RELAXED */

int cuThreadExchangeStreamCaptureMode(int* mode) {
    check_caller(__func__);
    if (*mode < 0 || *mode > 2) return INVALID_VALUE;
    const int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return OK;
}

int unsafe(const char* function) {
    int result = OK;
    if (thread_mode == 2) return OK;
    for (Stream* s = streams; s; s = s->next) {
        if (!s->capturing || s->mode == 2) continue;
        const int own = pthread_equal(s->capturer, pthread_self());
        if (!own && (s->mode != 0 || thread_mode != 0)) continue;
        s->spoilt = 1;
        result = violation(CAPTURE_UNSUPPORTED, "%s ended the recording of a graph", function);
    }
    return result;
}

int cuGraphInstantiateWithFlags(Graph** executable, Graph* graph, unsigned long long flags) {
    ENTER;
    (void)flags;
    const int result = ready(graph->context);
    if (result) return result;
    *executable = new_graph(graph->context, graph);
    numbers[LIVE_EXECS]++;
    return OK;
}

int cuGraphInstantiate(Graph** executable, Graph* graph, unsigned long long flags) {
    return cuGraphInstantiateWithFlags(executable, graph, flags);
}

int cuGraphLaunch(Graph* executable, Stream* stream) {
    ENTER;
    const int result = usable(stream);
    if (result) return result;
    if (due(FAIL_LAUNCH)) return (int)numbers[FAIL_LAUNCH_WITH];
    numbers[GRAPH_LAUNCHES]++;
    journal("graph %d\n", stream->number);
    for (const Op* op = executable->head; op; op = op->next) {
        Op* made = copied(op);
        push(stream, *made);
        free(made);
    }
    return OK;
}

int cuGraphDestroy(Graph* graph) {
    ENTER;
    drop_graph(graph);
    numbers[LIVE_GRAPHS]--;
    return OK;
}

int cuGraphExecDestroy(Graph* executable) {
    ENTER;
    drop_graph(executable);
    numbers[LIVE_EXECS]--;
    return OK;
}
