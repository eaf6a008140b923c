// Traces of requests: those of the server's own, and those that a backend makes for requests of its own.
#pragma once

#include <atomic>
#include <list>

#include "objects.h"

namespace compiled {

enum Level { MIN = 1, MAX = 2, TIMESTAMPS = 4, TENSORS = 8 };  // the first two are old names of the third
// COMPILED_STAGES of them are points in time, in this order
enum Activity { COMPUTE_START = 2, COMPUTE_INPUT_END = 3, REQUEST_END = 6, QUEUE_INPUT = 7, BACKEND_INPUT = 8, BACKEND_OUTPUT = 9,
                CUSTOM = 10 };

typedef void (*ActivityFn)(Handle, int, uint64_t, void*);
typedef void (*TensorFn)(Handle, int, const char*, int, const void*, size_t, const int64_t*, uint64_t, int, int64_t, void*);
typedef void (*TraceReleasedFn)(Handle, void*);

// What a backend wants to be told of a trace that it has made, and of the children of that.
struct Watch {
  ActivityFn activity;  // null where points in time are not traced
  TensorFn tensor;      // null where tensors are not
  TraceReleasedFn released;
  void* with;
};

// The last of several texts; those before it may still be looked at.
class Texts {
 public:
  void set(const std::string& text);
  const char* last();

 private:
  std::mutex lock;
  std::list<std::string> all;
};

struct Trace : Object {
  static constexpr Kind KIND = Kind::TRACE;
  Trace() : Object(KIND) {}
  uint64_t key = 0, id = 0, parent = 0;
  bool kept = true;  // the request's; else a backend's own, or a child, which has no id before its request begins
  std::atomic<int64_t> version{-1};
  Texts model, request, context;
  // only of a backend's own
  std::shared_ptr<const Watch> watch;
  std::atomic<bool> away{false};  // a request has it, or it is just deleted
};

// What a backend's own trace is told of its request. end_trace() gives it back to the backend, which may delete it at once.
void tell_time(Trace& trace, int activity, uint64_t ns);  // nothing where `ns` is 0
void tell_tensor(Trace& trace, int activity, const Tensor& tensor, const void* base, int type, int64_t id);
void end_trace(Trace& trace);

}  // namespace compiled
