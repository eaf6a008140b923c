/* What no other file here calls of the interface, with what each call must give. The first that gives something else is the answer. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "probe.h"

static char wrong[300];

static void check(bool right, const char* what, int line) {
  if (!right && wrong[0] == 0) snprintf(wrong, sizeof wrong, "line %d: %s", line, what);
}
#define CHECK(WHAT) check((WHAT), #WHAT, __LINE__)
#define SAME(TEXT, WHAT) check(strcmp((TEXT), (WHAT)) == 0, #WHAT, __LINE__)

static bool fails(error failed, int code) {
  bool right = failed != NULL && TRITONSERVER_ErrorCode(failed) == code;
  TRITONSERVER_ErrorDelete(failed);
  return right;
}

/* ------------------------------------------------------------ values */

static void values(void) {
  uint32_t major, minor;
  size_t size;
  int type;
  int64_t id;
  void* handle = NULL;
  char cuda[64] = {7};
  object attributes, parameter;
  error failed = TRITONSERVER_ErrorNew(UNAVAILABLE, "");
  fine(TRITONSERVER_ApiVersion(&major, &minor));
  CHECK(major == 1 && minor > 0);
  SAME("Unavailable", TRITONSERVER_ErrorCodeString(failed));
  TRITONSERVER_ErrorDelete(failed);
  SAME("FP16", TRITONSERVER_DataTypeString(10));
  CHECK(TRITONSERVER_DataTypeByteSize(10) == 2 && TRITONSERVER_DataTypeByteSize(BYTES) == 0);
  CHECK(TRITONSERVER_StringToDataType("INT64") == 9 && TRITONSERVER_StringToDataType("NONE") == 0);
  SAME("CPU_PINNED", TRITONSERVER_MemoryTypeString(1));
  SAME("BOOL", TRITONSERVER_ParameterTypeString(2));
  SAME("GPU", TRITONSERVER_InstanceGroupKindString(2));
  SAME("TIMESTAMPS", TRITONSERVER_InferenceTraceLevelString(4));
  SAME("COMPUTE_END", TRITONSERVER_InferenceTraceActivityString(5));
  CHECK(TRITONSERVER_LogIsEnabled(2) && !TRITONSERVER_LogIsEnabled(9));
  parameter = TRITONSERVER_ParameterBytesNew("file", "abc", 3);
  CHECK(parameter != NULL);
  TRITONSERVER_ParameterDelete(parameter);
  fine(TRITONSERVER_BufferAttributesNew(&attributes));
  fine(TRITONSERVER_BufferAttributesSetByteSize(attributes, 123));
  fine(TRITONSERVER_BufferAttributesSetMemoryType(attributes, 2));
  fine(TRITONSERVER_BufferAttributesSetMemoryTypeId(attributes, 4));
  fine(TRITONSERVER_BufferAttributesSetCudaIpcHandle(attributes, cuda));
  fine(TRITONSERVER_BufferAttributesByteSize(attributes, &size));
  fine(TRITONSERVER_BufferAttributesMemoryType(attributes, &type));
  fine(TRITONSERVER_BufferAttributesMemoryTypeId(attributes, &id));
  fine(TRITONSERVER_BufferAttributesCudaIpcHandle(attributes, &handle));
  CHECK(size == 123 && type == 2 && id == 4 && handle == cuda);
  fine(TRITONSERVER_BufferAttributesDelete(attributes));
}

