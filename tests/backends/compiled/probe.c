/* A backend of the tests. Each request says by its parameter `do` what is done with it; without one, its inputs are returned
 * as outputs of the names in which IN is replaced by OUT. What goes wrong in a call that should not is fatal. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "probe.h"

void fine(error failed) {
  if (failed == NULL) return;
  fprintf(stderr, "probe: %s\n", TRITONSERVER_ErrorMessage(failed));
  abort();
}

object server;
static object counter;
object manager;
static int model_state;

/* ------------------------------------------------------------ what a request says */

static const char* wanted(object request) {
  uint32_t count, i;
  fine(TRITONBACKEND_RequestParameterCount(request, &count));
  for (i = 0; i < count; i++) {
    const char* key;
    int type;
    const void* value;
    fine(TRITONBACKEND_RequestParameter(request, i, &key, &type, &value));
    if (strcmp(key, "do") == 0 && type == 0) return value;
  }
  return "";
}

static void set_all(object response, object request) {
  uint32_t count, i;
  fine(TRITONBACKEND_RequestParameterCount(request, &count));
  for (i = 0; i < count; i++) {
    const char* key;
    int type;
    const void* value;
    fine(TRITONBACKEND_RequestParameter(request, i, &key, &type, &value));
    if (type == 0) fine(TRITONBACKEND_ResponseSetStringParameter(response, key, value));
    if (type == 1) fine(TRITONBACKEND_ResponseSetIntParameter(response, key, *(const int64_t*)value));
    if (type == 2) fine(TRITONBACKEND_ResponseSetBoolParameter(response, key, *(const bool*)value));
    if (type == 4) fine(TRITONBACKEND_ResponseSetDoubleParameter(response, key, *(const double*)value));
  }
}

/* ------------------------------------------------------------ outputs */

void* output(object response, const char* name, int datatype, const int64_t* shape, uint32_t dims, uint64_t size) {
  object made;
  void* buffer;
  int type = 2; /* the GPU's is preferred, the CPU's is given */
  int64_t id = 3;
  fine(TRITONBACKEND_ResponseOutput(response, &made, name, datatype, shape, dims));
  fine(TRITONBACKEND_OutputBuffer(made, &buffer, size, &type, &id));
  if (type != 0 || id != 0) abort();
  return buffer;
}

static void copied(object response, object request) {
  uint32_t count, i, j, outputs;
  fine(TRITONBACKEND_RequestInputCount(request, &count));
  fine(TRITONBACKEND_RequestOutputCount(request, &outputs));
  for (i = 0; i < count; i++) {
    object input;
    const char* name;
    const int64_t* shape;
    const void* data;
    int datatype, type = 0;
    uint32_t dims, buffers;
    uint64_t size, part;
    int64_t id = 0;
    char renamed[64];
    fine(TRITONBACKEND_RequestInputByIndex(request, i, &input));
    fine(TRITONBACKEND_InputProperties(input, &name, &datatype, &shape, &dims, &size, &buffers));
    if (strncmp(name, "IN", 2) != 0) continue;
    snprintf(renamed, sizeof renamed, "OUT%s", name + 2);
    for (j = 0; j < outputs; j++) {
      const char* asked;
      fine(TRITONBACKEND_RequestOutputName(request, j, &asked));
      if (strcmp(asked, renamed) == 0) break;
    }
    if (j == outputs) continue;
    char* to = output(response, renamed, datatype, shape, dims, size);
    for (j = 0; j < buffers; j++) {
      fine(TRITONBACKEND_InputBuffer(input, j, &data, &part, &type, &id));
      memcpy(to, data, part);
      to += part;
    }
  }
}

void text_output(object response, const char* text) {
  int64_t shape[2] = {1, 1};
  uint32_t length = (uint32_t)strlen(text);
  char* to = output(response, "TEXT", BYTES, shape, 2, 4 + length);
  memcpy(to, &length, 4);
  memcpy(to + 4, text, length);
}

