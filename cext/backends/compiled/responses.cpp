// Responses, their outputs, factories of responses, and states of sequences.
//
// A response that is sent is kept with its request's Reply until the host has looked at it (settle() in drive.cpp), or is
// handed to the host at once: where the model is decoupled, and where Execute has returned before the request was answered.
#include "objects.h"

namespace compiled {

Buffer::~Buffer() {
  if (token != nullptr) {
    host.unused(token);
  } else {
    free(data);
  }
}

bool Buffer::allocate(size_t wanted) {
  if (wanted > host.shared_above) data = host.allocate(wanted, &token);
  if (data == nullptr) {
    token = nullptr;
    if (posix_memalign(&data, 64, wanted > 0 ? wanted : 1) != 0) {
      data = nullptr;
      return false;
    }
  }
  size = wanted;
  asked = true;
  return true;
}

Response::~Response() {
  for (const auto& output : outputs) take<Output>(output->handle);
}

void Response::show(compiled_response* response) {
  shown.clear();
  const auto one = [this](Tensor& tensor, Buffer& buffer) {
    shown.push_back({tensor.name.c_str(), tensor.datatype, tensor.shape.data(), uint32_t(tensor.shape.size()), buffer.data,
                     buffer.size, buffer.token});
  };
  for (const auto& output : outputs) one(output->tensor, output->buffer);
  for (const auto& state : states) one(state->tensor, state->buffer);
  shown_parameters = given_of(parameters);
  *response = {code, error.c_str(), flags, 0, shown.data(), uint32_t(shown.size()), shown_parameters.data(),
               uint32_t(shown_parameters.size()), {}, 0};
}

void Response::carried() {
  for (const auto& output : outputs) output->buffer.token = nullptr, output->buffer.data = nullptr;
  for (const auto& state : states) state->buffer.token = nullptr, state->buffer.data = nullptr;
}

Reply::~Reply() {
  if (known) host.forgotten(key, &stated);
}

bool Reply::finish(compiled_stated* told) {
  over = true;
  *told = stated;
  return !stated.said && !released;
}

// What cannot be sent as it is becomes an error, so that the client is told and the process lives.
static void check(Response& response) {
  if (response.code != COMPILED_FINE) return;
  std::string why;
  const auto wrong = [&](Tensor& tensor, Buffer& buffer) {
    tensor.data = buffer.data;
    tensor.size = buffer.size;
    if (whole(tensor, &why)) return false;
    response.code = INTERNAL;
    response.error = "the backend's output '" + tensor.name + "' cannot be used: " + why;
    return true;
  };
  for (const auto& output : response.outputs) {
    if (wrong(output->tensor, output->buffer)) return;
  }
  for (const auto& state : response.states) {
    if (wrong(state->tensor, state->buffer)) return;
  }
}

// Hands one response, or the flags alone, to the host.
static Failed hand_on(Reply& reply, const std::shared_ptr<Response>& response, uint32_t flags, const compiled_stated& stated,
                      bool later) {
  compiled_response shown = {COMPILED_FINE, nullptr, flags, 1, nullptr, 0, nullptr, 0, {}, 0};
  if (response) response->show(&shown);
  shown.stated = stated;
  shown.later = later;
  char text[2048] = "";
  const int code = host.respond(reply.key, &shown, text, sizeof text);
  if (response) response->carried();  // whatever became of it, its memory is the host's now
  return code == COMPILED_FINE ? nullptr : fail(code, text);
}

static Failed closed(const char* function) {
  return fail(INVALID_ARG, std::string(function) + ": the request was answered, or given back, before");
}

static Failed send(const char* function, const std::shared_ptr<Reply>& reply, const std::shared_ptr<Response>& response,
                   uint32_t flags) {
  compiled_stated stated = {};
  bool later = false;
  {
    std::lock_guard<std::mutex> held(reply->lock);
    if (reply->answered && !response && !reply->final) {  // the one response has answered it, and this says so
      reply->final = true;
      return nullptr;
    }
    if (reply->closed()) return closed(function);
    if (flags & FINAL) reply->final = reply->answered = true;
    if (response) {
      response->states.swap(reply->states);
      check(*response);
    }
    if (!reply->direct) {
      if (response) reply->sent.push_back(response);
      return nullptr;
    }
    if (!reply->over && ((flags & FINAL) || (response && reply->single))) later = reply->finish(&stated);
  }
  return hand_on(*reply, response, flags, stated, later);
}

}  // namespace compiled

using namespace compiled;

