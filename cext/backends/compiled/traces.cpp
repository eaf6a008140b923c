// Traces: who a request is in them, what a backend adds, and those that a backend makes for requests of its own.
//
// A child of the request's trace stands for that of a request which the backend is about to make. The server numbers it when that
// request begins; until then it has neither an id nor activities.
//
// A trace that the backend has made itself is known to this process alone: the server says with the last response when the request
// was where (infer.cpp), and the trace's functions are called then.
// Rules, beside those of objects.h:
//  1. Ids of a backend's own are no id of the server's, which count from 1.
//  2. A trace belongs to its request from TRITONSERVER_ServerInferAsync, whatever that returns, to the one call of the function that
//     releases it. Where there is none the trace is deleted instead.
//  3. An activity that the backend reports of its own trace goes to its activity function. The name is in the trace's context for
//     as long as that runs: a member whose key is the time.
#include "traces.h"

#include <time.h>
#include <unistd.h>

namespace compiled {

void Texts::set(const std::string& text) {
  std::lock_guard<std::mutex> held(lock);
  if (all.empty() || all.back() != text) all.push_back(text);
}

const char* Texts::last() {
  std::lock_guard<std::mutex> held(lock);
  return all.empty() ? "" : all.back().c_str();
}

void tell_time(Trace& trace, int activity, uint64_t ns) {
  const Watch& watch = *trace.watch;
  if (ns != 0 && watch.activity != nullptr) watch.activity(trace.handle, activity, ns, watch.with);
}

void tell_tensor(Trace& trace, int activity, const Tensor& tensor, const void* base, int type, int64_t id) {
  const Watch& watch = *trace.watch;
  if (watch.tensor == nullptr) return;
  watch.tensor(trace.handle, activity, tensor.name.c_str(), tensor.datatype, base, tensor.size, tensor.shape.data(),
               tensor.shape.size(), type, id, watch.with);
}

void end_trace(Trace& trace) {
  const TraceReleasedFn released = trace.watch->released;
  trace.away = false;
  if (released != nullptr) {
    released(trace.handle, trace.watch->with);
  } else {
    take<Trace>(trace.handle);
  }
}

// Rule 1: this process's number, and a count that begins with the time, since numbers of processes are used again.
static uint64_t next_id() {
  static std::atomic<uint64_t> last([] {
    timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    const uint64_t milliseconds = uint64_t(time.tv_sec) * 1000 + uint64_t(time.tv_nsec) / 1000000;
    return uint64_t(1) << 62 | uint64_t(getpid()) << 40 | (milliseconds & ((uint64_t(1) << 39) - 1));
  }());
  return ++last;
}

// Rule 3: the context of a trace while an activity of it is reported.
struct Reporting {
  Reporting(const Trace* of, std::string context) : of(of), context(std::move(context)), before(now) { now = this; }
  ~Reporting() { now = before; }
  Reporting(const Reporting&) = delete;
  Reporting& operator=(const Reporting&) = delete;
  const Trace* const of;
  const std::string context;
  const Reporting* const before;
  static thread_local const Reporting* now;
};
thread_local const Reporting* Reporting::now = nullptr;

static std::string quoted(const char* text) {
  std::string made = "\"";
  for (; *text != 0; text++) {
    char code[8];
    if (static_cast<unsigned char>(*text) < 0x20) {
      snprintf(code, sizeof code, "\\u%04x", unsigned(*text));
      made += code;
    } else {
      if (*text == '"' || *text == '\\') made += '\\';
      made += *text;
    }
  }
  return made + '"';
}

// a context that is an object, with one more member; one that is none is not looked at
static std::string with_member(const std::string& context, uint64_t ns, const char* name) {
  const std::string member = "\"" + std::to_string(ns) + "\":" + quoted(name) + "}";
  const size_t begin = context.find_first_not_of(" \t\r\n"), end = context.find_last_not_of(" \t\r\n");
  if (begin == std::string::npos || context[begin] != '{' || context[end] != '}' || begin == end) return "{" + member;
  const size_t last = context.find_last_not_of(" \t\r\n", end - 1);
  return context.substr(0, last + 1) + (context[last] == '{' ? "" : ",") + member;
}

static Failed made_by_backend(const char* function, Handle* trace, int level, uint64_t parent, const Watch& watch) {
  if (trace == nullptr) return missing(function, "a pointer for a result");
  const auto watching = std::make_shared<Watch>(watch);
  if (!(level & (MIN | MAX | TIMESTAMPS))) watching->activity = nullptr;
  if (!(level & TENSORS)) watching->tensor = nullptr;
  const auto made = std::make_shared<Trace>();
  made->kept = false;
  made->id = next_id();
  made->parent = parent;
  made->watch = watching;
  *trace = add(made);
  return nullptr;
}

}  // namespace compiled