void answer_text(object request, const char* text) {
  object response;
  fine(TRITONBACKEND_ResponseNew(&response, request));
  text_output(response, text);
  fine(TRITONBACKEND_ResponseSend(response, 1, NULL));
}

static void failed_as(object request, int code, const char* text) {
  object response;
  error failed = TRITONSERVER_ErrorNew(code, text);
  fine(TRITONBACKEND_ResponseNew(&response, request));
  fine(TRITONBACKEND_ResponseSend(response, 1, failed));
  TRITONSERVER_ErrorDelete(failed);
}

/* the text of an error that a call must give */
void said(char* room, size_t size, error failed) {
  if (failed == NULL) {
    snprintf(room, size, "nothing");
  } else {
    snprintf(room, size, "%d %s", TRITONSERVER_ErrorCode(failed), TRITONSERVER_ErrorMessage(failed));
    TRITONSERVER_ErrorDelete(failed);
  }
}

/* ------------------------------------------------------------ things to do */

static void* later(void* factory) {
  object response;
  int64_t shape[2] = {1, 1};
  usleep(1000); /* so that Execute has often returned; both orders are right */
  fine(TRITONBACKEND_ResponseNewFromFactory(&response, factory));
  *(int32_t*)output(response, "OUT", 8, shape, 2, 4) = 77;
  fine(TRITONBACKEND_ResponseSend(response, 1, NULL));
  fine(TRITONBACKEND_ResponseFactoryDelete(factory));
  return NULL;
}

static void* stream(void* factory) {
  int64_t shape[2] = {1, 1};
  int32_t i;
  for (i = 0; i < 5; i++) {
    object response;
    fine(TRITONBACKEND_ResponseNewFromFactory(&response, factory));
    *(int32_t*)output(response, "OUT", 8, shape, 2, 4) = i;
    fine(TRITONBACKEND_ResponseSend(response, 0, NULL));
  }
  fine(TRITONBACKEND_ResponseFactorySendFlags(factory, 1));
  fine(TRITONBACKEND_ResponseFactoryDelete(factory));
  return NULL;
}

static void on_thread(object request, void* (*what)(void*)) {
  pthread_t thread;
  object factory;
  fine(TRITONBACKEND_ResponseFactoryNew(&factory, request));
  pthread_create(&thread, NULL, what, factory);
  pthread_detach(thread);
}

static void wrongly(object request) {
  object response, input, message;
  void* buffer;
  const void* data;
  const char* id;
  uint64_t size;
  int type = 0;
  int64_t number = 0;
  char texts[7][300], all[2400];
  int64_t shape[2] = {1, 1};
  object made;
  fine(TRITONBACKEND_RequestInput(request, "IN", &input));
  fine(TRITONBACKEND_ResponseNew(&response, request));
  fine(TRITONBACKEND_ResponseOutput(response, &made, "OUT", 8, shape, 2));
  said(texts[0], 300, TRITONBACKEND_RequestId(response, &id));         /* of another type */
  said(texts[1], 300, TRITONBACKEND_RequestId((object)&type, &id));    /* an address */
  said(texts[2], 300, TRITONBACKEND_RequestId(NULL, &id));
  fine(TRITONSERVER_MessageNewFromSerializedJson(&message, "{}", 2));
  fine(TRITONSERVER_MessageDelete(message));
  said(texts[3], 300, TRITONSERVER_MessageDelete(message)); /* twice */
  object gone;
  fine(TRITONBACKEND_ResponseNew(&gone, request));
  error failed = TRITONSERVER_ErrorNew(INVALID_ARG, "as it should");
  *(int32_t*)(TRITONBACKEND_OutputBuffer(made, &buffer, 4, &type, &number) == NULL ? buffer : abort) = 5;
  fine(TRITONBACKEND_ResponseSend(response, 1, failed));
  TRITONSERVER_ErrorDelete(failed);
  said(texts[4], 300, TRITONBACKEND_ResponseSend(response, 1, NULL)); /* sent before */
  said(texts[5], 300, TRITONBACKEND_OutputBuffer(made, &buffer, 4, &type, &number));
  fine(TRITONBACKEND_RequestRelease(request, 1));
  said(texts[6], 300, TRITONBACKEND_RequestRelease(request, 1));
  (void)gone;
  snprintf(all, sizeof all, "|%s|%s|%s|%s|%s|%s|%s|", texts[0], texts[1], texts[2], texts[3], texts[4], texts[5], texts[6]);
  fine(TRITONSERVER_LogMessage(0, __FILE__, __LINE__, all));
  failed = TRITONBACKEND_InputBuffer(input, 0, &data, &size, &type, &number);
  if (failed == NULL) abort(); /* its request is released */
  TRITONSERVER_ErrorDelete(failed);
}

