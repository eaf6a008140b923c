// Requests and their inputs, as a backend reads them.
#include "traces.h"

namespace compiled {

// The inputs of a request go with it, whoever holds one of them.
Request::~Request() {
  for (const auto& input : inputs) take<Input>(input->handle);
  for (const auto& state : states) take<State>(state->handle);
  if (trace) take<Trace>(trace->handle);
}

}  // namespace compiled

using namespace compiled;

static Failed no_such(const char* function, uint32_t index, size_t count) {
  return fail(INVALID_ARG, std::string(function) + ": out of bounds index " + std::to_string(index) + ", the request has " +
                               std::to_string(count));
}

TELLS(TRITONBACKEND_RequestId, Request, const char*, found->id.c_str())

API Failed TRITONBACKEND_RequestCorrelationId(Handle request, uint64_t* id) {
  FOUND(Request, found, request);
  GIVEN(id);
  if (found->correlation_is_text) {
    return fail(INVALID_ARG, "the correlation ID of the request is not an unsigned integer");
  }
  *id = found->correlation;
  return nullptr;
}

API Failed TRITONBACKEND_RequestCorrelationIdString(Handle request, const char** id) {
  FOUND(Request, found, request);
  GIVEN(id);
  if (!found->correlation_is_text) return fail(INVALID_ARG, "the correlation ID of the request is not a string");
  *id = found->correlation_text.c_str();
  return nullptr;
}

TELLS(TRITONBACKEND_RequestFlags, Request, uint32_t, found->flags)
TELLS(TRITONBACKEND_InferenceRequestTimeoutMicroseconds, Request, uint64_t, found->timeout_us)
TELLS(TRITONBACKEND_RequestIsCancelled, Request, bool, host.cancelled(found->reply->key) != 0)
TELLS(TRITONBACKEND_RequestParameterCount, Request, uint32_t, uint32_t(found->parameters.size()))

API Failed TRITONBACKEND_RequestParameter(Handle request, uint32_t index, const char** key, int* type, const void** value) {
  FOUND(Request, found, request);
  GIVEN(key);
  GIVEN(type);
  GIVEN(value);
  if (index >= found->parameters.size()) return no_such(__func__, index, found->parameters.size());
  const Value& parameter = found->parameters[index];
  *key = parameter.name.c_str();
  *type = parameter.type;
  *value = parameter.address();
  return nullptr;
}

TELLS(TRITONBACKEND_RequestInputCount, Request, uint32_t, uint32_t(found->inputs.size()))

API Failed TRITONBACKEND_RequestInputName(Handle request, uint32_t index, const char** name) {
  FOUND(Request, found, request);
  GIVEN(name);
  if (index >= found->inputs.size()) return no_such(__func__, index, found->inputs.size());
  *name = found->inputs[index]->tensor.name.c_str();
  return nullptr;
}

API Failed TRITONBACKEND_RequestInput(Handle request, const char* name, Handle* input) {
  FOUND(Request, found, request);
  GIVEN(input);
  *input = nullptr;
  for (const auto& one : found->inputs) {
    if (name != nullptr && one->tensor.name == name) {
      *input = one->handle;
      return nullptr;
    }
  }
  return fail(INVALID_ARG, "unknown request input name " + text_of(name));
}

API Failed TRITONBACKEND_RequestInputByIndex(Handle request, uint32_t index, Handle* input) {
  FOUND(Request, found, request);
  GIVEN(input);
  if (index >= found->inputs.size()) return no_such(__func__, index, found->inputs.size());
  *input = found->inputs[index]->handle;
  return nullptr;
}

TELLS(TRITONBACKEND_RequestOutputCount, Request, uint32_t, uint32_t(found->outputs.size()))

API Failed TRITONBACKEND_RequestOutputName(Handle request, uint32_t index, const char** name) {
  FOUND(Request, found, request);
  GIVEN(name);
  *name = nullptr;
  if (index >= found->outputs.size()) return no_such(__func__, index, found->outputs.size());
  *name = found->outputs[index].c_str();
  return nullptr;
}

API Failed TRITONBACKEND_RequestOutputBufferProperties(Handle request, const char*, size_t*, int* type, int64_t* id) {
  FOUND(Request, found, request);
  GIVEN(type);
  GIVEN(id);
  *type = CPU;
  *id = 0;
  return nullptr;
}

API Failed TRITONBACKEND_RequestRelease(Handle request, uint32_t flags) {
  if (flags != RELEASE_ALL && flags != RELEASE_RESCHEDULE) {
    return fail(INVALID_ARG, std::string(__func__) + ": flags must be RELEASE_ALL or RELEASE_RESCHEDULE");
  }
  const auto found = take<Request>(request);
  if (!found) return missing(__func__, "Request handle");
  const auto reply = found->reply;
  bool tell;
  {
    std::lock_guard<std::mutex> held(reply->lock);
    reply->released = true;
    if (flags == RELEASE_RESCHEDULE && !reply->settled) reply->again = true;
    tell = reply->settled || reply->direct;
  }
  if (tell) host.released(reply->key);
  return nullptr;
}

TELLS(TRITONBACKEND_RequestTrace, Request, Handle, found->trace ? found->trace->handle : nullptr)

// ---------------------------------------------------------------- inputs

API Failed TRITONBACKEND_InputProperties(Handle input, const char** name, int* datatype, const int64_t** shape,
                                         uint32_t* dims, uint64_t* size, uint32_t* buffers) {
  FOUND(Input, found, input);
  const Tensor& tensor = found->tensor;
  if (name != nullptr) *name = tensor.name.c_str();
  if (datatype != nullptr) *datatype = tensor.datatype;
  if (shape != nullptr) *shape = tensor.shape.data();
  if (dims != nullptr) *dims = uint32_t(tensor.shape.size());
  if (size != nullptr) *size = tensor.size;
  if (buffers != nullptr) *buffers = 1;
  return nullptr;
}

API Failed TRITONBACKEND_InputPropertiesForHostPolicy(Handle input, const char*, const char** name, int* datatype,
                                                      const int64_t** shape, uint32_t* dims, uint64_t* size,
                                                      uint32_t* buffers) {
  return TRITONBACKEND_InputProperties(input, name, datatype, shape, dims, size, buffers);
}

API Failed TRITONBACKEND_InputBuffer(Handle input, uint32_t index, const void** buffer, uint64_t* size, int* type,
                                     int64_t* id) {
  FOUND(Input, found, input);
  GIVEN(buffer);
  GIVEN(size);
  *buffer = nullptr;
  *size = 0;
  if (index > 0) return no_such(__func__, index, 1);
  *buffer = found->tensor.data;
  *size = found->tensor.size;
  if (type != nullptr) *type = CPU;
  if (id != nullptr) *id = 0;
  return nullptr;
}

API Failed TRITONBACKEND_InputBufferForHostPolicy(Handle input, const char*, uint32_t index, const void** buffer,
                                                  uint64_t* size, int* type, int64_t* id) {
  return TRITONBACKEND_InputBuffer(input, index, buffer, size, type, id);
}

API Failed TRITONBACKEND_InputBufferAttributes(Handle input, uint32_t index, const void** buffer, Handle* attributes) {
  FOUND(Input, found, input);
  GIVEN(attributes);
  if (index > 0) return no_such(__func__, index, 1);
  if (buffer != nullptr) *buffer = found->tensor.data;
  *attributes = found->attached.attributes(found->tensor.size);
  return nullptr;
}
