// Requests that a backend makes to models of the server, itself included (what Python models call BLS).
//
// A call's inputs are copied while the host takes it, so the request is given back to the backend at once. Responses of all calls
// come on one thread of the host's, which does nothing else, so that the backend's callbacks may wait; their outputs are copied into
// what the backend's allocator gives.
#include <unordered_map>

#include "calls.h"

namespace compiled {

struct CallInput {
  std::string name;
  int datatype = INVALID;
  std::vector<int64_t> shape;
  std::vector<std::pair<const void*, size_t>> pieces;
  bool raw = false;  // its name is the backend's alone
};

struct Call : Object {
  static constexpr Kind KIND = Kind::CALL;
  Call() : Object(KIND) {}
  std::string model, id, correlation_text;
  int64_t version = -1;
  uint64_t correlation = 0, timeout_us = 0, priority = 0;
  bool correlation_is_text = false, cancelled = false;
  uint32_t flags = 0;
  std::vector<CallInput> inputs;
  std::vector<std::string> outputs;
  std::vector<Value> parameters;
  ReleasedFn released = nullptr;
  void* released_with = nullptr;
  std::shared_ptr<Allocator> allocator;
  void* allocator_with = nullptr;
  RespondedFn responded = nullptr;
  void* responded_with = nullptr;
  uint64_t number = 0;  // of the call under way
};

CallResponse::~CallResponse() {
  if (error) take<Error>(error->handle);
  std::string ignored;
  for (CallOutput& output : outputs) {
    if (allocator->release != nullptr) {
      said(allocator->release(allocator->handle, output.buffer, output.with, output.tensor.size, output.type, output.id),
           &ignored);
    }
  }
}

// what is left of a call while its responses are awaited
struct Pending {
  std::shared_ptr<Allocator> allocator;
  void* allocator_with;
  RespondedFn responded;
  void* responded_with;
  std::string model, id;
  int64_t version;
};

static std::mutex pending_lock;
static uint64_t last_call = 0;
static std::unordered_map<uint64_t, std::shared_ptr<Pending>>& pending() {
  static auto* made = new std::unordered_map<uint64_t, std::shared_ptr<Pending>>;
  return *made;
}

static void fill(CallResponse& made, Pending& from, const compiled_response& response) {
  std::string error;
  int code = response.code;
  if (code != COMPILED_FINE) error = text_of(response.error);
  Allocator& allocator = *from.allocator;
  if (code == COMPILED_FINE && allocator.start != nullptr) code = said(allocator.start(allocator.handle, from.allocator_with), &error);
  for (uint32_t i = 0; code == COMPILED_FINE && i < response.output_count; i++) {
    const compiled_tensor& given = response.outputs[i];
    CallOutput output;
    output.tensor.name = text_of(given.name);
    output.tensor.datatype = given.datatype;
    output.tensor.shape.assign(given.shape, given.shape + given.dims);
    output.tensor.size = given.size;
    code = allocated(allocator, from.allocator_with, output, &error);
    if (code != COMPILED_FINE) break;
    made.outputs.push_back(output);
    code = attributed(allocator, from.allocator_with, made.outputs.back(), &error);
    if (code != COMPILED_FINE) break;
    if (output.type == GPU) {
      code = UNSUPPORTED;
      error = "outputs of a model that a backend calls are in the CPU's memory only";
    } else if (given.size > 0 && output.buffer == nullptr) {
      code = INTERNAL;
      error = "the backend's allocator gave no memory";
    } else if (given.size > 0) {
      memcpy(output.buffer, given.data, given.size);
    }
  }
  for (uint32_t i = 0; i < response.parameter_count; i++) made.parameters.push_back(value_of(response.parameters[i]));
  if (code != COMPILED_FINE) {
    made.error = std::make_shared<Error>(code, error);
    add(made.error);
  }
}

void deliver(uint64_t number, const compiled_response* response, int final) {
  std::shared_ptr<Pending> from;
  {
    std::lock_guard<std::mutex> held(pending_lock);
    const auto place = pending().find(number);
    if (place == pending().end()) return;
    from = place->second;
    if (final) pending().erase(place);
  }
  Handle handle = nullptr;
  if (response != nullptr) {
    const auto made = std::make_shared<CallResponse>();
    made->allocator = from->allocator;
    made->model = from->model;
    made->version = from->version;
    made->id = from->id;
    fill(*made, *from, *response);
    handle = add(made);
  }
  if (handle != nullptr || final) from->responded(handle, final ? FINAL : 0, from->responded_with);
}

}  // namespace compiled

using namespace compiled;