static void count(object request) {
  double value;
  char text[64];
  fine(TRITONSERVER_MetricIncrement(counter, 2));
  fine(TRITONSERVER_MetricValue(counter, &value));
  snprintf(text, sizeof text, "%g", value);
  answer_text(request, text);
}

static void ask(object request) {
  const char* id;
  uint64_t correlation, timeout;
  uint32_t flags, one, many;
  bool cancelled, ready;
  object none;
  char text[512], missing[200];
  void* memory;
  int type;
  fine(TRITONBACKEND_RequestId(request, &id));
  fine(TRITONBACKEND_RequestCorrelationId(request, &correlation));
  fine(TRITONBACKEND_RequestFlags(request, &flags));
  fine(TRITONBACKEND_InferenceRequestTimeoutMicroseconds(request, &timeout));
  fine(TRITONBACKEND_RequestIsCancelled(request, &cancelled));
  fine(TRITONSERVER_ServerModelIsReady(server, "identity", -1, &ready));
  fine(TRITONSERVER_ServerModelTransactionProperties(server, "identity", -1, &one, NULL));
  fine(TRITONSERVER_ServerModelTransactionProperties(server, "stream", 1, &many, NULL));
  for (type = 0; type < 2; type++) { /* the CPU's, and what is to be page-locked */
    fine(TRITONBACKEND_MemoryManagerAllocate(manager, &memory, type, 0, 100));
    memset(memory, 1, 100);
    fine(TRITONBACKEND_MemoryManagerFree(manager, memory, type, 0));
  }
  said(missing, sizeof missing, TRITONBACKEND_MemoryManagerAllocate(manager, &memory, 2, 0, 100));
  if (strncmp(missing, "5 ", 2) != 0) abort(); /* the GPU's */
  said(missing, sizeof missing, TRITONSERVER_ServerNew(&none, NULL));
  snprintf(text, sizeof text, "id=%s correlation=%lu flags=%u timeout=%lu cancelled=%d ready=%d properties=%u,%u | %s", id,
           (unsigned long)correlation, flags, (unsigned long)timeout, cancelled, ready, one, many,
           missing);
  answer_text(request, text);
}

static void accumulate(object request) {
  object input, state, response;
  const void *data, *before;
  uint64_t size;
  int type = 0;
  int64_t id = 0, shape[2] = {1, 1};
  int32_t total;
  void* buffer;
  fine(TRITONBACKEND_RequestInput(request, "IN", &input));
  fine(TRITONBACKEND_InputBuffer(input, 0, &data, &size, &type, &id));
  fine(TRITONBACKEND_RequestInput(request, "SUM_IN", &input));
  fine(TRITONBACKEND_InputBuffer(input, 0, &before, &size, &type, &id));
  total = *(const int32_t*)data + *(const int32_t*)before;
  fine(TRITONBACKEND_ResponseNew(&response, request));
  *(int32_t*)output(response, "OUT", 8, shape, 2, 4) = total;
  fine(TRITONBACKEND_StateNew(&state, request, "SUM_OUT", 8, shape, 2));
  fine(TRITONBACKEND_StateBuffer(state, &buffer, 4, &type, &id));
  *(int32_t*)buffer = total;
  fine(TRITONBACKEND_StateUpdate(state));
  fine(TRITONBACKEND_ResponseSend(response, 1, NULL));
}