static void metrics(void) {
  object family, metric, arguments, other;
  const double buckets[2] = {1, 10};
  int kind;
  double value;
  fine(TRITONSERVER_MetricFamilyNew(&family, 2, "probe_durations", "how long"));
  fine(TRITONSERVER_GetMetricFamilyKind(family, &kind));
  CHECK(kind == 2);
  fine(TRITONSERVER_MetricArgsNew(&arguments));
  fine(TRITONSERVER_MetricArgsSetHistogram(arguments, buckets, 2));
  fine(TRITONSERVER_MetricNewWithArgs(&metric, family, NULL, 0, arguments));
  fine(TRITONSERVER_MetricArgsDelete(arguments));
  fine(TRITONSERVER_GetMetricKind(metric, &kind));
  CHECK(kind == 2);
  fine(TRITONSERVER_MetricObserve(metric, 5));
  CHECK(fails(TRITONSERVER_MetricValue(metric, &value), UNSUPPORTED));
  CHECK(fails(TRITONSERVER_MetricIncrement(metric, 1), UNSUPPORTED));
  CHECK(fails(TRITONSERVER_MetricSet(metric, 1), UNSUPPORTED));
  CHECK(fails(TRITONSERVER_MetricFamilyNew(&other, 1, "probe_durations", "as another kind"), INVALID_ARG));
  CHECK(fails(TRITONSERVER_MetricNew(&other, family, NULL, 0), INVALID_ARG)); /* a histogram without buckets */
  fine(TRITONSERVER_MetricFamilyNew(&other, 1, "probe_level", "how high"));
  object level;
  fine(TRITONSERVER_MetricNew(&level, other, NULL, 0));
  fine(TRITONSERVER_MetricSet(level, 7));
  fine(TRITONSERVER_MetricValue(level, &value));
  CHECK(value == 7);
  CHECK(fails(TRITONSERVER_MetricObserve(level, 1), UNSUPPORTED));
  fine(TRITONSERVER_MetricDelete(level));
  fine(TRITONSERVER_MetricFamilyDelete(other));
  CHECK(fails(TRITONSERVER_MetricSet(level, 1), INVALID_ARG));
  fine(TRITONSERVER_MetricFamilyNew(&other, 0, "probe_seen", "how many"));
  fine(TRITONSERVER_MetricNew(&level, other, NULL, 0));
  CHECK(fails(TRITONSERVER_MetricIncrement(level, -1), INVALID_ARG));
  CHECK(fails(TRITONSERVER_MetricSet(level, 1), UNSUPPORTED));
  fine(TRITONSERVER_MetricDelete(level));
  fine(TRITONSERVER_MetricFamilyDelete(other));
  (void)metric; /* it stays, for whoever reads the metrics */
}

/* ------------------------------------------------------------ backend, model, instance */

static void instance_and_model(object instance) {
  object model, backend, policy, usage;
  const char *name, *path, *json, *kind;
  uint64_t version;
  uint32_t count;
  int number, policy_number;
  int32_t device;
  bool passive;
  size_t size;
  int64_t id;
  void* state;
  static int mine;
  fine(TRITONBACKEND_ModelInstanceModel(instance, &model));
  fine(TRITONBACKEND_ModelBackend(model, &backend));
  fine(TRITONBACKEND_BackendSetExecutionPolicy(backend, 1));
  fine(TRITONBACKEND_BackendExecutionPolicy(backend, &policy_number));
  CHECK(policy_number == 1);
  fine(TRITONBACKEND_BackendSetExecutionPolicy(backend, 0));
  fine(TRITONBACKEND_ModelVersion(model, &version));
  CHECK(version == 1);
  fine(TRITONBACKEND_ModelRepository(model, &number, &path));
  CHECK(number == 0 && strcmp(path + strlen(path) - 6, "/every") == 0);
  fine(TRITONBACKEND_ModelSetState(model, &mine));
  fine(TRITONBACKEND_ModelState(model, &state));
  CHECK(state == &mine);
  fine(TRITONBACKEND_ModelInstanceSetState(instance, &wrong));
  fine(TRITONBACKEND_ModelInstanceState(instance, &state));
  CHECK(state == &wrong);
  fine(TRITONBACKEND_ModelInstanceName(instance, &name));
  CHECK(strncmp(name, "every", 5) == 0);
  fine(TRITONBACKEND_ModelInstanceKind(instance, &number));
  fine(TRITONBACKEND_ModelInstanceDeviceId(instance, &device));
  fine(TRITONBACKEND_ModelInstanceIsPassive(instance, &passive));
  CHECK(number == 1 && device == 0 && !passive);
  fine(TRITONBACKEND_ModelInstanceHostPolicy(instance, &policy));
  fine(TRITONSERVER_MessageSerializeToJson(policy, &json, &size));
  CHECK(strstr(json, "\"mine\"") != NULL);
  fine(TRITONBACKEND_ModelInstanceProfileCount(instance, &count));
  CHECK(count == 2);
  fine(TRITONBACKEND_ModelInstanceProfileName(instance, 1, &name));
  SAME("second", name);
  CHECK(fails(TRITONBACKEND_ModelInstanceProfileName(instance, 2, &name), INVALID_ARG));
  fine(TRITONBACKEND_ModelInstanceSecondaryDeviceCount(instance, &count));
  CHECK(count == 1);
  fine(TRITONBACKEND_ModelInstanceSecondaryDeviceProperties(instance, 0, &kind, &id));
  CHECK(strcmp(kind, "KIND_NVDLA") == 0 && id == 3);
  fine(TRITONSERVER_BufferAttributesNew(&usage));
  fine(TRITONSERVER_BufferAttributesSetMemoryType(usage, 2));
  fine(TRITONSERVER_BufferAttributesSetByteSize(usage, 1000));
  fine(TRITONBACKEND_ModelReportMemoryUsage(model, &usage, 1));
  fine(TRITONBACKEND_ModelInstanceReportMemoryUsage(instance, &usage, 1));
  fine(TRITONSERVER_BufferAttributesDelete(usage));
}

