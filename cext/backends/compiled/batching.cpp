// A library that decides which requests are executed together (a batching strategy).
//
// Its five functions are called as a Triton server's dynamic batcher calls them: a batcher for the model; for each batch a start,
// a question for each request in the order in which they wait, and an end. The first request that is not to be included ends the
// batch. What the library does not say is as if it were not there: where it fails, what was offered is one batch.
#include <dlfcn.h>

#include "objects.h"

namespace compiled {
namespace {

struct Strategy {
  Failed (*initialize)(void**, Handle) = nullptr;
  Failed (*finalize)(void*) = nullptr;
  Failed (*begin)(const void*, void**) = nullptr;
  Failed (*include)(Handle, void*, bool*) = nullptr;
  Failed (*end)(void*) = nullptr;
  void* batcher = nullptr;
  bool begun = false;
};

Strategy strategy;

template <class F>
bool found_in(void* library, const char* name, F* function, std::string* missing_one) {
  *function = reinterpret_cast<F>(dlsym(library, name));
  if (*function == nullptr) *missing_one = name;
  return *function != nullptr;
}

bool fine(Failed failed, const char* function) {
  std::string error;
  if (said(failed, &error) == COMPILED_FINE) return true;
  host.log(2, __FILE__, __LINE__, (std::string(function) + " of the batching strategy failed: " + error).c_str());
  return false;
}

}  // namespace

int open_strategy(const char* path, Handle model, char* text, size_t room) {
  if (path == nullptr || *path == 0) return COMPILED_FINE;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return put(INVALID_ARG, std::string("unable to load the batching strategy: ") + text_of(dlerror()), text, room);
  }
  std::string error;
  if (!found_in(library, "TRITONBACKEND_ModelBatcherInitialize", &strategy.initialize, &error) ||
      !found_in(library, "TRITONBACKEND_ModelBatcherFinalize", &strategy.finalize, &error) ||
      !found_in(library, "TRITONBACKEND_ModelBatchInitialize", &strategy.begin, &error) ||
      !found_in(library, "TRITONBACKEND_ModelBatchIncludeRequest", &strategy.include, &error) ||
      !found_in(library, "TRITONBACKEND_ModelBatchFinalize", &strategy.end, &error)) {
    return put(INVALID_ARG, "the batching strategy '" + text_of(path) + "' has no function " + error, text, room);
  }
  const int code = said(strategy.initialize(&strategy.batcher, model), &error);
  strategy.begun = code == COMPILED_FINE;
  return put(code, error, text, room);
}

uint32_t together(uint32_t count, const std::function<Handle(uint32_t)>& request) {
  if (!strategy.begun) return count;
  void* batch = nullptr;
  if (!fine(strategy.begin(strategy.batcher, &batch), "TRITONBACKEND_ModelBatchInitialize")) return count;
  uint32_t included = 0;
  for (; included < count; included++) {
    bool include = false;
    if (!fine(strategy.include(request(included), batch, &include), "TRITONBACKEND_ModelBatchIncludeRequest")) include = false;
    if (!include) break;
  }
  fine(strategy.end(batch), "TRITONBACKEND_ModelBatchFinalize");
  return included > 0 ? included : 1;  // one that is never included would wait for ever
}

void close_strategy() {
  if (strategy.begun) fine(strategy.finalize(strategy.batcher), "TRITONBACKEND_ModelBatcherFinalize");
  strategy.begun = false;
}

}  // namespace compiled
