/* Traces that the backend makes for requests of its own: what it is told of them is the answer, row by row. */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "probe.h"

enum { TIMESTAMPS = 4, TENSORS = 8 };

/* what a trace has told; `left` releases, and responses that end a request, are awaited */
struct watching {
  pthread_mutex_t lock;
  pthread_cond_t came;
  pthread_t thread;
  bool known;
  int left;
  size_t used;
  char text[16000];
};

static void add(struct watching* to, bool by_server, const char* form, ...) {
  va_list all;
  pthread_mutex_lock(&to->lock);
  if (by_server && to->known && !pthread_equal(to->thread, pthread_self())) abort(); /* one thread tells it all */
  if (by_server) to->thread = pthread_self(), to->known = true;
  va_start(all, form);
  to->used += (size_t)vsnprintf(to->text + to->used, sizeof to->text - to->used, form, all);
  va_end(all);
  if (to->used + 1000 > sizeof to->text) abort();
  strcpy(to->text + to->used++, "|");
  pthread_mutex_unlock(&to->lock);
}

static void over(struct watching* one) {
  pthread_mutex_lock(&one->lock);
  one->left--;
  pthread_cond_signal(&one->came);
  pthread_mutex_unlock(&one->lock);
}

static void wait_for(struct watching* one) {
  pthread_mutex_lock(&one->lock);
  while (one->left > 0) pthread_cond_wait(&one->came, &one->lock);
  pthread_mutex_unlock(&one->lock);
}

static const char* of(object trace, char* text, size_t room) {
  const char *model, *request;
  int64_t version;
  fine(TRITONSERVER_InferenceTraceModelName(trace, &model));
  fine(TRITONSERVER_InferenceTraceModelVersion(trace, &version));
  fine(TRITONSERVER_InferenceTraceRequestId(trace, &request));
  snprintf(text, room, "%s/%ld/%s", model, (long)version, request);
  return text;
}

static void timed(object trace, int activity, uint64_t ns, void* with) {
  char text[200];
  const char* context;
  fine(TRITONSERVER_InferenceTraceContext(trace, &context));
  add(with, activity != 10, "%s %lu %s %s", TRITONSERVER_InferenceTraceActivityString(activity), (unsigned long)ns,
      of(trace, text, sizeof text), context);
}

static void tensor(object trace, int activity, const char* name, int datatype, const void* base, size_t size,
                   const int64_t* shape, uint64_t dims, int type, int64_t id, void* with) {
  char text[200], shown[100] = "";
  uint64_t i;
  for (i = 0; i < dims; i++) snprintf(shown + strlen(shown), sizeof shown - strlen(shown), "%ldx", (long)shape[i]);
  add(with, true, "%s %s %s %s %lu %d %ld %d %s", TRITONSERVER_InferenceTraceActivityString(activity), name,
      TRITONSERVER_DataTypeString(datatype), shown, (unsigned long)size, type, (long)id,
      size >= 4 ? ((const int32_t*)base)[0] : -1, of(trace, text, sizeof text));
}

static void given_back(object trace, void* with) {
  fine(TRITONSERVER_InferenceTraceDelete(trace));
  add(with, false, "released");
  over(with);
}

static error allocate(object allocator, const char* name, size_t size, int type, int64_t id, void* with, void** buffer,
                      void** buffer_with, int* actual, int64_t* actual_id) {
  (void)allocator, (void)name, (void)type, (void)id, (void)with;
  *buffer = malloc(size + 1);
  *buffer_with = NULL;
  *actual = 1; /* page-locked, as it says */
  *actual_id = 3;
  return NULL;
}

static error free_buffer(object allocator, void* buffer, void* with, size_t size, int type, int64_t id) {
  (void)allocator, (void)with, (void)size, (void)type, (void)id;
  free(buffer);
  return NULL;
}

/* the input's memory is the backend's again */
static void released(object call, uint32_t flags, void* value) {
  (void)flags;
  fine(TRITONSERVER_InferenceRequestDelete(call));
  free(value);
}

static void responded(object response, uint32_t flags, void* with) {
  error failed = response == NULL ? NULL : TRITONSERVER_InferenceResponseError(response);
  add(with, true, "%s%s", response == NULL ? "no response" : failed != NULL ? "failed" : "response", flags & 1 ? ", the last" : "");
  if (response != NULL) fine(TRITONSERVER_InferenceResponseDelete(response));
  if (flags & 1) over(with);
}

static object request_for(const char* model, const char* what, struct watching* with) {
  static object allocator;
  static const int64_t shape[2] = {1, 1};
  const char* name = strcmp(what, "raw") == 0 ? "raw" : "IN";
  int32_t* value = malloc(sizeof *value);
  object made;
  *value = 42;
  if (allocator == NULL) fine(TRITONSERVER_ResponseAllocatorNew(&allocator, allocate, free_buffer, NULL));
  fine(TRITONSERVER_InferenceRequestNew(&made, server, model, -1));
  fine(TRITONSERVER_InferenceRequestSetId(made, "mine"));
  if (name[0] == 'r') {
    fine(TRITONSERVER_InferenceRequestAddRawInput(made, name));
  } else {
    fine(TRITONSERVER_InferenceRequestAddInput(made, name, 8, shape, 2));
    fine(TRITONSERVER_InferenceRequestSetStringParameter(made, "do", what));
  }
  fine(TRITONSERVER_InferenceRequestAppendInputData(made, name, value, sizeof *value, 0, 0));
  fine(TRITONSERVER_InferenceRequestSetReleaseCallback(made, released, value));
  if (with != NULL) fine(TRITONSERVER_InferenceRequestSetResponseCallback(made, allocator, NULL, responded, with));
  return made;
}

