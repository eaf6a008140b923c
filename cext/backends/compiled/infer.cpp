// The way of a request that a backend makes: to the server, and of its responses to the backend.
//
// A call's inputs are copied while the host takes it, so the request is given back to the backend at once. Responses of all calls
// come on one thread of the host's, which does nothing else, so that the backend's callbacks may wait; their outputs are copied into
// what the backend's allocator gives.
//
// The backend's trace of a call hears of it on that thread: of the outputs of each response before that is handed over, of the rest
// with the last one, behind which come the request's end and the trace's release.
#include <unordered_map>

#include "calls.h"
#include "traces.h"

namespace compiled {

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

// an input as the trace shows it: its memory is the backend's again when the call is made
struct TracedInput {
  Tensor tensor;
  std::vector<char> bytes;
};

// what is left of a call while its responses are awaited
struct Pending {
  std::shared_ptr<Allocator> allocator;
  void* allocator_with;
  RespondedFn responded;
  void* responded_with;
  std::string model, id;
  int64_t version;
  std::shared_ptr<Trace> trace;  // of the backend's own
  std::vector<TracedInput> inputs;
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

static void tell_inputs(const Pending& from, int activity) {
  for (const TracedInput& input : from.inputs) tell_tensor(*from.trace, activity, input.tensor, input.bytes.data(), CPU, 0);
}

// what a trace is told before a response: all but the end, where that is the last
static void tell(Pending& from, const CallResponse* response, const compiled_passed* passed) {
  if (passed != nullptr) {
    from.trace->version = passed->version;
    for (int i = 0; i < COMPUTE_START; i++) tell_time(*from.trace, i, passed->stages[i]);
    tell_inputs(from, QUEUE_INPUT);
    for (int i = COMPUTE_START; i <= COMPUTE_INPUT_END; i++) tell_time(*from.trace, i, passed->stages[i]);
    if (passed->stages[COMPUTE_START] != 0) tell_inputs(from, BACKEND_INPUT);
  }
  if (response != nullptr && !response->error) {
    for (const CallOutput& output : response->outputs) {
      tell_tensor(*from.trace, BACKEND_OUTPUT, output.tensor, output.buffer, output.type, output.id);
    }
  }
  for (int i = COMPUTE_INPUT_END + 1; passed != nullptr && i < REQUEST_END; i++) tell_time(*from.trace, i, passed->stages[i]);
}

void deliver(uint64_t number, const compiled_response* response, int final, const compiled_passed* passed) {
  std::shared_ptr<Pending> from;
  {
    std::lock_guard<std::mutex> held(pending_lock);
    const auto place = pending().find(number);
    if (place == pending().end()) return;
    from = place->second;
    if (final) pending().erase(place);
  }
  Handle handle = nullptr;
  std::shared_ptr<CallResponse> made;
  if (response != nullptr) {
    made = std::make_shared<CallResponse>();
    made->allocator = from->allocator;
    made->model = from->model;
    made->version = from->version;
    made->id = from->id;
    fill(*made, *from, *response);
    handle = add(made);
  }
  if (from->trace) tell(*from, made.get(), passed);
  made.reset();  // it is the backend's alone, and ends when that deletes it
  if (handle != nullptr || final) from->responded(handle, final ? FINAL : 0, from->responded_with);
  if (from->trace && final) {
    if (passed != nullptr) tell_time(*from->trace, REQUEST_END, passed->stages[REQUEST_END]);
    end_trace(*from->trace);
  }
}

}  // namespace compiled

using namespace compiled;

static Failed infer(const char* function, Handle server, Handle call, Handle trace, const std::shared_ptr<Trace>& traced) {
  if (!find<Server>(server)) return missing(function, "Server handle");
  const auto found = find<Call>(call);
  if (!found) return missing(function, "Call handle");
  if (!found->allocator || found->responded == nullptr) {
    return fail(INVALID_ARG, std::string(function) + ": the request has no response callback");
  }
  const std::shared_ptr<Trace> own = traced && traced->watch ? traced : nullptr;
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
      if (size > UINT32_MAX) return fail(INVALID_ARG, std::string(function) + ": a raw input has at most 4 GiB");
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
           found->version, own, {}};
  if (own) {
    own->model.set(found->model);
    own->request.set(found->id);
    own->version = found->version;
  }
  if (own && own->watch->tensor != nullptr) {
    for (size_t i = 0; i < inputs.size(); i++) {
      const size_t before = found->inputs[i].raw ? sizeof(uint32_t) : 0;
      const char* data = static_cast<const char*>(inputs[i].data) + before;
      TracedInput input;
      input.tensor.name = found->inputs[i].name;
      input.tensor.datatype = found->inputs[i].datatype;
      input.tensor.shape = found->inputs[i].shape;
      input.tensor.size = inputs[i].size - before;
      if (input.tensor.size > 0) input.bytes.assign(data, data + input.tensor.size);
      from->inputs.push_back(std::move(input));
    }
  }
  uint64_t number;
  {
    std::lock_guard<std::mutex> held(pending_lock);
    number = ++last_call;
    pending()[number] = from;
  }
  found->number = number;
  compiled_call asked = {number, found->model.c_str(), found->version, traced && !own ? traced->key : 0, found->id.c_str(),
                         found->correlation, found->correlation_is_text ? found->correlation_text.c_str() : nullptr,
                         found->flags, found->timeout_us, found->priority, inputs.data(), uint32_t(inputs.size()),
                         !found->inputs.empty() && found->inputs[0].raw, outputs.data(),
                         uint32_t(outputs.size()), parameters.data(), uint32_t(parameters.size()), own != nullptr};
  // it may be deleted by who is told that it is released
  const ReleasedFn released = found->released;
  void* const with = found->released_with;
  char text[2048] = "";
  const int code = host.infer(&asked, text, sizeof text);
  if (code != COMPILED_FINE) {
    std::lock_guard<std::mutex> held(pending_lock);
    if (pending().erase(number) > 0) return fail(code, text);  // else its last response was there before
  }
  if (traced && !own && !traced->kept) take<Trace>(trace);  // a child's is the server's from here on
  if (released != nullptr) released(call, RELEASE_ALL, with);
  return nullptr;
}

API Failed TRITONSERVER_ServerInferAsync(Handle server, Handle call, Handle trace) {
  const auto traced = find<Trace>(trace);
  if (trace != nullptr && !traced) return missing(__func__, "Trace handle");
  if (traced && traced->watch && traced->away.exchange(true)) {
    return fail(INVALID_ARG, std::string(__func__) + ": the trace belongs to another request until it is released");
  }
  Failed failed = infer(__func__, server, call, trace, traced);
  if (failed != nullptr && traced && traced->watch) end_trace(*traced);  // which it belonged to all the same
  return failed;
}
