// What the handles of the interface stand for, and the table in which they are looked up.
//
// The problem: a backend is foreign code, and what it hands in is not believed. A pointer that was freed, of another type, or
// made up must be an error and not a crash, and must never reach what another request owns. The choice: the pointers that a
// backend gets are no addresses but numbers of a table's rows with a count of how often the row was used; whoever follows one
// faults at once, since no address looks like that.
//
// Rules:
//  1. find<T>() is the only way from a handle to an object, and gives a reference that keeps it, whatever other threads do.
//  2. No lock of the library is held while the host or the backend is called.
//  3. To delete nothing (null) is no error for what the interface calls TRITONSERVER, as there.
//  4. What a function returns a pointer into (names, shapes, buffers) lives as long as the object of the handle.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "interface.h"

#define API extern "C" __attribute__((visibility("default")))

namespace compiled {

enum class Kind : uint8_t {
  NONE, ERROR, MESSAGE, PARAMETER, ATTRIBUTES, MANAGER, BACKEND, BACKEND_ATTRIBUTE, MODEL, INSTANCE, SERVER, REQUEST, INPUT,
  RESPONSE, OUTPUT, FACTORY, STATE, STATISTICS, TRACE, FAMILY, METRIC, METRIC_ARGUMENTS, ALLOCATOR, CALL, CALL_RESPONSE,
  CACHE_ENTRY, CACHE_ALLOCATOR, METRICS
};

enum Code { UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED };
enum Memory { CPU, CPU_PINNED, GPU };
enum Datatype { INVALID = 0, BYTES = 13, LAST_DATATYPE = 14 };
enum ParameterType { STRING, INT, BOOL, RAW, DOUBLE };
enum Policy { BLOCKING, DEVICE_BLOCKING };
enum { VERBOSE = 3 };  // the last level of the log
enum { MOST_EXECUTIONS = 1024 };  // that are reported in one
enum { FINAL = 1, RELEASE_ALL = 1, RELEASE_RESCHEDULE = 2 };

typedef void* Handle;  // what a backend sees
typedef Handle Failed;  // a TRITONSERVER_Error*, null for none

struct Object {
  explicit Object(Kind kind) : kind(kind) {}
  virtual ~Object() = default;
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  const Kind kind;
  Handle handle = nullptr;
};

Handle enter(std::shared_ptr<Object> object);
std::shared_ptr<Object> found(Handle handle, Kind kind);
// takes the row out, for good; null where there was none, so that of two who release only one does
std::shared_ptr<Object> leave(Handle handle, Kind kind);

template <class T>
std::shared_ptr<T> find(Handle handle) {
  return std::static_pointer_cast<T>(found(handle, T::KIND));
}

template <class T>
std::shared_ptr<T> take(Handle handle) {
  return std::static_pointer_cast<T>(leave(handle, T::KIND));
}

template <class T>
Handle add(const std::shared_ptr<T>& object) {
  return object->handle = enter(object);
}

Failed fail(int code, const std::string& text);
Failed missing(const char* function, const char* what);
Failed unsupported(const char* function, const char* why = nullptr);
inline std::string text_of(const char* text) { return text == nullptr ? std::string() : std::string(text); }
int put(int code, const std::string& error, char* text, size_t room);
// what an error says, and the error is gone; FINE for none
int said(Failed error, std::string* text);

struct Error : Object {
  static constexpr Kind KIND = Kind::ERROR;
  Error(int code, std::string text) : Object(KIND), code(code), text(std::move(text)) {}
  const int code;
  const std::string text;
};

struct Message : Object {
  static constexpr Kind KIND = Kind::MESSAGE;
  Message(std::string json, bool kept) : Object(KIND), json(std::move(json)), kept(kept) {}
  const std::string json;
  const bool kept;  // the server's: not the backend's to delete
};

struct Value {
  std::string name;
  int type = STRING;
  std::string string;
  int64_t integer = 0;
  bool boolean = false;
  double number = 0;
  const void* address() const;
};
Value value_of(const compiled_parameter& given);
compiled_parameter given_of(const Value& value);
std::vector<compiled_parameter> given_of(const std::vector<Value>& values);

struct Parameter : Object {
  static constexpr Kind KIND = Kind::PARAMETER;
  Parameter() : Object(KIND) {}
  Value value;
};

struct Attributes : Object {
  static constexpr Kind KIND = Kind::ATTRIBUTES;
  explicit Attributes(bool kept) : Object(KIND), kept(kept) {}
  const bool kept;
  int type = CPU;
  int64_t id = 0;
  size_t size = 0;
  void* cuda = nullptr;
};

// ---------------------------------------------------------------- tensors

struct Tensor {
  std::string name;
  int datatype = INVALID;
  std::vector<int64_t> shape;
  const void* data = nullptr;
  size_t size = 0;
};
// an error for a size that no memory has, as of a number below 0; whoever goes on would throw, or read far beyond the end
Failed beyond(const char* function, uint64_t size);
// a tensor's name and shape as the backend says them; an error where there is no such shape
Failed shape_of(const char* function, const char* name, const int64_t* shape, uint64_t dims, Tensor* made);
bool whole(const Tensor& tensor, std::string* why);  // its bytes are what its datatype and shape say
size_t datatype_size(int datatype);
const char* datatype_name(int datatype);

struct Attached {  // the attributes of a buffer, made when they are asked for
  ~Attached();
  Handle attributes(size_t size);
  std::mutex lock;
  std::shared_ptr<Attributes> made;
};

struct Input : Object {
  static constexpr Kind KIND = Kind::INPUT;
  Input() : Object(KIND) {}
  Tensor tensor;
  Attached attached;
};

// Memory that a backend writes to: the host's, which a response can carry, or the library's own.
struct Buffer {
  ~Buffer();
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  bool allocate(size_t size);
  void* data = nullptr;
  size_t size = 0;
  void* token = nullptr;
  bool asked = false;
};

struct Output : Object {
  static constexpr Kind KIND = Kind::OUTPUT;
  Output() : Object(KIND) {}
  Tensor tensor;
  Buffer buffer;
  Attached attached;
};

struct State;

// What is left of a request where it is answered: requests, factories and responses share it.
struct Reply {
  ~Reply();
  // these two with its lock. Nothing more may be sent: where responses go at once, a request that was given back takes them as long as
  // the host knows it by its key, until settle()
  bool closed() const { return answered || (again && (settled || !direct)); }
  bool finish(compiled_stated* told);  // the last response goes. True where statistics may still be reported
  uint64_t key = 0;
  std::mutex lock;
  bool single = false;   // one response answers it
  bool direct = false;   // responses are handed to the host at once
  bool settled = false;  // the host has looked at it after Execute; before that it holds the inputs itself
  bool answered = false;  // nothing more may be sent
  bool released = false;
  bool again = false;  // given back, to be executed again
  bool final = false;
  bool known = false;  // the host has to be told when nothing is left that could answer it
  bool over = false;   // its last response was handed to the host
  uint32_t reported = 0;  // responses whose statistics were
  compiled_stated stated = {};
  std::vector<std::shared_ptr<struct Response>> sent;
  std::vector<std::shared_ptr<State>> states;  // updated, and not sent yet
};

struct Response : Object {
  static constexpr Kind KIND = Kind::RESPONSE;
  Response() : Object(KIND) {}
  ~Response() override;
  std::shared_ptr<Reply> reply;  // null once it is sent
  std::vector<std::shared_ptr<Output>> outputs;
  std::vector<std::shared_ptr<State>> states;
  std::vector<Value> parameters;
  int code = COMPILED_FINE;
  std::string error;
  uint32_t flags = 0;
  // as the host sees it
  std::vector<compiled_tensor> shown;
  std::vector<compiled_parameter> shown_parameters;
  void show(compiled_response* response);
  void carried();
};

struct State : Object {
  static constexpr Kind KIND = Kind::STATE;
  State() : Object(KIND) {}
  std::weak_ptr<Reply> reply;
  Tensor tensor;
  Buffer buffer;
  Attached attached;
};

struct Trace;  // traces.h

struct Request : Object {
  static constexpr Kind KIND = Kind::REQUEST;
  Request() : Object(KIND) {}
  ~Request() override;
  std::shared_ptr<Reply> reply;
  std::string id;
  uint64_t correlation = 0;
  bool correlation_is_text = false;
  std::string correlation_text;
  uint32_t flags = 0;
  uint64_t timeout_us = 0;
  std::vector<std::shared_ptr<Input>> inputs;
  std::vector<std::string> outputs;
  std::vector<Value> parameters;
  std::vector<std::shared_ptr<State>> states;  // made for it
  std::mutex lock;                             // of `states`
  std::shared_ptr<Trace> trace;
  // what settle() has given to the host
  std::shared_ptr<Response> answer;
};

struct Factory : Object {
  static constexpr Kind KIND = Kind::FACTORY;
  Factory() : Object(KIND) {}
  std::shared_ptr<Reply> reply;
};

// ---------------------------------------------------------------- what is served

struct Server : Object {
  static constexpr Kind KIND = Kind::SERVER;
  Server() : Object(KIND) {}
};

struct Manager : Object {
  static constexpr Kind KIND = Kind::MANAGER;
  Manager() : Object(KIND) {}
};

struct Backend : Object {
  static constexpr Kind KIND = Kind::BACKEND;
  Backend() : Object(KIND) {}
  std::string name, folder;
  std::shared_ptr<Message> config;
  std::shared_ptr<Manager> manager;
  int policy = BLOCKING;
  void* state = nullptr;
};

struct BackendAttribute : Object {
  static constexpr Kind KIND = Kind::BACKEND_ATTRIBUTE;
  BackendAttribute() : Object(KIND) {}
  std::vector<compiled_group> groups;
  bool parallel = false;
};

struct Model : Object {
  static constexpr Kind KIND = Kind::MODEL;
  Model() : Object(KIND) {}
  std::string name, repository;
  uint64_t version = 0;
  bool auto_complete = false;
  std::mutex lock;
  bool settable = false;  // ModelInitialize runs
  std::string config;
  std::shared_ptr<Backend> backend;
  std::shared_ptr<Server> server;
  std::vector<compiled_memory> memory, instance_memory;  // as it was reported last
  void* state = nullptr;
};

struct Instance : Object {
  static constexpr Kind KIND = Kind::INSTANCE;
  Instance() : Object(KIND) {}
  std::string name;
  int kind = 0;
  int32_t device = 0;
  bool passive = false;
  std::shared_ptr<Message> host_policy;
  std::vector<std::string> profiles;
  std::vector<std::pair<std::string, int64_t>> secondary;
  std::shared_ptr<Model> model;
  void* state = nullptr;
  std::mutex lock;
  bool executing = false;
  std::vector<compiled_execution> executions;  // reported meanwhile
};

extern compiled_host host;  // set once, before a backend is opened

// batching.cpp; together(): how many of the first of `count` requests are one batch, at least 1
int open_strategy(const char* path, Handle model, char* text, size_t room);
uint32_t together(uint32_t count, const std::function<Handle(uint32_t)>& request);
void close_strategy();

// infer.cpp
void deliver(uint64_t call, const compiled_response* response, int final, const compiled_passed* passed);

}  // namespace compiled

