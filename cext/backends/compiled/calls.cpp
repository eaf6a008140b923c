// Requests that a backend makes to models of the server, itself included (what Python models call BLS): what they say.
#include "calls.h"

using namespace compiled;

API Failed TRITONSERVER_InferenceRequestNew(Handle* call, Handle server, const char* model, int64_t version) {
  FOUND(Server, found, server);
  GIVEN(call);
  if (model == nullptr) return missing(__func__, "the model's name");
  const auto made = std::make_shared<Call>();
  made->model = model;
  made->version = version;
  *call = add(made);
  return nullptr;
}

DELETES(TRITONSERVER_InferenceRequestDelete, Call)

TELLS(TRITONSERVER_InferenceRequestFlags, Call, uint32_t, found->flags)
SETS(TRITONSERVER_InferenceRequestSetFlags, Call, uint32_t, flags)
TELLS(TRITONSERVER_InferenceRequestTimeoutMicroseconds, Call, uint64_t, found->timeout_us)
SETS(TRITONSERVER_InferenceRequestSetTimeoutMicroseconds, Call, uint64_t, timeout_us)
TELLS(TRITONSERVER_InferenceRequestPriority, Call, uint32_t, uint32_t(found->priority))
SETS(TRITONSERVER_InferenceRequestSetPriority, Call, uint32_t, priority)
TELLS(TRITONSERVER_InferenceRequestPriorityUInt64, Call, uint64_t, found->priority)
SETS(TRITONSERVER_InferenceRequestSetPriorityUInt64, Call, uint64_t, priority)

API Failed TRITONSERVER_InferenceRequestSetId(Handle call, const char* id) {
  FOUND(Call, found, call);
  found->id = text_of(id);
  return nullptr;
}

TELLS(TRITONSERVER_InferenceRequestId, Call, const char*, found->id.c_str())

API Failed TRITONSERVER_InferenceRequestSetCorrelationId(Handle call, uint64_t id) {
  FOUND(Call, found, call);
  found->correlation = id;
  found->correlation_is_text = false;
  return nullptr;
}

API Failed TRITONSERVER_InferenceRequestSetCorrelationIdString(Handle call, const char* id) {
  FOUND(Call, found, call);
  found->correlation_text = text_of(id);
  found->correlation_is_text = true;
  return nullptr;
}

API Failed TRITONSERVER_InferenceRequestCorrelationId(Handle call, uint64_t* id) {
  FOUND(Call, found, call);
  GIVEN(id);
  if (found->correlation_is_text) return fail(INVALID_ARG, "the correlation ID is not an unsigned integer");
  *id = found->correlation;
  return nullptr;
}

API Failed TRITONSERVER_InferenceRequestCorrelationIdString(Handle call, const char** id) {
  FOUND(Call, found, call);
  GIVEN(id);
  if (!found->correlation_is_text) return fail(INVALID_ARG, "the correlation ID is not a string");
  *id = found->correlation_text.c_str();
  return nullptr;
}

static std::string beside_raw(const char* function) {
  return std::string(function) + ": a raw input is the only one of its request";
}

API Failed TRITONSERVER_InferenceRequestAddRawInput(Handle call, const char* name) {
  FOUND(Call, found, call);
  if (name == nullptr) return missing(__func__, "name");
  if (!found->inputs.empty()) return fail(INVALID_ARG, beside_raw(__func__));
  CallInput input;
  input.name = name;
  input.raw = true;
  found->inputs.push_back(std::move(input));
  return nullptr;
}

API Failed TRITONSERVER_InferenceRequestAddInput(Handle call, const char* name, int datatype, const int64_t* shape,
                                                 uint64_t dims) {
  FOUND(Call, found, call);
  Tensor told;
  if (Failed failed = shape_of(__func__, name, shape, dims, &told)) return failed;
  if (!found->inputs.empty() && found->inputs[0].raw) return fail(INVALID_ARG, beside_raw(__func__));
  for (const CallInput& there : found->inputs) {
    if (there.name == name) return fail(INVALID_ARG, std::string("input '") + name + "' already exists in request");
  }
  CallInput input;
  input.name = std::move(told.name);
  input.datatype = datatype;
  input.shape = std::move(told.shape);
  found->inputs.push_back(std::move(input));
  return nullptr;
}

API Failed TRITONSERVER_InferenceRequestAppendInputData(Handle call, const char* name, const void* base, size_t size,
                                                        int type, int64_t) {
  FOUND(Call, found, call);
  if (name == nullptr || (base == nullptr && size > 0)) return missing(__func__, "name or data");
  if (Failed failed = beyond(__func__, size)) return failed;
  if (type == GPU) return unsupported(__func__, "inputs of models that a backend calls are in the CPU's memory only");
  for (CallInput& input : found->inputs) {
    if (input.name != name) continue;
    input.pieces.emplace_back(base, size);
    return nullptr;
  }
  return fail(INVALID_ARG, std::string("input '") + name + "' does not exist in request");
}