/* ------------------------------------------------------------ requests and responses */

static void request_and_response(object request) {
  const char *text, *name;
  uint64_t size, correlation, dims;
  uint32_t rank, buffers;
  const int64_t* shape;
  const void *data, *other;
  int type = 2, datatype;
  int64_t id = 5;
  size_t bytes = 100;
  bool cancelled = true;
  object input, attributes, response, made, factory, state;
  int64_t one[2] = {1, 1};
  void* buffer;
  fine(TRITONBACKEND_RequestCorrelationIdString(request, &text));
  SAME("a sequence", text);
  CHECK(fails(TRITONBACKEND_RequestCorrelationId(request, &correlation), INVALID_ARG));
  fine(TRITONBACKEND_RequestInputName(request, 0, &name));
  SAME("IN", name);
  fine(TRITONBACKEND_RequestOutputBufferProperties(request, "OUT", &bytes, &type, &id));
  CHECK(type == 0 && id == 0);
  fine(TRITONBACKEND_RequestInput(request, "IN", &input));
  fine(TRITONBACKEND_InputPropertiesForHostPolicy(input, "mine", &name, &datatype, &shape, &rank, &size, &buffers));
  CHECK(datatype == 8 && rank == 2 && shape[1] == 1 && size == 4 && buffers == 1);
  fine(TRITONBACKEND_InputBufferForHostPolicy(input, "mine", 0, &data, &size, &type, &id));
  CHECK(size == 4 && *(const int32_t*)data == 5);
  fine(TRITONBACKEND_InputBufferAttributes(input, 0, &other, &attributes));
  fine(TRITONSERVER_BufferAttributesByteSize(attributes, &bytes));
  CHECK(other == data && bytes == 4);
  fine(TRITONBACKEND_ResponseNew(&response, request));
  fine(TRITONBACKEND_ResponseOutput(response, &made, "OUT", 8, one, 2));
  fine(TRITONBACKEND_OutputBuffer(made, &buffer, 4, &type, &id));
  fine(TRITONBACKEND_OutputBufferAttributes(made, &attributes));
  fine(TRITONSERVER_BufferAttributesByteSize(attributes, &bytes));
  CHECK(bytes == 4);
  fine(TRITONBACKEND_InferenceResponseOutput(response, 0, &name, &datatype, &shape, &dims));
  CHECK(strcmp(name, "OUT") == 0 && datatype == 8 && dims == 2 && shape[0] == 1);
  fine(TRITONBACKEND_InferenceResponseOutputByName(response, "OUT", &datatype, &shape, &dims));
  CHECK(fails(TRITONBACKEND_InferenceResponseOutputByName(response, "NONE", &datatype, &shape, &dims), NOT_FOUND));
  fine(TRITONBACKEND_ResponseDelete(response)); /* it is never sent */
  fine(TRITONBACKEND_ResponseFactoryNew(&factory, request));
  fine(TRITONBACKEND_ResponseFactoryIsCancelled(factory, &cancelled));
  CHECK(!cancelled);
  fine(TRITONBACKEND_ResponseFactoryDelete(factory));
  fine(TRITONBACKEND_StateNew(&state, request, "NOWHERE", 8, one, 2));
  fine(TRITONBACKEND_StateBuffer(state, &buffer, 4, &type, &id));
  fine(TRITONBACKEND_StateBufferAttributes(state, &attributes));
  fine(TRITONSERVER_BufferAttributesByteSize(attributes, &bytes));
  CHECK(bytes == 4);
}

/* ------------------------------------------------------------ a request of its own */

struct answered { pthread_mutex_t lock; pthread_cond_t came; bool done; };