static Failed new_response(const char* function, Handle* response, const std::shared_ptr<Reply>& reply) {
  {
    std::lock_guard<std::mutex> held(reply->lock);
    if (reply->closed()) return closed(function);
  }
  const auto made = std::make_shared<Response>();
  made->reply = reply;
  *response = add(made);
  return nullptr;
}

static Failed check_flags(const char* function, uint32_t flags) {
  if ((flags & ~uint32_t(FINAL)) == 0) return nullptr;
  return fail(INVALID_ARG, std::string(function) + ": flags must be 0 or RESPONSE_COMPLETE_FINAL");
}

// ---------------------------------------------------------------- factories

API Failed TRITONBACKEND_ResponseFactoryNew(Handle* factory, Handle request) {
  FOUND(Request, found, request);
  GIVEN(factory);
  const auto made = std::make_shared<Factory>();
  made->reply = found->reply;
  *factory = add(made);
  return nullptr;
}

API Failed TRITONBACKEND_ResponseFactoryDelete(Handle factory) {
  return take<Factory>(factory) ? nullptr : missing(__func__, "Factory handle");
}

API Failed TRITONBACKEND_ResponseFactorySendFlags(Handle factory, uint32_t flags) {
  FOUND(Factory, found, factory);
  if (Failed failed = check_flags(__func__, flags)) return failed;
  if (!(flags & FINAL)) return nullptr;
  return send(__func__, found->reply, nullptr, flags);
}

TELLS(TRITONBACKEND_ResponseFactoryIsCancelled, Factory, bool, host.cancelled(found->reply->key) != 0)

// ---------------------------------------------------------------- responses

API Failed TRITONBACKEND_ResponseNew(Handle* response, Handle request) {
  FOUND(Request, found, request);
  GIVEN(response);
  return new_response(__func__, response, found->reply);
}

API Failed TRITONBACKEND_ResponseNewFromFactory(Handle* response, Handle factory) {
  FOUND(Factory, found, factory);
  GIVEN(response);
  return new_response(__func__, response, found->reply);
}

API Failed TRITONBACKEND_ResponseDelete(Handle response) {
  return take<Response>(response) ? nullptr : missing(__func__, "Response handle");
}

API Failed TRITONBACKEND_ResponseOutput(Handle response, Handle* output, const char* name, int datatype,
                                        const int64_t* shape, uint32_t dims) {
  FOUND(Response, found, response);
  GIVEN(output);
  const auto made = std::make_shared<Output>();
  if (Failed failed = shape_of(__func__, name, shape, dims, &made->tensor)) return failed;
  if (datatype <= INVALID || datatype > LAST_DATATYPE) {
    return fail(INVALID_ARG, std::string(__func__) + ": there is no datatype " + std::to_string(datatype));
  }
  for (const auto& there : found->outputs) {
    if (there->tensor.name == name) {
      return fail(ALREADY_EXISTS, std::string("the response has an output '") + name + "' already");
    }
  }
  made->tensor.datatype = datatype;
  found->outputs.push_back(made);
  *output = add(made);
  return nullptr;
}

API Failed TRITONBACKEND_ResponseSend(Handle response, uint32_t flags, Failed error) {
  if (Failed failed = check_flags(__func__, flags)) return failed;
  const auto found = take<Response>(response);  // which is given away in any case
  if (!found) return missing(__func__, "Response handle");
  // no output can be written to any more
  for (const auto& output : found->outputs) take<Output>(output->handle);
  if (error != nullptr) {  // it stays the backend's
    const auto said = find<Error>(error);
    found->code = said ? said->code : int(INTERNAL);
    found->error = said ? said->text : "the backend's error is none, or was deleted before";
  }
  found->flags = flags;
  const auto reply = std::move(found->reply);  // which may keep the response, and would be kept by it
  return send(__func__, reply, found, flags);
}

static Failed set(const char* function, Handle response, const char* name, Value value) {
  const auto found = find<Response>(response);
  if (!found) return missing(function, "Response handle");
  if (name == nullptr) return missing(function, "name");
  value.name = name;
  for (Value& there : found->parameters) {
    if (there.name == name) {
      there = std::move(value);
      return nullptr;
    }
  }
  found->parameters.push_back(std::move(value));
  return nullptr;
}

API Failed TRITONBACKEND_ResponseSetStringParameter(Handle response, const char* name, const char* text) {
  if (text == nullptr) return missing(__func__, "value");
  Value value;
  value.string = text;
  return set(__func__, response, name, value);
}

