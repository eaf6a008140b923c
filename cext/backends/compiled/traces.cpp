// Traces: who a request is in them, and what a backend adds.
//
// A child that a backend spawns stands for the trace of a request that it is about to make. The server numbers it when that
// request begins; until then it has neither an id nor activities.
#include "objects.h"

using namespace compiled;

API Failed TRITONSERVER_InferenceTraceId(Handle trace, uint64_t* id) {
  FOUND(Trace, found, trace);
  GIVEN(id);
  if (!found->kept) return unsupported(__func__, "of a trace whose request has not begun");
  *id = found->id;
  return nullptr;
}

TELLS(TRITONSERVER_InferenceTraceParentId, Trace, uint64_t, found->parent)
TELLS(TRITONSERVER_InferenceTraceModelName, Trace, const char*, found->model.c_str())
TELLS(TRITONSERVER_InferenceTraceModelVersion, Trace, int64_t, found->version)
TELLS(TRITONSERVER_InferenceTraceRequestId, Trace, const char*, found->request.c_str())

API Failed TRITONSERVER_InferenceTraceContext(Handle trace, const char** context) {
  FOUND(Trace, found, trace);
  GIVEN(context);
  std::lock_guard<std::mutex> held(found->lock);
  *context = found->contexts.back().c_str();
  return nullptr;
}

API Failed TRITONSERVER_InferenceTraceSetContext(Handle trace, const char* context) {
  FOUND(Trace, found, trace);
  if (context == nullptr) return missing(__func__, "the context");
  std::lock_guard<std::mutex> held(found->lock);
  found->contexts.push_back(context);
  return nullptr;
}

API Failed TRITONSERVER_InferenceTraceReportActivity(Handle trace, uint64_t ns, const char* name) {
  FOUND(Trace, found, trace);
  if (name == nullptr) return missing(__func__, "the activity's name");
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
  {
    std::lock_guard<std::mutex> held(found->lock);
    made->contexts.push_back(found->contexts.back());
  }
  *child = add(made);
  return nullptr;
}

API Failed TRITONSERVER_InferenceTraceDelete(Handle trace) {
  const auto found = find<Trace>(trace);
  if (found && found->kept) return fail(INVALID_ARG, std::string(__func__) + ": the trace belongs to the request");
  return trace == nullptr || take<Trace>(trace) ? nullptr : missing(__func__, "Trace handle");
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