static error allocate(object allocator, const char* name, size_t size, int type, int64_t id, void* with, void** buffer,
                      void** buffer_with, int* actual, int64_t* actual_id) {
  (void)allocator, (void)name, (void)type, (void)id, (void)with;
  *buffer = malloc(size + 1);
  *buffer_with = NULL;
  *actual = 0;
  *actual_id = 0;
  return NULL;
}

static error give_back(object allocator, void* buffer, void* with, size_t size, int type, int64_t id) {
  (void)allocator, (void)with, (void)size, (void)type, (void)id;
  free(buffer);
  return NULL;
}

static void answered(object response, uint32_t flags, void* with) {
  struct answered* waiting = with;
  const char *id, *model, *key;
  int64_t version;
  uint32_t count, i, found = 0;
  int type;
  const void* value;
  pthread_mutex_lock(&waiting->lock);
  if (response != NULL) {
    CHECK(TRITONSERVER_InferenceResponseError(response) == NULL);
    fine(TRITONSERVER_InferenceResponseId(response, &id));
    SAME("named", id);
    fine(TRITONSERVER_InferenceResponseModel(response, &model, &version));
    CHECK(strcmp(model, "probe") == 0);
    fine(TRITONSERVER_InferenceResponseOutputCount(response, &count));
    CHECK(count == 1);
    fine(TRITONSERVER_InferenceResponseParameterCount(response, &count));
    for (i = 0; i < count; i++) {
      fine(TRITONSERVER_InferenceResponseParameter(response, i, &key, &type, &value));
      if (strcmp(key, "text") == 0) found += strcmp(value, "of mine") == 0;
      if (strcmp(key, "number") == 0) found += *(const int64_t*)value == -9;
      if (strcmp(key, "truth") == 0) found += *(const bool*)value;
      if (strcmp(key, "real") == 0) found += *(const double*)value == 0.25;
    }
    CHECK(found == 4);
    fine(TRITONSERVER_InferenceResponseDelete(response));
  }
  if (flags & 1) waiting->done = true;
  pthread_cond_signal(&waiting->came);
  pthread_mutex_unlock(&waiting->lock);
}

