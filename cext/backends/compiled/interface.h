/* What the process of a model (host.pyx) and the library that Triton's compiled backends are bound to say to each other.
 *
 * The library (the .cpp files here) exports the TRITONBACKEND_* and TRITONSERVER_* functions and knows nothing of Python. It is
 * asked for its table of functions by one exported name, and is given a table of functions of the host.
 *
 * Rules:
 *  1. A function of the host may be called from any thread, without the GIL, and never while a lock of the library is held.
 *  2. Who is given a `text` with its `room` writes an error's text there, cut off and ended with 0; the result is then the
 *     error's code, and FINE otherwise.
 *  3. Strings and arrays in structures belong to who made the structure, and are copied by the other before it returns.
 *     `data` of inputs is the exception: it stays until the host is told that the request is released.
 */
#ifndef NEPTRIO_COMPILED_INTERFACE_H
#define NEPTRIO_COMPILED_INTERFACE_H

#include <stddef.h>
#include <stdint.h>

enum { COMPILED_FINE = -1 };

/* as TRITONSERVER numbers them; a parameter's value is one of the last five */
struct compiled_parameter {
  const char* name;
  int type;
  const char* string; /* STRING and BYTES */
  size_t size;        /* of `string` */
  int64_t integer;
  int boolean;
  double number;
};

struct compiled_tensor {
  const char* name;
  int datatype;
  const int64_t* shape;
  uint32_t dims;
  const void* data;
  size_t size;
  void* token; /* what the host's allocate() gave with `data`; NULL for memory of the library's */
};

struct compiled_request {
  uint64_t key; /* the host's name for it */
  const char* id;
  uint64_t correlation;
  const char* correlation_text; /* NULL where it is a number */
  uint32_t flags;
  uint64_t timeout_us;
  int traced;
  uint64_t trace, trace_parent; /* ids */
  const char* context; /* of the trace, NULL for none */
  struct compiled_tensor* inputs;
  uint32_t input_count;
  const char** outputs;
  uint32_t output_count;
  struct compiled_parameter* parameters;
  uint32_t parameter_count;
  int direct; /* each response is handed to the host's respond() at once */
  uint64_t handle; /* 0; set by together() and execute() */
};

struct compiled_times { uint64_t exec_start, compute_start, compute_end, exec_end; };

/* what a backend has reported of a request */
struct compiled_stated {
  int said; /* 0: nothing */
  int success;
  struct compiled_times times;
};

/* an execution, as a backend has reported it */
struct compiled_execution {
  uint64_t size;
  struct compiled_times times;
};

struct compiled_response {
  int code; /* of the error, FINE for none */
  const char* error;
  uint32_t flags;
  int null; /* flags alone */
  struct compiled_tensor* outputs; /* with the states that were updated */
  uint32_t output_count;
  struct compiled_parameter* parameters;
  uint32_t parameter_count;
  /* of the last response: what was reported of the request before it, and whether that is still to come */
  struct compiled_stated stated;
  int later;
};

/* what became of a request when the backend's Execute had returned: see settle() */
enum compiled_outcome {
  COMPILED_ANSWERED, /* the response is in the structure, until dropped() */
  COMPILED_OPEN,     /* the backend answers by respond(), later, or did so where it is direct */
  COMPILED_AGAIN,    /* released to be executed again */
  COMPILED_LOST      /* released, and nothing is left that could answer it */
};

struct compiled_settled {
  enum compiled_outcome outcome;
  int released;
  struct compiled_response response;
  struct compiled_stated stated; /* unless it is open, or to be executed again */
};

/* a request that the backend makes; `call` is its name for deliver() */
struct compiled_call {
  uint64_t call;
  const char* model;
  int64_t version;
  uint64_t trace_key; /* the host's key of the request whose trace it belongs to, 0 for none */
  const char* id;
  uint64_t correlation;
  const char* correlation_text;
  uint32_t flags;
  uint64_t timeout_us;
  uint64_t priority;
  struct compiled_tensor* inputs;
  uint32_t input_count;
  int raw; /* the only input is what the model's configuration says; its bytes are behind their number in 4 bytes */
  const char** outputs;
  uint32_t output_count;
  struct compiled_parameter* parameters;
  uint32_t parameter_count;
  int timed; /* its last response comes with its times */
};

/* points in time of a request, as the interface numbers them: from its start to its end */
enum { COMPILED_STAGES = 7 };

/* when a request that the backend has made was where, in nanoseconds, 0: nowhere near; and the version that has executed it, below 0:
 * none */
struct compiled_passed { uint64_t stages[COMPILED_STAGES]; int64_t version; };

struct compiled_memory { int type; int64_t id; uint64_t size; };

enum compiled_reported { COMPILED_SUCCEEDED, COMPILED_FAILED, COMPILED_EMPTY, COMPILED_CANCELLED };

/* durations of a response, which is the `place`th of its request, from 0 */
struct compiled_durations {
  uint32_t place;
  enum compiled_reported outcome;
  uint64_t computing_ns, output_ns;
};

enum compiled_subject {
  COMPILED_READY,
  COMPILED_SERVER,
  COMPILED_METADATA,
  COMPILED_CONFIG,
  COMPILED_STATISTICS,
  COMPILED_INDEX,
  COMPILED_READY_INDEX,
  COMPILED_BATCHING,
  COMPILED_METRICS /* which are text, not JSON */
};

