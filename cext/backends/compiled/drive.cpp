// Opens a backend's library and leads it through its life: what the host calls.
#include <dlfcn.h>

#include "traces.h"

namespace compiled {
namespace {

typedef Failed (*OneHandle)(Handle);
typedef Failed (*TwoHandles)(Handle, Handle);
typedef Failed (*Execute)(Handle, Handle*, uint32_t);

struct Driven {
  void* library = nullptr;
  OneHandle finalize = nullptr, model_finalize = nullptr, instance_initialize = nullptr, instance_finalize = nullptr;
  OneHandle instance_ready = nullptr;
  Execute execute = nullptr;
  bool backend_begun = false, model_begun = false, instance_begun = false;
  std::shared_ptr<Backend> backend;
  std::shared_ptr<Model> model;
  std::shared_ptr<Instance> instance;
  std::vector<compiled_group> groups;
  compiled_manner manner = {};
};

Driven driven;

template <class F>
F function(const char* name) {
  return reinterpret_cast<F>(dlsym(driven.library, name));
}

int called(OneHandle call, Handle handle, char* text, size_t room) {
  if (call == nullptr) return COMPILED_FINE;
  std::string error;
  return put(said(call(handle), &error), error, text, room);
}

void hosted(const compiled_host* given) { host = *given; }

int begin(const compiled_start* start, char* text, size_t room) {
  driven.library = dlopen(start->library, RTLD_NOW | RTLD_LOCAL);
  if (driven.library == nullptr) {
    const char* why = dlerror();
    return put(INVALID_ARG, std::string("unable to load shared library: ") + text_of(why), text, room);
  }
  driven.execute = function<Execute>("TRITONBACKEND_ModelInstanceExecute");
  if (driven.execute == nullptr) {
    return put(INVALID_ARG, std::string("unable to find required entrypoint 'TRITONBACKEND_ModelInstanceExecute' in "
                                        "backend library '") + start->library + "'", text, room);
  }
  driven.finalize = function<OneHandle>("TRITONBACKEND_Finalize");
  driven.model_finalize = function<OneHandle>("TRITONBACKEND_ModelFinalize");
  driven.instance_initialize = function<OneHandle>("TRITONBACKEND_ModelInstanceInitialize");
  driven.instance_finalize = function<OneHandle>("TRITONBACKEND_ModelInstanceFinalize");
  driven.instance_ready = function<OneHandle>("TRITONBACKEND_ModelInstanceReady");

  const auto backend = std::make_shared<Backend>();
  backend->name = text_of(start->backend);
  backend->folder = text_of(start->folder);
  backend->config = std::make_shared<Message>(text_of(start->backend_config), true);
  add(backend->config);
  backend->manager = std::make_shared<Manager>();
  add(backend->manager);
  add(backend);
  driven.backend = backend;
  int code = called(function<OneHandle>("TRITONBACKEND_Initialize"), backend->handle, text, room);
  if (code != COMPILED_FINE) return code;
  driven.backend_begun = true;
  if (const auto attributes = function<TwoHandles>("TRITONBACKEND_GetBackendAttribute")) {
    const auto attribute = std::make_shared<BackendAttribute>();
    std::string error;
    code = said(attributes(backend->handle, add(attribute)), &error);
    take<BackendAttribute>(attribute->handle);
    if (code == COMPILED_FINE) {  // an error: as if it had said nothing
      driven.groups = attribute->groups;
      driven.manner.parallel_loading = attribute->parallel;
    }
  }
  driven.manner.device_blocking = backend->policy == DEVICE_BLOCKING;  // what it sets later has no effect, as there

  const auto model = std::make_shared<Model>();
  model->name = text_of(start->model);
  model->version = start->version;
  model->repository = text_of(start->repository);
  model->config = text_of(start->config);
  model->auto_complete = start->auto_complete != 0;
  model->backend = backend;
  model->server = std::make_shared<Server>();
  model->settable = model->auto_complete;
  add(model->server);
  add(model);
  driven.model = model;
  code = called(function<OneHandle>("TRITONBACKEND_ModelInitialize"), model->handle, text, room);
  if (code != COMPILED_FINE) return code;
  driven.model_begun = true;
  {
    std::lock_guard<std::mutex> held(model->lock);
    model->settable = false;
  }
  return open_strategy(start->strategy, model->handle, text, room);
}

const char* config() { return driven.model ? driven.model->config.c_str() : ""; }

uint32_t groups(compiled_group* found, uint32_t room) {
  const uint32_t count = uint32_t(driven.groups.size()) < room ? uint32_t(driven.groups.size()) : room;
  for (uint32_t i = 0; i < count; i++) found[i] = driven.groups[i];
  return count;
}

void manner(compiled_manner* told) { *told = driven.manner; }

int instance(const compiled_instance* given, char* text, size_t room) {
  const auto made = std::make_shared<Instance>();
  made->name = text_of(given->name);
  made->kind = given->kind;
  made->device = given->device;
  made->passive = given->passive != 0;
  made->host_policy = std::make_shared<Message>(text_of(given->host_policy), true);
  add(made->host_policy);
  for (uint32_t i = 0; i < given->profile_count; i++) made->profiles.push_back(given->profiles[i]);
  for (uint32_t i = 0; i < given->secondary_count; i++) {
    made->secondary.emplace_back(given->secondary_kinds[i], given->secondary_ids[i]);
  }
  made->model = driven.model;
  add(made);
  driven.instance = made;
  const int code = called(driven.instance_initialize, made->handle, text, room);
  driven.instance_begun = code == COMPILED_FINE;
  return code;
}

int ready(char* text, size_t room) { return called(driven.instance_ready, driven.instance->handle, text, room); }

std::shared_ptr<Request> request_of(const compiled_request& given) {
  const auto made = std::make_shared<Request>();
  made->reply = std::make_shared<Reply>();
  made->reply->key = given.key;
  made->reply->direct = given.direct != 0;
  made->reply->single = given.direct == 0;
  made->id = text_of(given.id);
  made->correlation = given.correlation;
  made->correlation_is_text = given.correlation_text != nullptr;
  made->correlation_text = text_of(given.correlation_text);
  made->flags = given.flags;
  made->timeout_us = given.timeout_us;
  for (uint32_t i = 0; i < given.input_count; i++) {
    const compiled_tensor& tensor = given.inputs[i];
    const auto input = std::make_shared<Input>();
    input->tensor.name = text_of(tensor.name);
    input->tensor.datatype = tensor.datatype;
    input->tensor.shape.assign(tensor.shape, tensor.shape + tensor.dims);
    input->tensor.data = tensor.data;
    input->tensor.size = tensor.size;
    made->inputs.push_back(input);
    add(input);
  }
  for (uint32_t i = 0; i < given.output_count; i++) made->outputs.push_back(given.outputs[i]);
  for (uint32_t i = 0; i < given.parameter_count; i++) made->parameters.push_back(value_of(given.parameters[i]));
  if (given.traced) {
    made->trace = std::make_shared<Trace>();
    made->trace->key = given.key;
    made->trace->id = given.trace;
    made->trace->parent = given.trace_parent;
    made->trace->model.set(driven.model->name);
    made->trace->version = int64_t(driven.model->version);
    made->trace->request.set(made->id);
    made->trace->context.set(text_of(given.context));
    add(made->trace);
  }
  add(made);
  return made;
}

Handle handle_of(compiled_request& given) {
  if (given.handle == 0) given.handle = reinterpret_cast<uint64_t>(request_of(given)->handle);
  return reinterpret_cast<Handle>(given.handle);
}

uint32_t together_of(compiled_request* given, uint32_t count) {
  return together(count, [given](uint32_t i) { return handle_of(given[i]); });
}

std::mutex settling;  // of `unsettled`: requests whose reply settle() has not seen
struct Unsettled { uint64_t handle; std::shared_ptr<Reply> reply; std::shared_ptr<Response> answer; };
std::vector<Unsettled> unsettled;

int execute(compiled_request* given, uint32_t count, const compiled_execution** executions, uint32_t* execution_count,
            char* text, size_t room) {
  std::vector<Handle> handles;
  std::vector<std::shared_ptr<Reply>> replies;
  for (uint32_t i = 0; i < count; i++) {
    auto made = find<Request>(handle_of(given[i]));
    if (!made) {  // a strategy has released it
      given[i].handle = 0;
      made = find<Request>(handle_of(given[i]));
    }
    made->reply->known = given[i].direct != 0;
    handles.push_back(made->handle);
    replies.push_back(made->reply);
  }
  {
    std::lock_guard<std::mutex> held(driven.instance->lock);
    driven.instance->executing = true;
    driven.instance->executions.clear();
  }
  std::vector<Handle> asked = handles;  // a backend may write to it
  std::string error;
  const int code = said(driven.execute(driven.instance->handle, asked.data(), count), &error);
  {
    std::lock_guard<std::mutex> held(driven.instance->lock);
    driven.instance->executing = false;
    *executions = driven.instance->executions.data();
    *execution_count = uint32_t(driven.instance->executions.size());
  }
  if (code != COMPILED_FINE) {  // the requests are the host's again
    for (uint32_t i = 0; i < count; i++) {
      {
        std::lock_guard<std::mutex> held(replies[i]->lock);
        replies[i]->answered = true;
        replies[i]->known = false;
      }
      take<Request>(handles[i]);
    }
    return put(code, error, text, room);
  }
  std::vector<Unsettled> gone;  // its end may call the host: after the lock
  std::lock_guard<std::mutex> held(settling);
  gone.swap(unsettled);
  for (uint32_t i = 0; i < count; i++) unsettled.push_back({given[i].handle, replies[i], nullptr});
  return COMPILED_FINE;
}

int waits(uint64_t handle) {
  std::lock_guard<std::mutex> held(settling);
  for (Unsettled& one : unsettled) {
    if (one.handle != handle) continue;
    std::lock_guard<std::mutex> held_too(one.reply->lock);
    return !one.reply->direct && one.reply->sent.empty() && !one.reply->closed();
  }
  return 0;
}

void settle(uint64_t handle, compiled_settled* settled) {
  *settled = {};
  settled->outcome = COMPILED_LOST;
  std::vector<std::shared_ptr<Response>> sent;  // the end of one may call the host: after the locks
  std::lock_guard<std::mutex> held(settling);
  for (Unsettled& one : unsettled) {
    if (one.handle != handle) continue;
    Reply& reply = *one.reply;
    std::lock_guard<std::mutex> held_too(reply.lock);
    reply.settled = true;
    settled->released = reply.released;
    if (reply.again) {
      settled->outcome = COMPILED_AGAIN;
      reply.known = false;
    } else if (reply.direct) {
      settled->outcome = COMPILED_OPEN;
    } else if (!reply.sent.empty()) {  // one response answers it; what follows is an error of the backend's
      sent.swap(reply.sent);
      one.answer = sent.front();
      reply.answered = true;
      reply.known = !reply.released;  // the host keeps the inputs until the last reference goes
      settled->outcome = COMPILED_ANSWERED;
      one.answer->show(&settled->response);
      settled->response.later = reply.finish(&settled->stated);
    } else if (!reply.answered) {
      reply.direct = reply.known = true;
      settled->outcome = COMPILED_OPEN;
    } else {
      reply.finish(&settled->stated);
    }
    return;
  }
}

void carried(uint64_t handle) {
  std::lock_guard<std::mutex> held(settling);
  for (Unsettled& one : unsettled) {
    if (one.handle == handle && one.answer) one.answer->carried();
  }
}

// The last reference to the reply may go here: the host is told then that nobody answers the request.
void dropped(uint64_t handle) {
  Unsettled gone = {};
  std::lock_guard<std::mutex> held(settling);
  for (Unsettled& one : unsettled) {
    if (one.handle == handle) std::swap(gone, one);
  }
}

void finish(char* text, size_t room) {
  if (room > 0) *text = 0;
  if (driven.instance_begun) called(driven.instance_finalize, driven.instance->handle, text, room);
  close_strategy();
  if (driven.model_begun) called(driven.model_finalize, driven.model->handle, text, room);
  if (driven.backend_begun) called(driven.finalize, driven.backend->handle, text, room);
  driven.instance_begun = driven.model_begun = driven.backend_begun = false;
}

}  // namespace
}  // namespace compiled

API const compiled_library* neptrio_compiled_library() {
  using namespace compiled;
  static const compiled_library functions = {hosted,      begin,   config, groups, manner,  instance, ready,
                                             together_of, execute, waits,  settle, dropped, carried,  deliver, finish};
  return &functions;
}