static void own_request(void) {
  struct answered waiting = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};
  object allocator, call, attributes;
  const int64_t shape[2] = {1, 2};
  const int32_t one = 1, two = 2;
  const char* text;
  uint64_t number;
  uint32_t small;
  bool cancelled = true, live = false;
  fine(TRITONSERVER_ServerIsLive(server, &live));
  CHECK(live);
  fine(TRITONSERVER_ResponseAllocatorNew(&allocator, allocate, give_back, NULL));
  fine(TRITONSERVER_InferenceRequestNew(&call, server, "probe", -1));
  fine(TRITONSERVER_InferenceRequestSetId(call, "named"));
  fine(TRITONSERVER_InferenceRequestId(call, &text));
  SAME("named", text);
  fine(TRITONSERVER_InferenceRequestSetCorrelationIdString(call, "words"));
  fine(TRITONSERVER_InferenceRequestCorrelationIdString(call, &text));
  SAME("words", text);
  fine(TRITONSERVER_InferenceRequestSetCorrelationId(call, 0));
  fine(TRITONSERVER_InferenceRequestCorrelationId(call, &number));
  CHECK(number == 0);
  fine(TRITONSERVER_InferenceRequestSetFlags(call, 1));
  fine(TRITONSERVER_InferenceRequestFlags(call, &small));
  CHECK(small == 1);
  fine(TRITONSERVER_InferenceRequestSetFlags(call, 0));
  fine(TRITONSERVER_InferenceRequestSetPriority(call, 3));
  fine(TRITONSERVER_InferenceRequestPriority(call, &small));
  CHECK(small == 3);
  fine(TRITONSERVER_InferenceRequestSetPriorityUInt64(call, 0));
  fine(TRITONSERVER_InferenceRequestPriorityUInt64(call, &number));
  CHECK(number == 0);
  fine(TRITONSERVER_InferenceRequestSetTimeoutMicroseconds(call, 60000000));
  fine(TRITONSERVER_InferenceRequestTimeoutMicroseconds(call, &number));
  CHECK(number == 60000000);
  fine(TRITONSERVER_InferenceRequestSetStringParameter(call, "text", "of mine"));
  fine(TRITONSERVER_InferenceRequestSetIntParameter(call, "number", -9));
  fine(TRITONSERVER_InferenceRequestSetBoolParameter(call, "truth", true));
  fine(TRITONSERVER_InferenceRequestSetDoubleParameter(call, "real", 0.25));
  fine(TRITONSERVER_InferenceRequestAddInput(call, "GONE", 8, shape, 2));
  fine(TRITONSERVER_InferenceRequestRemoveInput(call, "GONE"));
  fine(TRITONSERVER_InferenceRequestAddInput(call, "GONE", 8, shape, 2));
  fine(TRITONSERVER_InferenceRequestRemoveAllInputs(call));
  fine(TRITONSERVER_InferenceRequestAddInput(call, "IN", 8, shape, 2));
  fine(TRITONSERVER_InferenceRequestAppendInputData(call, "IN", &two, 4, 0, 0));
  fine(TRITONSERVER_InferenceRequestRemoveAllInputData(call, "IN"));
  fine(TRITONSERVER_InferenceRequestAppendInputDataWithHostPolicy(call, "IN", &one, 4, 0, 0, "mine"));
  fine(TRITONSERVER_BufferAttributesNew(&attributes));
  fine(TRITONSERVER_BufferAttributesSetByteSize(attributes, 4));
  fine(TRITONSERVER_InferenceRequestAppendInputDataWithBufferAttributes(call, "IN", &two, attributes));
  fine(TRITONSERVER_BufferAttributesDelete(attributes));
  fine(TRITONSERVER_InferenceRequestAddRequestedOutput(call, "TEXT"));
  fine(TRITONSERVER_InferenceRequestRemoveRequestedOutput(call, "TEXT"));
  fine(TRITONSERVER_InferenceRequestAddRequestedOutput(call, "TEXT"));
  fine(TRITONSERVER_InferenceRequestRemoveAllRequestedOutputs(call));
  fine(TRITONSERVER_InferenceRequestAddRequestedOutput(call, "OUT"));
  fine(TRITONSERVER_InferenceRequestSetResponseCallback(call, allocator, NULL, answered, &waiting));
  fine(TRITONSERVER_ServerInferAsync(server, call, NULL));
  pthread_mutex_lock(&waiting.lock);
  while (!waiting.done) pthread_cond_wait(&waiting.came, &waiting.lock);
  pthread_mutex_unlock(&waiting.lock);
  fine(TRITONSERVER_InferenceRequestIsCancelled(call, &cancelled));
  CHECK(!cancelled);
  fine(TRITONSERVER_InferenceRequestCancel(call)); /* it has ended; that is no error */
  fine(TRITONSERVER_InferenceRequestIsCancelled(call, &cancelled));
  CHECK(cancelled);
  fine(TRITONSERVER_InferenceRequestDelete(call));
  fine(TRITONSERVER_ResponseAllocatorDelete(allocator));
}

static void control(void) {
  bool ready = true;
  object config = TRITONSERVER_ParameterNew("config", 0, "{\"backend\":\"probe\",\"max_batch_size\":8}");
  /* the server of the tests does not let models be loaded: each says so */
  CHECK(fails(TRITONSERVER_ServerLoadModel(server, "nobody"), UNAVAILABLE));
  CHECK(fails(TRITONSERVER_ServerLoadModelWithParameters(server, "nobody", &config, 1), UNAVAILABLE));
  CHECK(fails(TRITONSERVER_ServerUnloadModel(server, "nobody"), UNAVAILABLE));
  CHECK(fails(TRITONSERVER_ServerUnloadModelAndDependents(server, "nobody"), UNAVAILABLE));
  fine(TRITONSERVER_ServerModelIsReady(server, "nobody", -1, &ready));
  CHECK(!ready);
  TRITONSERVER_ParameterDelete(config);
}

static void nothing(void) {
  /* what is deleted may be nothing */
  fine(TRITONSERVER_InferenceTraceDelete(NULL));
  fine(TRITONSERVER_MetricDelete(NULL));
  fine(TRITONSERVER_MetricFamilyDelete(NULL));
  fine(TRITONSERVER_InferenceRequestDelete(NULL));
  fine(TRITONSERVER_InferenceResponseDelete(NULL));
  fine(TRITONSERVER_MessageDelete(NULL));
  fine(TRITONSERVER_BufferAttributesDelete(NULL));
  TRITONSERVER_ErrorDelete(NULL);
  TRITONSERVER_ParameterDelete(NULL);
}

void every(object instance, object request) {
  wrong[0] = 0;
  values();
  metrics();
  instance_and_model(instance);
  request_and_response(request);
  own_request();
  control();
  nothing();
  answer_text(request, wrong[0] == 0 ? "all as it should be" : wrong);
}