enum compiled_metric_change { COMPILED_INCREMENT, COMPILED_SET, COMPILED_OBSERVE, COMPILED_VALUE };

struct compiled_host {
  int (*respond)(uint64_t key, const struct compiled_response* response, char* text, size_t room);
  void (*released)(uint64_t key);
  /* nothing is left that could answer it; `stated` is what was reported of it */
  void (*forgotten)(uint64_t key, const struct compiled_stated* stated);
  void (*stated)(uint64_t key, const struct compiled_stated* stated); /* of a request whose last response has gone */
  void (*activity)(uint64_t key, uint64_t ns, const char* name); /* of a request's trace */
  void (*executed)(const struct compiled_execution* execution);       /* reported while nothing is executed */
  int (*cancelled)(uint64_t key);
  /* memory that a response can carry as it is; NULL where there is none, and the library takes its own. It is asked for more
   * than `shared_above` bytes only: less is copied in any case */
  size_t shared_above;
  void* (*allocate)(size_t size, void** token);
  void (*unused)(void* token); /* of memory that no response has carried away */
  void (*log)(int level, const char* file, int line, const char* text);
  const volatile unsigned char* shown; /* of each level of the log: whether lines are shown now; NULL: all that are told may be */
  /* all that the model and its instance hold, by what they have reported last */
  void (*memory)(const struct compiled_memory* held, uint32_t count);
  void (*measured)(const struct compiled_durations* durations);
  int (*family)(int kind, const char* name, const char* description, uint64_t* id, char* text, size_t room);
  int (*metric)(uint64_t family, const struct compiled_parameter* labels, uint32_t count, const double* buckets,
                uint32_t bucket_count, int bucketed, uint64_t* id, char* text, size_t room);
  int (*change)(uint64_t metric, int what, double value, double* found, char* text, size_t room);
  void (*forget_metric)(uint64_t id); /* a family's or a metric's */
  int (*infer)(const struct compiled_call* call, char* text, size_t room);
  void (*cancel_call)(uint64_t call);
  int (*load)(const char* model, const struct compiled_parameter* given, uint32_t count, char* text, size_t room);
  int (*unload)(const char* model, int dependents, char* text, size_t room);
  int (*ready)(const char* model, int64_t version, int* found, char* text, size_t room);
  /* what the server says of itself or of a model, as JSON, by compiled_subject: given to `take` before it returns. `version` below 0: any */
  int (*describe)(int subject, const char* model, int64_t version,
                  void (*take)(void* with, const char* json, size_t size), void* with, char* text, size_t room);
  /* the labels of an output's classes, each ended with 0; as describe() */
  int (*labels)(const char* model, int64_t version, const char* output,
                void (*take)(void* with, const char* texts, size_t size), void* with, char* text, size_t room);
  int (*decoupled)(const char* model, int64_t version, int* found, char* text, size_t room);
};

struct compiled_start {
  const char* library;
  const char* folder; /* of the library */
  const char* backend;
  const char* backend_config; /* JSON */
  const char* model;
  uint64_t version;
  const char* repository; /* the model's folder */
  const char* config;     /* JSON */
  int auto_complete;
  const char* strategy; /* the library that decides which requests are executed together, "" for none */
};

struct compiled_instance {
  const char* name;
  int kind;
  int32_t device;
  const char* host_policy; /* JSON */
  int passive;
  const char** profiles;
  uint32_t profile_count;
  const char** secondary_kinds;
  const int64_t* secondary_ids;
  uint32_t secondary_count;
};

struct compiled_group { int kind; uint64_t count; };

/* what a backend has said of itself when it began */
struct compiled_manner {
  int device_blocking; /* its execution policy */
  int parallel_loading; /* of instances */
};

struct compiled_library {
  void (*hosted)(const struct compiled_host* host);
  int (*begin)(const struct compiled_start* start, char* text, size_t room);
  /* the configuration after begin(): valid until finish() */
  const char* (*config)(void);
  /* the instance groups that the backend prefers, at most `room` of them; the result is their number */
  uint32_t (*groups)(struct compiled_group* groups, uint32_t room);
  void (*manner)(struct compiled_manner* manner); /* after begin() */
  int (*instance)(const struct compiled_instance* instance, char* text, size_t room);
  int (*ready)(char* text, size_t room);
  /* how many of the first requests are to be executed together, at least one: all where there is no strategy */
  uint32_t (*together)(struct compiled_request* requests, uint32_t count);
  /* `executions` are those that were reported meanwhile: valid until the next call */
  int (*execute)(struct compiled_request* requests, uint32_t count, const struct compiled_execution** executions,
                 uint32_t* execution_count, char* text, size_t room);
  int (*waits)(uint64_t handle); /* it has no answer yet, and is not direct */
  void (*settle)(uint64_t handle, struct compiled_settled* settled);
  void (*dropped)(uint64_t handle); /* the host is done with what settle() gave */
  void (*carried)(uint64_t handle); /* the tokens of its response are the host's now */
  /* a response to a call; `response` NULL for the final flag alone. `passed` comes with the last response of one that is timed */
  void (*deliver)(uint64_t call, const struct compiled_response* response, int final, const struct compiled_passed* passed);
  void (*finish)(char* text, size_t room);
};

#endif
