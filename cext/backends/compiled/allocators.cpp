// Memory for the outputs of the models that a backend calls, which the backend itself allocates.
#include "calls.h"

namespace compiled {

int allocated(Allocator& allocator, void* with, CallOutput& output, std::string* error) {
  int type = CPU;
  int64_t id = 0;
  if (allocator.query != nullptr) {
    size_t size = output.tensor.size;
    const int code = said(allocator.query(allocator.handle, with, output.tensor.name.c_str(), &size, &type, &id), error);
    if (code != COMPILED_FINE) return code;
    if (type != CPU && type != CPU_PINNED) type = CPU, id = 0;
  }
  return said(allocator.allocate(allocator.handle, output.tensor.name.c_str(), output.tensor.size, type, id, with,
                                 &output.buffer, &output.with, &output.type, &output.id), error);
}

int attributed(Allocator& allocator, void* with, CallOutput& output, std::string* error) {
  if (allocator.attributes == nullptr) return COMPILED_FINE;
  const auto attributes = std::make_shared<Attributes>(true);
  attributes->type = output.type;
  attributes->id = output.id;
  attributes->size = output.tensor.size;
  add(attributes);
  const int code = said(allocator.attributes(allocator.handle, output.tensor.name.c_str(), attributes->handle, with, output.with),
                        error);
  take<Attributes>(attributes->handle);
  output.type = attributes->type;
  output.id = attributes->id;
  return code;
}

}  // namespace compiled

using namespace compiled;

API Failed TRITONSERVER_ResponseAllocatorNew(Handle* allocator, AllocateFn allocate, ReleaseFn release, StartFn start) {
  GIVEN(allocator);
  if (allocate == nullptr) return missing(__func__, "the function that allocates");
  const auto made = std::make_shared<Allocator>();
  made->allocate = allocate;
  made->release = release;
  made->start = start;
  *allocator = add(made);
  return nullptr;
}

DELETES(TRITONSERVER_ResponseAllocatorDelete, Allocator)
SETS(TRITONSERVER_ResponseAllocatorSetQueryFunction, Allocator, QueryFn, query)
SETS(TRITONSERVER_ResponseAllocatorSetBufferAttributesFunction, Allocator, AttributesFn, attributes)