using namespace compiled;

API Failed TRITONSERVER_InferenceTraceNew(Handle* trace, int level, uint64_t parent, ActivityFn activity, TraceReleasedFn released,
                                          void* with) {
  return made_by_backend(__func__, trace, level, parent, {activity, nullptr, released, with});
}

API Failed TRITONSERVER_InferenceTraceTensorNew(Handle* trace, int level, uint64_t parent, ActivityFn activity, TensorFn tensor,
                                                TraceReleasedFn released, void* with) {
  return made_by_backend(__func__, trace, level, parent, {activity, tensor, released, with});
}

API Failed TRITONSERVER_InferenceTraceId(Handle trace, uint64_t* id) {
  FOUND(Trace, found, trace);
  GIVEN(id);
  if (!found->kept && !found->watch) return unsupported(__func__, "of a trace whose request has not begun");
  *id = found->id;
  return nullptr;
}

TELLS(TRITONSERVER_InferenceTraceParentId, Trace, uint64_t, found->parent)
TELLS(TRITONSERVER_InferenceTraceModelName, Trace, const char*, found->model.last())
TELLS(TRITONSERVER_InferenceTraceModelVersion, Trace, int64_t, found->version)
TELLS(TRITONSERVER_InferenceTraceRequestId, Trace, const char*, found->request.last())

API Failed TRITONSERVER_InferenceTraceContext(Handle trace, const char** context) {
  FOUND(Trace, found, trace);
  GIVEN(context);
  *context = found->context.last();
  for (const Reporting* at = Reporting::now; at != nullptr; at = at->before) {
    if (at->of != found.get()) continue;
    *context = at->context.c_str();
    break;
  }
  return nullptr;
}

API Failed TRITONSERVER_InferenceTraceSetContext(Handle trace, const char* context) {
  FOUND(Trace, found, trace);
  if (context == nullptr) return missing(__func__, "the context");
  found->context.set(context);
  return nullptr;
}

API Failed TRITONSERVER_InferenceTraceReportActivity(Handle trace, uint64_t ns, const char* name) {
  FOUND(Trace, found, trace);
  if (name == nullptr) return missing(__func__, "the activity's name");
  if (found->watch) {
    if (found->watch->activity == nullptr) return nullptr;
    const Reporting reporting(found.get(), with_member(found->context.last(), ns, name));
    found->watch->activity(trace, CUSTOM, ns, found->watch->with);
    return nullptr;
  }
  if (!found->kept) return unsupported(__func__, "of a trace whose request has not begun");
  host.activity(found->key, ns, name);
  return nullptr;
}

API Failed TRITONSERVER_InferenceTraceSpawnChildTrace(Handle trace, Handle* child) {
  FOUND(Trace, found, trace);
  GIVEN(child);
  const auto made = std::make_shared<Trace>();
  made->key = found->key;
  made->parent = found->id;
  made->kept = false;
  made->watch = found->watch;
  if (made->watch) made->id = next_id();
  made->context.set(found->context.last());
  *child = add(made);
  return nullptr;
}

API Failed TRITONSERVER_InferenceTraceDelete(Handle trace) {
  if (trace == nullptr) return nullptr;
  FOUND(Trace, found, trace);
  if (found->kept) return fail(INVALID_ARG, std::string(__func__) + ": the trace belongs to the request");
  if (found->away.exchange(true)) {
    return fail(INVALID_ARG, std::string(__func__) + ": the trace belongs to a request until it is released");
  }
  take<Trace>(trace);
  return nullptr;
}

API const char* TRITONSERVER_InferenceTraceLevelString(int level) {
  switch (level) {
    case 0: return "DISABLED";
    case 1: return "MIN";
    case 2: return "MAX";
    case 4: return "TIMESTAMPS";
    case 8: return "TENSORS";
    default: return "<unknown>";
  }
}

API const char* TRITONSERVER_InferenceTraceActivityString(int activity) {
  static const char* const NAMES[] = {"REQUEST_START",      "QUEUE_START", "COMPUTE_START",
                                      "COMPUTE_INPUT_END",  "COMPUTE_OUTPUT_START",
                                      "COMPUTE_END",        "REQUEST_END", "TENSOR_QUEUE_INPUT",
                                      "TENSOR_BACKEND_INPUT", "TENSOR_BACKEND_OUTPUT", "CUSTOM_ACTIVITY"};
  return activity >= 0 && activity <= 10 ? NAMES[activity] : "<unknown>";
}
