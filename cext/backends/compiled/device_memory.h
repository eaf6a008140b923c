// Memory of GPUs and page-locked memory (device_memory.cpp).
#ifndef NEPTRIO_COMPILED_DEVICE_MEMORY_H
#define NEPTRIO_COMPILED_DEVICE_MEMORY_H

#include "objects.h"

namespace compiled {

// The errors name `function`: UNSUPPORTED without a GPU, INVALID_ARG for one that is not there, UNAVAILABLE without memory.
Failed allocate_on_device(const char* function, int64_t id, uint64_t size, void** buffer);
Failed free_on_device(const char* function, int64_t id, void* buffer);

// false: it has to be ordinary memory, and was
bool allocate_locked(uint64_t size, void** buffer);
bool free_locked(void* buffer);

}  // namespace compiled

#endif