API Failed TRITONSERVER_InferenceRequestAppendInputDataWithHostPolicy(Handle call, const char* name, const void* base,
                                                                      size_t size, int type, int64_t id, const char*) {
  return TRITONSERVER_InferenceRequestAppendInputData(call, name, base, size, type, id);
}

API Failed TRITONSERVER_InferenceRequestAppendInputDataWithBufferAttributes(Handle call, const char* name, const void* base,
                                                                            Handle attributes) {
  FOUND(Attributes, found, attributes);
  return TRITONSERVER_InferenceRequestAppendInputData(call, name, base, found->size, found->type, found->id);
}

API Failed TRITONSERVER_InferenceRequestRemoveAllInputData(Handle call, const char* name) {
  FOUND(Call, found, call);
  for (CallInput& input : found->inputs) {
    if (input.name == text_of(name)) {
      input.pieces.clear();
      return nullptr;
    }
  }
  return fail(INVALID_ARG, "input '" + text_of(name) + "' does not exist in request");
}

API Failed TRITONSERVER_InferenceRequestRemoveInput(Handle call, const char* name) {
  FOUND(Call, found, call);
  for (size_t i = 0; i < found->inputs.size(); i++) {
    if (found->inputs[i].name == text_of(name)) {
      found->inputs.erase(found->inputs.begin() + long(i));
      return nullptr;
    }
  }
  return fail(INVALID_ARG, "input '" + text_of(name) + "' does not exist in request");
}

API Failed TRITONSERVER_InferenceRequestRemoveAllInputs(Handle call) {
  FOUND(Call, found, call);
  found->inputs.clear();
  return nullptr;
}

API Failed TRITONSERVER_InferenceRequestAddRequestedOutput(Handle call, const char* name) {
  FOUND(Call, found, call);
  if (name == nullptr) return missing(__func__, "name");
  found->outputs.push_back(name);
  return nullptr;
}

API Failed TRITONSERVER_InferenceRequestRemoveRequestedOutput(Handle call, const char* name) {
  FOUND(Call, found, call);
  for (size_t i = 0; i < found->outputs.size(); i++) {
    if (found->outputs[i] == text_of(name)) {
      found->outputs.erase(found->outputs.begin() + long(i));
      break;
    }
  }
  return nullptr;
}

API Failed TRITONSERVER_InferenceRequestRemoveAllRequestedOutputs(Handle call) {
  FOUND(Call, found, call);
  found->outputs.clear();
  return nullptr;
}

static Failed set(const char* function, Handle call, const char* name, Value value) {
  const auto found = find<Call>(call);
  if (!found) return missing(function, "Call handle");
  if (name == nullptr) return missing(function, "name");
  value.name = name;
  found->parameters.push_back(std::move(value));
  return nullptr;
}

API Failed TRITONSERVER_InferenceRequestSetStringParameter(Handle call, const char* name, const char* text) {
  Value value;
  value.string = text_of(text);
  return set(__func__, call, name, value);
}

SETS_NUMBER(TRITONSERVER_InferenceRequestSetIntParameter, int64_t, INT, integer)
SETS_NUMBER(TRITONSERVER_InferenceRequestSetBoolParameter, bool, BOOL, boolean)
SETS_NUMBER(TRITONSERVER_InferenceRequestSetDoubleParameter, double, DOUBLE, number)

API Failed TRITONSERVER_InferenceRequestSetReleaseCallback(Handle call, ReleasedFn released, void* with) {
  FOUND(Call, found, call);
  found->released = released;
  found->released_with = with;
  return nullptr;
}

API Failed TRITONSERVER_InferenceRequestSetResponseCallback(Handle call, Handle allocator, void* allocator_with,
                                                            RespondedFn responded, void* with) {
  FOUND(Call, found, call);
  FOUND(Allocator, own, allocator);
  found->allocator = own;
  found->allocator_with = allocator_with;
  found->responded = responded;
  found->responded_with = with;
  return nullptr;
}

API Failed TRITONSERVER_InferenceRequestCancel(Handle call) {
  FOUND(Call, found, call);
  found->cancelled = true;
  if (found->number != 0) host.cancel_call(found->number);
  return nullptr;
}

TELLS(TRITONSERVER_InferenceRequestIsCancelled, Call, bool, found->cancelled)
