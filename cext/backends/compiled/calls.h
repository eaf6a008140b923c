// What allocators.cpp, calls.cpp, infer.cpp and served.cpp share: requests of a backend's own, and their responses.
#pragma once

#include <map>

#include "objects.h"

namespace compiled {

typedef Failed (*AllocateFn)(Handle, const char*, size_t, int, int64_t, void*, void**, void**, int*, int64_t*);
typedef Failed (*ReleaseFn)(Handle, void*, void*, size_t, int, int64_t);
typedef Failed (*QueryFn)(Handle, void*, const char*, size_t*, int*, int64_t*);
typedef Failed (*AttributesFn)(Handle, const char*, Handle, void*, void*);
typedef Failed (*StartFn)(Handle, void*);
typedef void (*ReleasedFn)(Handle, uint32_t, void*);
typedef void (*RespondedFn)(Handle, uint32_t, void*);

struct Allocator : Object {
  static constexpr Kind KIND = Kind::ALLOCATOR;
  Allocator() : Object(KIND) {}
  AllocateFn allocate = nullptr;
  ReleaseFn release = nullptr;
  StartFn start = nullptr;
  QueryFn query = nullptr;
  AttributesFn attributes = nullptr;
};

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

struct CallOutput {
  Tensor tensor;
  void* buffer = nullptr;
  void* with = nullptr;
  int type = CPU;
  int64_t id = 0;
};

// allocators.cpp; both return an error's code, and its text in `error`
// asks where the output is wanted, and has memory for it allocated there, unless that is a device's, which would need a copy
int allocated(Allocator& allocator, void* with, CallOutput& output, std::string* error);
// has the buffer's attributes completed by who allocated it, where it wants to
int attributed(Allocator& allocator, void* with, CallOutput& output, std::string* error);

struct CallResponse : Object {
  static constexpr Kind KIND = Kind::CALL_RESPONSE;
  CallResponse() : Object(KIND) {}
  ~CallResponse() override;
  std::shared_ptr<Allocator> allocator;
  std::vector<CallOutput> outputs;
  std::vector<Value> parameters;
  std::string model, id;
  int64_t version = -1;
  std::shared_ptr<Error> error;
  std::mutex lock;
  std::map<uint32_t, std::vector<std::string>> labels;  // of outputs of which one was asked for
};

}  // namespace compiled