/* answered at once and released later, as a backend may */
static object kept;
static const int32_t* kept_data;

static void keep(object request) {
  object input, response;
  uint64_t size;
  int type = 0;
  int64_t id = 0, shape[2] = {1, 1};
  fine(TRITONBACKEND_RequestInput(request, "IN", &input));
  fine(TRITONBACKEND_InputBuffer(input, 0, (const void**)&kept_data, &size, &type, &id));
  fine(TRITONBACKEND_ResponseNew(&response, request));
  *(int32_t*)output(response, "OUT", 8, shape, 2, 4) = kept_data[0];
  fine(TRITONBACKEND_ResponseSend(response, 1, NULL));
  kept = request;
}

static void look_at_kept(object request) {
  object response;
  int64_t shape[2] = {1, 1};
  fine(TRITONBACKEND_ResponseNew(&response, request));
  *(int32_t*)output(response, "OUT", 8, shape, 2, 4) = kept_data[0];
  fine(TRITONBACKEND_ResponseSend(response, 1, NULL));
  fine(TRITONBACKEND_RequestRelease(kept, 1));
}

static void wait_for_cancel(object request) {
  bool cancelled = false;
  while (!cancelled) {
    fine(TRITONBACKEND_RequestIsCancelled(request, &cancelled));
    usleep(1000);
  }
  fine(TRITONSERVER_LogMessage(0, __FILE__, __LINE__, "the request was cancelled"));
  failed_as(request, CANCELLED, "cancelled");
}

static void crash(const char* how) {
  fprintf(stderr, "probe: about to %s\n", how);
  if (strcmp(how, "segfault") == 0) *(volatile int*)8 = 1;
  if (strcmp(how, "abort") == 0) abort();
  if (strcmp(how, "exit") == 0) exit(3);
  if (strcmp(how, "follow") == 0) return;
  if (strcmp(how, "tear the heap") == 0) {
    volatile size_t* block = malloc(100);
    block[-1] = 7; /* its size, as the allocator keeps it */
    free((void*)block);
  }
  for (;;) pause();
}

/* ------------------------------------------------------------ what the server calls */

error TRITONBACKEND_Initialize(object backend) {
  uint32_t major, minor;
  object config;
  const char *text, *name, *folder;
  size_t size;
  int type;
  fine(TRITONBACKEND_ApiVersion(&major, &minor));
  fine(TRITONBACKEND_BackendName(backend, &name));
  fine(TRITONBACKEND_BackendArtifacts(backend, &type, &folder));
  fine(TRITONBACKEND_BackendConfig(backend, &config));
  fine(TRITONSERVER_MessageSerializeToJson(config, &text, &size));
  fine(TRITONBACKEND_BackendMemoryManager(backend, &manager));
  fprintf(stderr, "probe: backend %s %u.%u shown=%s %s\n", name, major, minor, shown(), text);
  fine(TRITONBACKEND_BackendSetState(backend, &model_state));
  if (strcmp(name, "blocking") == 0) fine(TRITONBACKEND_BackendSetExecutionPolicy(backend, 1));
  return NULL;
}

error TRITONBACKEND_GetBackendAttribute(object backend, object attribute) {
  void* state;
  fine(TRITONBACKEND_BackendState(backend, &state));
  if (state != &model_state) abort();
  const char* name;
  fine(TRITONBACKEND_BackendName(backend, &name));
  if (strcmp(name, "blocking") != 0) fine(TRITONBACKEND_BackendAttributeSetParallelModelInstanceLoading(attribute, true));
  return TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(attribute, 1, 2, NULL, 0);
}

