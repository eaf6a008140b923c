/* Requests that the backend makes, of other models. The answer of one is that of the request that asks for it; those of several are
 * followed by more than a client may leave unread, sent where the responses are heard of. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "probe.h"

/* what `how` says of the functions beside allocate(), and what they were told */
static const char* queried;
static int preferred, attributed;

static error query(object allocator, void* with, const char* name, size_t* size, int* type, int64_t* id) {
  (void)allocator, (void)with;
  if (strcmp(name, "OUT") != 0 || *size != 4 || *type != 0) abort();
  if (strcmp(queried, "refused by the query") == 0) return TRITONSERVER_ErrorNew(UNAVAILABLE, "nowhere");
  *type = strcmp(queried, "wanted on a GPU") == 0 ? 2 : 1;
  *id = 0;
  return NULL;
}

static error attributes(object allocator, const char* name, object of, void* with, void* buffer_with) {
  size_t size;
  int type;
  (void)allocator, (void)with;
  fine(TRITONSERVER_BufferAttributesByteSize(of, &size));
  fine(TRITONSERVER_BufferAttributesMemoryType(of, &type));
  if (strcmp(name, "OUT") != 0 || buffer_with != &preferred || size != 4) abort();
  attributed = type;
  if (strcmp(queried, "refused by the attributes") == 0) return TRITONSERVER_ErrorNew(UNAVAILABLE, "not like that");
  return TRITONSERVER_BufferAttributesSetMemoryType(of, 1);
}

static error allocate(object allocator, const char* name, size_t size, int type, int64_t id, void* with, void** buffer,
                      void** buffer_with, int* actual, int64_t* actual_id) {
  (void)allocator, (void)name, (void)id, (void)with;
  preferred = type;
  *buffer = malloc(size + 1);
  *buffer_with = &preferred;
  *actual = type;
  *actual_id = 0;
  return NULL;
}

static error released_buffer(object allocator, void* buffer, void* with, size_t size, int type, int64_t id) {
  (void)allocator, (void)with, (void)size, (void)type, (void)id;
  free(buffer);
  return NULL;
}

static void released(object call, uint32_t flags, void* with) {
  (void)flags, (void)with;
  fine(TRITONSERVER_InferenceRequestDelete(call));
}

struct waiting { pthread_mutex_t lock; pthread_cond_t came; int done; char text[512]; };

static void responded(object response, uint32_t flags, void* with) {
  struct waiting* waiting = with;
  pthread_mutex_lock(&waiting->lock);
  if (response != NULL) {
    error failed = TRITONSERVER_InferenceResponseError(response);
    if (failed != NULL) {
      snprintf(waiting->text, sizeof waiting->text, "error: %s", TRITONSERVER_ErrorMessage(failed));
    } else {
      const char* name;
      const void* base;
      size_t size;
      int type;
      fine(TRITONSERVER_InferenceResponseOutput(response, 0, &name, NULL, NULL, NULL, &base, &size, &type, NULL, NULL));
      snprintf(waiting->text, sizeof waiting->text, "%s=%d", name, size == 4 ? *(const int32_t*)base : -1);
      if (strcmp(queried, "labelled") == 0) {
        char labels[4][100];
        int i;
        for (i = 0; i < 4; i++) {
          const char *label = "", *again;
          error none = TRITONSERVER_InferenceResponseOutputClassificationLabel(response, i == 3, i == 3 ? 0 : (size_t)i, &label);
          if (none != NULL) {
            said(labels[i], sizeof labels[i], none);
            continue;
          }
          fine(TRITONSERVER_InferenceResponseOutputClassificationLabel(response, 0, (size_t)i, &again));
          if (again != label) abort(); /* it stays as long as the response */
          snprintf(labels[i], sizeof labels[i], "%s", label == NULL ? "none" : label);
        }
        snprintf(waiting->text, sizeof waiting->text, "%s, %s, %s; %s", labels[0], labels[1], labels[2], labels[3]);
      } else if (*queried != 0) {
        snprintf(waiting->text, sizeof waiting->text, "allocated=%d attributed=%d type=%d", preferred, attributed, type);
      }
    }
    fine(TRITONSERVER_InferenceResponseDelete(response));
  }
  if (flags & 1) waiting->done = 1;
  pthread_cond_signal(&waiting->came);
  pthread_mutex_unlock(&waiting->lock);
}