// how functions of the interface begin: the object behind a handle, and that there is a place for a result
#define FOUND(TYPE, NAME, HANDLE)                 \
  const auto NAME = find<TYPE>(HANDLE);           \
  if (!NAME) return missing(__func__, #TYPE " handle")

#define GIVEN(POINTER) \
  if ((POINTER) == nullptr) return missing(__func__, "a pointer for a result")

// Functions that tell one thing of the object behind their handle (`found`), set a field of it, or release it (rule 3).
#define TELLS(NAME, TYPE, RESULT, VALUE)         \
  API Failed NAME(Handle handle, RESULT* told) { \
    FOUND(TYPE, found, handle);                  \
    GIVEN(told);                                 \
    *told = VALUE;                               \
    return nullptr;                              \
  }

#define SETS(NAME, TYPE, ARGUMENT, FIELD)          \
  API Failed NAME(Handle handle, ARGUMENT value) { \
    FOUND(TYPE, found, handle);                    \
    found->FIELD = value;                          \
    return nullptr;                                \
  }

#define DELETES(NAME, TYPE)                                                                        \
  API Failed NAME(Handle handle) {                                                                 \
    return handle == nullptr || take<TYPE>(handle) ? nullptr : missing(__func__, #TYPE " handle"); \
  }

// one that adds a parameter with the file's own set(function, handle, name, value)
#define SETS_NUMBER(NAME, ARGUMENT, KIND, FIELD)                      \
  API Failed NAME(Handle handle, const char* name, ARGUMENT number) { \
    Value value;                                                      \
    value.type = KIND;                                                \
    value.FIELD = number;                                             \
    return set(__func__, handle, name, value);                        \
  }