error TRITONBACKEND_ModelInitialize(object model) {
  static const char COMPLETE[] =
      "{\"max_batch_size\":8,\"input\":[{\"name\":\"IN\",\"data_type\":\"TYPE_INT32\",\"dims\":[-1]}],"
      "\"output\":[{\"name\":\"OUT\",\"data_type\":\"TYPE_INT32\",\"dims\":[-1]}],\"dynamic_batching\":{}}";
  object config;
  const char *text, *name;
  size_t size;
  bool complete;
  fine(TRITONBACKEND_ModelServer(model, &server));
  fine(TRITONBACKEND_ModelName(model, &name));
  if (strcmp(name, "refused") == 0) return TRITONSERVER_ErrorNew(INVALID_ARG, "the probe does not like this model");
  fine(TRITONBACKEND_ModelAutoCompleteConfig(model, &complete));
  fine(TRITONBACKEND_ModelConfig(model, 1, &config));
  fine(TRITONSERVER_MessageSerializeToJson(config, &text, &size));
  bool empty = strstr(text, "\"input\":[]") != NULL || strstr(text, "\"input\": []") != NULL;
  fine(TRITONSERVER_MessageDelete(config));
  if (complete && empty) {
    fine(TRITONSERVER_MessageNewFromSerializedJson(&config, COMPLETE, sizeof COMPLETE - 1));
    fine(TRITONBACKEND_ModelSetConfig(model, 1, config));
    fine(TRITONSERVER_MessageDelete(config));
  }
  return NULL;
}

error TRITONBACKEND_ModelInstanceInitialize(object instance) {
  object family, model, label;
  const char* name;
  fine(TRITONBACKEND_ModelInstanceModel(instance, &model));
  fine(TRITONBACKEND_ModelName(model, &name));
  if (strncmp(name, "loads ", 6) == 0) loads(instance, name + 6);
  bool passive;
  const char* own;
  fine(TRITONBACKEND_ModelInstanceIsPassive(instance, &passive));
  fine(TRITONBACKEND_ModelInstanceName(instance, &own));
  if (passive) fprintf(stderr, "probe: passive %s\n", own);
  label = TRITONSERVER_ParameterNew("model", 0, name);
  fine(TRITONSERVER_MetricFamilyNew(&family, 0, "probe_total", "what the probe has counted"));
  fine(TRITONSERVER_MetricNew(&counter, family, &label, 1));
  TRITONSERVER_ParameterDelete(label);
  return NULL;
}

error TRITONBACKEND_ModelInstanceFinalize(object instance) {
  (void)instance;
  return TRITONSERVER_LogMessage(1, __FILE__, __LINE__, "the probe's instance ends");
}