void call(object request, const char* model, const char* how) {
  struct waiting waiting = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, ""};
  static object allocator;
  object made;
  int64_t shape[2] = {1, 1};
  int32_t value = 42;
  uint64_t priority = 0;
  error failed;
  if (allocator == NULL) fine(TRITONSERVER_ResponseAllocatorNew(&allocator, allocate, released_buffer, NULL));
  if (strncmp(how, "priority ", 9) == 0) {
    priority = (uint64_t)atoi(how + 9);
    how = "";
  }
  queried = strncmp(how, "raw", 3) == 0 ? "" : how;
  fine(TRITONSERVER_ResponseAllocatorSetQueryFunction(allocator, *queried == 0 ? NULL : query));
  fine(TRITONSERVER_ResponseAllocatorSetBufferAttributesFunction(allocator, *queried == 0 ? NULL : attributes));
  fine(TRITONSERVER_InferenceRequestNew(&made, server, model, -1));
  fine(TRITONSERVER_InferenceRequestSetPriorityUInt64(made, priority));
  if (strcmp(how, "raw") == 0 || strcmp(how, "raw and short") == 0) {
    char wrong[100];
    fine(TRITONSERVER_InferenceRequestAddRawInput(made, "any name"));
    said(wrong, sizeof wrong, TRITONSERVER_InferenceRequestAddRawInput(made, "another"));
    if (strncmp(wrong, "3 ", 2) != 0) abort();
    said(wrong, sizeof wrong, TRITONSERVER_InferenceRequestAddInput(made, "IN", 8, shape, 2));
    if (strncmp(wrong, "3 ", 2) != 0) abort();
    fine(TRITONSERVER_InferenceRequestAppendInputData(made, "any name", &value, 1, 0, 0));
    fine(TRITONSERVER_InferenceRequestAppendInputData(made, "any name", 1 + (char*)&value, how[3] == 0 ? 3 : 2, 0, 0));
  } else {
    fine(TRITONSERVER_InferenceRequestAddInput(made, "IN", 8, shape, 2));
    fine(TRITONSERVER_InferenceRequestAppendInputData(made, "IN", &value, 4, 0, 0));
  }
  fine(TRITONSERVER_InferenceRequestSetReleaseCallback(made, released, NULL));
  fine(TRITONSERVER_InferenceRequestSetResponseCallback(made, allocator, NULL, responded, &waiting));
  failed = TRITONSERVER_ServerInferAsync(server, made, NULL);
  if (failed != NULL) {
    said(waiting.text, sizeof waiting.text, failed);
    fine(TRITONSERVER_InferenceRequestDelete(made));
  } else {
    pthread_mutex_lock(&waiting.lock);
    while (!waiting.done) pthread_cond_wait(&waiting.came, &waiting.lock);
    pthread_mutex_unlock(&waiting.lock);
  }
  answer_text(request, waiting.text);
}

/* ------------------------------------------------------------ responses from a callback */

enum { CALLS = 2, PARTS = 3, ELEMENTS = 1 << 18 };

/* who sends: a thread, and the callback of each call; one at a time, however long it has to wait */
struct relaying { pthread_mutex_t lock; object factory; int left; };

static void relay_parts(struct relaying* relaying, int32_t first) {
  int64_t shape[2] = {1, ELEMENTS};
  int part, i, left;
  pthread_mutex_lock(&relaying->lock);
  for (part = 0; part < PARTS; part++) {
    object response;
    int32_t* to;
    fine(TRITONBACKEND_ResponseNewFromFactory(&response, relaying->factory));
    to = output(response, "OUT", 8, shape, 2, ELEMENTS * sizeof *to);
    for (i = 0; i < ELEMENTS; i++) to[i] = first + part;
    fine(TRITONBACKEND_ResponseSend(response, 0, NULL));
  }
  left = --relaying->left;
  pthread_mutex_unlock(&relaying->lock);
  if (left > 0) return;
  fine(TRITONBACKEND_ResponseFactorySendFlags(relaying->factory, 1));
  fine(TRITONBACKEND_ResponseFactoryDelete(relaying->factory));
  free(relaying);
}

static void* relay_on_thread(void* with) {
  relay_parts(with, 0);
  return NULL;
}

static void relay_responded(object response, uint32_t flags, void* with) {
  const void* base;
  if (response != NULL) {
    fine(TRITONSERVER_InferenceResponseError(response));
    fine(TRITONSERVER_InferenceResponseOutput(response, 0, NULL, NULL, NULL, NULL, &base, NULL, NULL, NULL, NULL));
    relay_parts(with, *(const int32_t*)base);
    fine(TRITONSERVER_InferenceResponseDelete(response));
  } else if (!(flags & 1)) {
    abort();
  }
}

void relay(object request) {
  struct relaying* relaying = malloc(sizeof *relaying);
  static object allocator;
  int64_t shape[2] = {1, 1};
  pthread_t thread;
  int i;
  if (allocator == NULL) fine(TRITONSERVER_ResponseAllocatorNew(&allocator, allocate, released_buffer, NULL));
  pthread_mutex_init(&relaying->lock, NULL);
  relaying->left = CALLS + 1;
  fine(TRITONBACKEND_ResponseFactoryNew(&relaying->factory, request));
  pthread_create(&thread, NULL, relay_on_thread, relaying);
  pthread_detach(thread);
  for (i = 1; i <= CALLS; i++) {
    object made;
    int32_t value = 10 * i; /* copied by the call */
    fine(TRITONSERVER_InferenceRequestNew(&made, server, "identity", -1));
    fine(TRITONSERVER_InferenceRequestAddInput(made, "IN", 8, shape, 2));
    fine(TRITONSERVER_InferenceRequestAppendInputData(made, "IN", &value, 4, 0, 0));
    fine(TRITONSERVER_InferenceRequestSetReleaseCallback(made, released, NULL));
    fine(TRITONSERVER_InferenceRequestSetResponseCallback(made, allocator, NULL, relay_responded, relaying));
    fine(TRITONSERVER_ServerInferAsync(server, made, NULL));
  }
}