static object trace_for(struct watching* with, int level) {
  object made;
  fine(TRITONSERVER_InferenceTraceTensorNew(&made, level, 7, timed, tensor, given_back, with));
  return made;
}

/* "LEVEL MODEL WHAT": a request with a trace */
static void one(struct watching* with, const char* how) {
  char model[64] = "", what[64] = "";
  int level = 0;
  sscanf(how, "%d %63s %63[^|]", &level, model, what);
  with->left = 2;
  fine(TRITONSERVER_ServerInferAsync(server, request_for(model, what, with), trace_for(with, level)));
  wait_for(with);
}

/* what a trace says before it has a request, and children; the last is of TraceNew, which knows of no tensors */
static void alone(struct watching* with) {
  object trace, child;
  uint64_t id, second, parent, above;
  const char* context;
  char text[100], errors[2][200];
  trace = trace_for(with, TIMESTAMPS);
  fine(TRITONSERVER_InferenceTraceId(trace, &id));
  fine(TRITONSERVER_InferenceTraceParentId(trace, &parent));
  fine(TRITONSERVER_InferenceTraceContext(trace, &context));
  add(with, false, "%lu %lu %s '%s'", (unsigned long)id, (unsigned long)parent, of(trace, text, sizeof text), context);
  fine(TRITONSERVER_InferenceTraceReportActivity(trace, 5, "a \"name\""));
  fine(TRITONSERVER_InferenceTraceSetContext(trace, "{\"mine\": 1 }"));
  fine(TRITONSERVER_InferenceTraceReportActivity(trace, 6, "ANOTHER"));
  fine(TRITONSERVER_InferenceTraceSpawnChildTrace(trace, &child));
  fine(TRITONSERVER_InferenceTraceId(child, &second));
  fine(TRITONSERVER_InferenceTraceParentId(child, &above));
  add(with, false, "%d %d", second != id, above == id);
  fine(TRITONSERVER_InferenceTraceReportActivity(child, 7, "OF A CHILD"));
  with->left = 2;
  fine(TRITONSERVER_ServerInferAsync(server, request_for("identity", "", with), child));
  wait_for(with);
  said(errors[0], 200, TRITONSERVER_InferenceTraceDelete(child)); /* given_back() has done so */
  fine(TRITONSERVER_InferenceTraceDelete(trace));                  /* without a request nobody is told */
  said(errors[1], 200, TRITONSERVER_InferenceTraceId(trace, &id));
  add(with, false, "%s|%s", errors[0], errors[1]);
  fine(TRITONSERVER_InferenceTraceNew(&trace, TIMESTAMPS | TENSORS, 0, timed, given_back, with));
  with->left = 2;
  fine(TRITONSERVER_ServerInferAsync(server, request_for("identity", "", with), trace));
  wait_for(with);
  fine(TRITONSERVER_InferenceTraceNew(&trace, TIMESTAMPS, 0, NULL, NULL, NULL)); /* nobody wants to know */
  fine(TRITONSERVER_InferenceTraceReportActivity(trace, 8, "NOBODY"));
  with->left = 1;
  fine(TRITONSERVER_ServerInferAsync(server, request_for("identity", "", with), trace));
  wait_for(with);
}

/* what a trace is lent to ends with one release, whatever becomes of the request */
static void wrongly_used(struct watching* with) {
  char text[300];
  object trace = trace_for(with, TIMESTAMPS), call = request_for("identity", "sleep", NULL);
  uint64_t id;
  with->left = 1;
  said(text, sizeof text, TRITONSERVER_ServerInferAsync(server, call, trace)); /* it has no response callback */
  add(with, false, "%s", text);
  wait_for(with);
  said(text, sizeof text, TRITONSERVER_InferenceTraceId(trace, &id));
  add(with, false, "%s", text);
  said(text, sizeof text, TRITONSERVER_ServerInferAsync(server, call, trace)); /* a trace that is gone */
  add(with, false, "%s", text);
  fine(TRITONSERVER_InferenceRequestDelete(call));
  trace = trace_for(with, 0);
  call = request_for("identity", "", with);
  with->left = 2;
  fine(TRITONSERVER_ServerInferAsync(server, request_for("probe", "sleep", with), trace)); /* which waits for this request */
  said(text, sizeof text, TRITONSERVER_ServerInferAsync(server, call, trace));
  add(with, false, "%s", text);
  said(text, sizeof text, TRITONSERVER_InferenceTraceDelete(trace));
  add(with, false, "%s", text);
  fine(TRITONSERVER_InferenceRequestDelete(call));
}

void watched(object request, const char* how) {
  static struct watching left; /* by the last of wrongly_used(), whose request waits for this one to end */
  struct watching here = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, false, 0, 0, ""};
  if (strcmp(how, " left") == 0) {
    wait_for(&left);
    answer_text(request, left.text);
    return;
  }
  if (strcmp(how, " alone") == 0) {
    alone(&here);
  } else if (strcmp(how, " wrongly") == 0) {
    left = here;
    wrongly_used(&left);
    answer_text(request, left.text);
    return;
  } else {
    one(&here, how);
  }
  answer_text(request, here.text);
}