error TRITONBACKEND_ModelInstanceExecute(object instance, object* requests, const uint32_t count_) {
  uint32_t i;
  if (strcmp(wanted(requests[0]), "refuse the rest") == 0 && count_ > 1) answer_text(requests[0], "the first");
  if (strcmp(wanted(requests[0]), "refuse the answered") == 0) answer_at_length(requests[0]);
  if (strncmp(wanted(requests[0]), "refuse ", 7) == 0) return TRITONSERVER_ErrorNew(UNAVAILABLE, "not today");
  for (i = 0; i < count_; i++) {
    object request = requests[i], response;
    const char* what = wanted(request);
    requests[i] = NULL; /* the array is the server's, and may be written to */
    if (strcmp(what, "crash at the second") == 0) {
      static int times;
      if (times++ == 2) crash("segfault"); /* two requests are executed together */
    } else if (strncmp(what, "crash ", 6) == 0) {
      crash(what + 6);
    }
    if (strcmp(what, "sleep") == 0) usleep(500000);
    if (strncmp(what, "sleep ", 6) == 0) usleep(1000 * atoi(what + 6));
    if (strcmp(what, "crash follow") == 0) fprintf(stderr, "%c", *(char*)request);
    if (strcmp(what, "wrongly") == 0) {
      wrongly(request);
      continue;
    }
    if (strcmp(what, "keep") == 0) {
      keep(request);
      continue;
    }
    if (strncmp(what, "stated", 6) == 0) {
      stated(instance, request, what + 6);
      continue;
    }
    if (strcmp(what, "again") == 0) {
      if (again(request)) continue;
    } else if (strncmp(what, "count down", 10) == 0) {
      count_down(request, what + 10);
      continue;
    } else if (strcmp(what, "later") == 0) {
      on_thread(request, later);
    } else if (strcmp(what, "stream") == 0) {
      on_thread(request, stream);
    } else if (strcmp(what, "fail") == 0) {
      failed_as(request, NOT_FOUND, "the probe has not found it");
    } else if (strcmp(what, "nothing") == 0) {
      /* released, and never answered */
    } else if (strcmp(what, "short") == 0 || strcmp(what, "no string") == 0) {
      int64_t shape[2] = {1, 4};
      fine(TRITONBACKEND_ResponseNew(&response, request));
      if (what[0] == 's') memset(output(response, "OUT", 8, shape, 2, 8), 0, 8);
      if (what[0] == 'n') memset(output(response, "TEXT", BYTES, shape, 1, 6), 9, 6);
      fine(TRITONBACKEND_ResponseSend(response, 1, NULL));
    } else if (strncmp(what, "call ", 5) == 0) {
      call(request, what + 5, "");
    } else if (strcmp(what, "relay") == 0) {
      relay(request);
    } else if (strncmp(what, "priority ", 9) == 0) {
      call(request, "levels", what);
    } else if (strncmp(what, "call, ", 6) == 0) {
      call(request, strcmp(what + 6, "labelled") == 0 ? "labelled" : "identity", what + 6);
    } else if (strcmp(what, "every") == 0) {
      every(instance, request);
    } else if (strncmp(what, "server says", 11) == 0) {
      server_says(request, what + 11);
    } else if (strncmp(what, "hold", 4) == 0) {
      hold(instance, request, atoi(what + 4));
    } else if (strncmp(what, "meet", 4) == 0) {
      meet(instance, request, what);
    } else if (strcmp(what, "shown") == 0) {
      answer_text(request, shown());
    } else if (strcmp(what, "count") == 0) {
      count(request);
    } else if (strncmp(what, "traced", 6) == 0) {
      traced(request, what + 6);
    } else if (strncmp(what, "wild", 4) == 0) {
      wild(instance, request, what + 4);
    } else if (strncmp(what, "watched", 7) == 0) {
      watched(request, what + 7);
    } else if (strcmp(what, "ask") == 0) {
      ask(request);
    } else if (strcmp(what, "look at kept") == 0) {
      look_at_kept(request);
    } else if (strncmp(what, "memory ", 7) == 0) {
      memory(request, what);
    } else if (strcmp(what, "many dimensions") == 0) {
      int64_t shape[65];
      int d;
      for (d = 0; d < 65; d++) shape[d] = 1;
      fine(TRITONBACKEND_ResponseNew(&response, request));
      memset(output(response, "TEXT", BYTES, shape, 65, 4), 0, 4);
      fine(TRITONBACKEND_ResponseSend(response, 1, NULL));
    } else if (strcmp(what, "accumulate") == 0) {
      accumulate(request);
    } else if (strcmp(what, "measured") == 0) {
      measured(instance, request);
    } else if (strcmp(what, "wait for cancel") == 0) {
      wait_for_cancel(request);
    } else {
      fine(TRITONBACKEND_ResponseNew(&response, request));
      copied(response, request);
      set_all(response, request);
      if (strcmp(what, "batch") == 0) fine(TRITONBACKEND_ResponseSetIntParameter(response, "batch", count_));
      fine(TRITONBACKEND_ResponseSend(response, 1, NULL));
    }
    fine(TRITONBACKEND_RequestRelease(request, 1));
  }
  return NULL;
}