SETS_NUMBER(TRITONBACKEND_ResponseSetIntParameter, int64_t, INT, integer)
SETS_NUMBER(TRITONBACKEND_ResponseSetBoolParameter, bool, BOOL, boolean)
SETS_NUMBER(TRITONBACKEND_ResponseSetDoubleParameter, double, DOUBLE, number)

// ---------------------------------------------------------------- buffers of outputs

static Failed buffer_of(const char* function, Buffer& own, void** buffer, uint64_t size, int* type, int64_t* id) {
  if (buffer == nullptr) return missing(function, "a pointer for a result");
  *buffer = nullptr;
  if (own.asked) return fail(ALREADY_EXISTS, std::string(function) + ": the buffer was asked for before");
  if (!own.allocate(size)) {
    return fail(UNAVAILABLE, "there are no " + std::to_string(size) + " bytes of memory left");
  }
  *buffer = own.data;
  if (type != nullptr) *type = CPU;
  if (id != nullptr) *id = 0;
  return nullptr;
}

API Failed TRITONBACKEND_OutputBuffer(Handle output, void** buffer, uint64_t size, int* type, int64_t* id) {
  FOUND(Output, found, output);
  return buffer_of(__func__, found->buffer, buffer, size, type, id);
}

TELLS(TRITONBACKEND_OutputBufferAttributes, Output, Handle, found->attached.attributes(found->buffer.size))

// what a backend looks up in its own response
static Failed described(const Tensor& tensor, const char** name, int* datatype, const int64_t** shape, uint64_t* dims) {
  if (name != nullptr) *name = tensor.name.c_str();
  if (datatype != nullptr) *datatype = tensor.datatype;
  if (shape != nullptr) *shape = tensor.shape.data();
  if (dims != nullptr) *dims = tensor.shape.size();
  return nullptr;
}

API Failed TRITONBACKEND_InferenceResponseOutputByName(Handle response, const char* name, int* datatype,
                                                       const int64_t** shape, uint64_t* dims) {
  FOUND(Response, found, response);
  for (const auto& output : found->outputs) {
    if (name != nullptr && output->tensor.name == name) return described(output->tensor, nullptr, datatype, shape, dims);
  }
  return fail(NOT_FOUND, "the response has no output '" + text_of(name) + "'");
}

API Failed TRITONBACKEND_InferenceResponseOutput(Handle response, uint32_t index, const char** name, int* datatype,
                                                 const int64_t** shape, uint64_t* dims) {
  FOUND(Response, found, response);
  if (index >= found->outputs.size()) {
    return fail(INVALID_ARG, std::string(__func__) + ": out of bounds index " + std::to_string(index));
  }
  return described(found->outputs[index]->tensor, name, datatype, shape, dims);
}

// ---------------------------------------------------------------- states

API Failed TRITONBACKEND_StateNew(Handle* state, Handle request, const char* name, int datatype, const int64_t* shape,
                                  uint32_t dims) {
  FOUND(Request, found, request);
  GIVEN(state);
  const auto made = std::make_shared<State>();
  if (Failed failed = shape_of(__func__, name, shape, dims, &made->tensor)) return failed;
  if (datatype <= INVALID || datatype > LAST_DATATYPE) {
    return fail(INVALID_ARG, std::string(__func__) + ": there is no datatype " + std::to_string(datatype));
  }
  made->reply = found->reply;
  made->tensor.datatype = datatype;
  *state = add(made);
  std::lock_guard<std::mutex> held(found->lock);
  found->states.push_back(made);
  return nullptr;
}

API Failed TRITONBACKEND_StateBuffer(Handle state, void** buffer, uint64_t size, int* type, int64_t* id) {
  FOUND(State, found, state);
  return buffer_of(__func__, found->buffer, buffer, size, type, id);
}

TELLS(TRITONBACKEND_StateBufferAttributes, State, Handle, found->attached.attributes(found->buffer.size))

API Failed TRITONBACKEND_StateUpdate(Handle state) {
  const auto found = take<State>(state);
  if (!found) return missing(__func__, "State handle");
  const auto reply = found->reply.lock();
  if (!reply) return closed(__func__);
  std::lock_guard<std::mutex> held(reply->lock);
  if (!reply->sent.empty() && !reply->direct) {  // it is not on its way yet
    auto& states = reply->sent.back()->states;
    states.push_back(found);
    check(*reply->sent.back());
    return nullptr;
  }
  if (reply->closed()) return closed(__func__);
  reply->states.push_back(found);
  return nullptr;
}