// ---------------------------------------------------------------- making a request

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
  if (name == nullptr || (shape == nullptr && dims > 0)) return missing(__func__, "name or shape");
  if (!found->inputs.empty() && found->inputs[0].raw) return fail(INVALID_ARG, beside_raw(__func__));
  for (const CallInput& there : found->inputs) {
    if (there.name == name) return fail(INVALID_ARG, std::string("input '") + name + "' already exists in request");
  }
  CallInput input;
  input.name = name;
  input.datatype = datatype;
  input.shape.assign(shape, shape + dims);
  found->inputs.push_back(std::move(input));
  return nullptr;
}

API Failed TRITONSERVER_InferenceRequestAppendInputData(Handle call, const char* name, const void* base, size_t size,
                                                        int type, int64_t) {
  FOUND(Call, found, call);
  if (name == nullptr || (base == nullptr && size > 0)) return missing(__func__, "name or data");
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

// ---------------------------------------------------------------- its way

API Failed TRITONSERVER_ServerInferAsync(Handle server, Handle call, Handle trace) {
  FOUND(Server, serving, server);
  FOUND(Call, found, call);
  if (!found->allocator || found->responded == nullptr) {
    return fail(INVALID_ARG, std::string(__func__) + ": the request has no response callback");
  }
  const auto traced = find<Trace>(trace);
  std::vector<std::vector<char>> joined;
  joined.reserve(found->inputs.size());
  std::vector<compiled_tensor> inputs;
  for (const CallInput& input : found->inputs) {
    compiled_tensor tensor = {input.name.c_str(), input.datatype, input.shape.data(), uint32_t(input.shape.size()), nullptr, 0,
                              nullptr};
    if (input.pieces.size() == 1 && !input.raw) {
      tensor.data = input.pieces[0].first;
      tensor.size = input.pieces[0].second;
    } else {
      joined.emplace_back(input.raw ? sizeof(uint32_t) : 0);
      for (const auto& piece : input.pieces) {
        const char* data = static_cast<const char*>(piece.first);
        if (piece.second > 0) joined.back().insert(joined.back().end(), data, data + piece.second);
      }
      tensor.data = joined.back().data();
      tensor.size = joined.back().size();
    }
    if (input.raw) {
      const size_t size = tensor.size - sizeof(uint32_t);
      if (size > UINT32_MAX) return fail(INVALID_ARG, std::string(__func__) + ": a raw input has at most 4 GiB");
      const uint32_t length = uint32_t(size);
      memcpy(joined.back().data(), &length, sizeof length);
      inputs.push_back(tensor);
      continue;
    }
    Tensor told;
    told.datatype = tensor.datatype;
    told.shape = input.shape;
    told.data = tensor.data;
    told.size = tensor.size;
    std::string why;
    if (!whole(told, &why)) return fail(INVALID_ARG, "input '" + input.name + "': " + why);
    inputs.push_back(tensor);
  }
  std::vector<const char*> outputs;
  for (const std::string& name : found->outputs) outputs.push_back(name.c_str());
  std::vector<compiled_parameter> parameters = given_of(found->parameters);

  const auto from = std::make_shared<Pending>();
  *from = {found->allocator, found->allocator_with, found->responded, found->responded_with, found->model, found->id,
           found->version};
  uint64_t number;
  {
    std::lock_guard<std::mutex> held(pending_lock);
    number = ++last_call;
    pending()[number] = from;
  }
  found->number = number;
  compiled_call asked = {number, found->model.c_str(), found->version, traced ? traced->key : 0, found->id.c_str(),
                         found->correlation, found->correlation_is_text ? found->correlation_text.c_str() : nullptr,
                         found->flags, found->timeout_us, found->priority, inputs.data(), uint32_t(inputs.size()),
                         !found->inputs.empty() && found->inputs[0].raw, outputs.data(),
                         uint32_t(outputs.size()), parameters.data(), uint32_t(parameters.size())};
  // it may be deleted by who is told that it is released
  const ReleasedFn released = found->released;
  void* const with = found->released_with;
  char text[2048] = "";
  const int code = host.infer(&asked, text, sizeof text);
  if (code != COMPILED_FINE) {
    std::lock_guard<std::mutex> held(pending_lock);
    pending().erase(number);
    return fail(code, text);
  }
  if (traced && !traced->kept) take<Trace>(trace);  // a child's is the server's from here on
  if (released != nullptr) released(call, RELEASE_ALL, with);
  return nullptr;
}

API Failed TRITONSERVER_InferenceRequestCancel(Handle call) {
  FOUND(Call, found, call);
  found->cancelled = true;
  if (found->number != 0) host.cancel_call(found->number);
  return nullptr;
}

TELLS(TRITONSERVER_InferenceRequestIsCancelled, Call, bool, found->cancelled)
