// Memory of GPUs, and page-locked memory, for memory managers: through the driver's library, since nothing else of CUDA is here.
//
// What a backend is given must belong to the context that its own CUDA runtime uses: each GPU's primary one.
//
// Rules:
//  1. The driver is opened when a backend first asks for memory of a GPU. A process that uses no GPU is given ordinary memory
//     where it asks for page-locked memory: a context would cost it hundreds of MiB, and buys nothing without a device.
//  2. The calling thread's own context is afterwards what it was.
//  3. What is page-locked is known by its address, so that memory goes back in the way in which it came.
#include <dlfcn.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "device_memory.h"

namespace compiled {
namespace {

using Context = void*;
using Address = unsigned long long;
enum { PORTABLE = 1 };  // page-locked for all GPUs
enum { OUT_OF_MEMORY = 2, INVALID_DEVICE = 101 };

struct Driver {
  const char* why = nullptr;  // it cannot be used
  int (*init)(unsigned) = nullptr;
  int (*count)(int*) = nullptr;
  int (*state)(int, unsigned*, int*) = nullptr;
  int (*retain)(Context*, int) = nullptr;
  int (*push)(Context) = nullptr;
  int (*pop)(Context*) = nullptr;
  int (*allocate)(Address*, size_t) = nullptr;
  int (*free)(Address) = nullptr;
  int (*lock)(void**, size_t, unsigned) = nullptr;
  int (*unlock)(void*) = nullptr;
  int devices = 0;
};

// a function as it has been since sizes have 64 bits
template <class F>
bool look(void* library, const char* name, F*& function) {
  void* found = dlsym(library, (std::string(name) + "_v2").c_str());
  function = reinterpret_cast<F*>(found != nullptr ? found : dlsym(library, name));
  return function != nullptr;
}

Driver open() {
  Driver d;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    d.why = "there is no driver of a GPU (libcuda.so.1)";
  } else if (!(look(library, "cuInit", d.init) && look(library, "cuDeviceGetCount", d.count) &&
               look(library, "cuDevicePrimaryCtxGetState", d.state) && look(library, "cuDevicePrimaryCtxRetain", d.retain) &&
               look(library, "cuCtxPushCurrent", d.push) && look(library, "cuCtxPopCurrent", d.pop) &&
               look(library, "cuMemAlloc", d.allocate) && look(library, "cuMemFree", d.free) &&
               look(library, "cuMemHostAlloc", d.lock) && look(library, "cuMemFreeHost", d.unlock))) {
    d.why = "the GPU's driver lacks functions that are needed";
  } else if (d.init(0) != 0 || d.count(&d.devices) != 0 || d.devices == 0) {
    d.why = "the GPU's driver knows no GPU";
  }
  return d;
}

const Driver& driver() {
  static const Driver found = open();
  return found;
}

// a GPU's primary context for the calling thread; kept until the process ends
class Current {
 public:
  explicit Current(int64_t id) {
    static std::mutex lock;
    static std::unordered_map<int64_t, Context> known;
    if (id < 0 || id >= driver().devices) {
      failed = INVALID_DEVICE;
      return;
    }
    Context context = nullptr;
    {
      std::lock_guard<std::mutex> held(lock);
      auto at = known.find(id);
      if (at == known.end()) {
        failed = driver().retain(&context, static_cast<int>(id));
        if (failed) return;
        at = known.emplace(id, context).first;
      }
      context = at->second;
    }
    failed = driver().push(context);
    pushed = !failed;
  }
  ~Current() {
    Context mine;
    if (pushed) driver().pop(&mine);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  int failed = 0;

 private:
  bool pushed = false;
};

// a GPU that this process uses; -1 for none
int used() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return -1;
  dlclose(library);
  if (driver().why != nullptr) return -1;
  for (int device = 0; device < driver().devices; device++) {
    unsigned flags;
    int active = 0;
    if (driver().state(device, &flags, &active) == 0 && active) return device;
  }
  return -1;
}

std::mutex locked_lock;
std::unordered_set<void*>& locked() {
  static auto* const found = new std::unordered_set<void*>;  // it outlives what ends with the process
  return *found;
}

Failed refused(const char* function, int failed, int64_t id, uint64_t size) {
  const std::string gpu = "GPU " + std::to_string(id);
  if (failed == INVALID_DEVICE) return fail(INVALID_ARG, std::string(function) + ": there is no " + gpu + " here");
  if (failed == OUT_OF_MEMORY) return fail(UNAVAILABLE, gpu + " has no " + std::to_string(size) + " bytes of memory left");
  return fail(INTERNAL, std::string(function) + ": the driver of " + gpu + " says error " + std::to_string(failed));
}

}  // namespace

Failed allocate_on_device(const char* function, int64_t id, uint64_t size, void** buffer) {
  if (driver().why != nullptr) return unsupported(function, driver().why);
  Address address = 0;
  Current current(id);
  int failed = current.failed;
  if (!failed) failed = driver().allocate(&address, size > 0 ? size : 1);
  if (failed) return refused(function, failed, id, size);
  *buffer = reinterpret_cast<void*>(address);
  return nullptr;
}

Failed free_on_device(const char* function, int64_t id, void* buffer) {
  if (driver().why != nullptr) return unsupported(function, driver().why);
  Current current(id);
  int failed = current.failed;
  if (!failed) failed = driver().free(reinterpret_cast<Address>(buffer));
  return failed ? refused(function, failed, id, 0) : nullptr;
}

bool allocate_locked(uint64_t size, void** buffer) {
  const int device = used();
  if (device < 0) return false;
  Current current(device);
  if (current.failed || driver().lock(buffer, size > 0 ? size : 1, PORTABLE) != 0) return false;
  std::lock_guard<std::mutex> held(locked_lock);
  locked().insert(*buffer);
  return true;
}

bool free_locked(void* buffer) {
  {
    std::lock_guard<std::mutex> held(locked_lock);
    if (locked().erase(buffer) == 0) return false;
  }
  Current current(used());
  if (!current.failed) driver().unlock(buffer);
  return true;
}

}  // namespace compiled
