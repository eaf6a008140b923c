// Triton's interface of response caches: the functions that a libtritoncache_NAME.so calls, and calls of its own.
//
// An entry has one buffer here: the answer as the server has packed it. A lookup gives the library an empty entry, to which it
// adds its buffer; an insertion one with the answer, which the library copies itself or has copied to memory that it names.
// Rules:
//  1. Entries and allocators end with the call that they were made for. Who keeps one gets an error.
//  2. A hit is what TRITONCACHE_Copy has copied, while the library still holds its buffer.
#include <dlfcn.h>

#include "caches.h"

namespace compiled {

const size_t MOST_BUFFERS = 64;

struct CacheEntry : Object {
  static constexpr Kind KIND = Kind::CACHE_ENTRY;
  explicit CacheEntry(bool stored) : Object(KIND), stored(stored) {}
  struct Part { void* base; size_t size; };
  std::mutex lock;
  std::vector<Part> parts;
  const bool stored;  // of an insertion: it has what there is to store
};

struct CacheAllocator : Object {
  static constexpr Kind KIND = Kind::CACHE_ALLOCATOR;
  CacheAllocator() : Object(KIND) {}
  std::shared_ptr<CacheEntry> entry;
  const std::string* given = nullptr;  // of an insertion
  std::string found;
  size_t most = 0;
  bool copied = false;
};

// An entry and its allocator, for as long as one call of the library lasts.
struct CacheCall {
  explicit CacheCall(bool stored) : entry(std::make_shared<CacheEntry>(stored)), allocator(std::make_shared<CacheAllocator>()) {
    allocator->entry = entry;
    add(entry);
    add(allocator);
  }
  ~CacheCall() {
    take<CacheAllocator>(allocator->handle);
    take<CacheEntry>(entry->handle);
  }
  const std::shared_ptr<CacheEntry> entry;
  const std::shared_ptr<CacheAllocator> allocator;
};

int CacheLibrary::begin(const char* path, const char* config, std::string* error) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    *error = std::string("unable to load shared library: ") + text_of(dlerror());
    return INVALID_ARG;
  }
  const auto initialize = reinterpret_cast<Initialize>(dlsym(library, "TRITONCACHE_CacheInitialize"));
  finalize = reinterpret_cast<Finalize>(dlsym(library, "TRITONCACHE_CacheFinalize"));
  look_up = reinterpret_cast<Use>(dlsym(library, "TRITONCACHE_CacheLookup"));
  store = reinterpret_cast<Use>(dlsym(library, "TRITONCACHE_CacheInsert"));
  if (initialize == nullptr || finalize == nullptr || look_up == nullptr || store == nullptr) {
    *error = "it lacks one of TRITONCACHE_CacheInitialize, CacheFinalize, CacheLookup and CacheInsert";
    return INVALID_ARG;
  }
  return said(initialize(&cache, config), error);
}

int CacheLibrary::lookup(const std::string& key, size_t most, std::string* found, std::string* error) {
  CacheCall call(false);
  call.allocator->most = most;
  const int code = said(look_up(cache, key.c_str(), call.entry->handle, call.allocator->handle), error);
  if (code != COMPILED_FINE) return code;
  std::lock_guard<std::mutex> held(call.entry->lock);
  if (!call.allocator->copied) {
    *error = "it has found the key and has not called TRITONCACHE_Copy";
    return INTERNAL;
  }
  *found = std::move(call.allocator->found);
  return COMPILED_FINE;
}

int CacheLibrary::insert(const std::string& key, std::string& value, std::string* error) {
  CacheCall call(true);
  call.allocator->given = &value;
  call.entry->parts.push_back({&value[0], value.size()});
  const int code = said(store(cache, key.c_str(), call.entry->handle, call.allocator->handle), error);
  std::lock_guard<std::mutex> held(call.entry->lock);  // rule 1: a thread of the library's may just use them
  call.entry->parts.clear();
  call.allocator->given = nullptr;
  return code;
}

int CacheLibrary::finish(std::string* error) { return said(finalize(cache), error); }

static Failed refused(const char* function, const char* why) { return fail(INVALID_ARG, std::string(function) + ": " + why); }

// the size that attributes of memory of the host's say; 0 with an error
static size_t host_size(const char* function, Handle attributes, Failed* error) {
  const auto found = find<Attributes>(attributes);
  if (!found) {
    *error = missing(function, "attributes");
    return 0;
  }
  if (found->type != CPU && found->type != CPU_PINNED) {
    *error = refused(function, "a cache has buffers in the memory of the CPU only");
    return 0;
  }
  if (found->size == 0) *error = refused(function, "the buffer has no bytes");
  return found->size;
}

}  // namespace compiled

using namespace compiled;

API Failed TRITONCACHE_ApiVersion(uint32_t* major, uint32_t* minor) {
  if (major == nullptr || minor == nullptr) return missing(__func__, "a number");
  *major = 0;
  *minor = 1;
  return nullptr;
}

API Failed TRITONCACHE_CacheEntryBufferCount(Handle entry, size_t* count) {
  const auto found = find<CacheEntry>(entry);
  if (!found || count == nullptr) return missing(__func__, "entry");
  std::lock_guard<std::mutex> held(found->lock);
  *count = found->parts.size();
  return nullptr;
}

API Failed TRITONCACHE_CacheEntryAddBuffer(Handle entry, void* base, Handle attributes) {
  const auto found = find<CacheEntry>(entry);
  if (!found || base == nullptr) return missing(__func__, "entry or base");
  Failed error = nullptr;
  const size_t size = host_size(__func__, attributes, &error);
  if (error != nullptr) return error;
  if (found->stored) return refused(__func__, "the entry has what is to be stored");
  std::lock_guard<std::mutex> held(found->lock);
  if (found->parts.size() >= MOST_BUFFERS) return refused(__func__, "the entry has too many buffers");
  found->parts.push_back({base, size});
  return nullptr;
}

API Failed TRITONCACHE_CacheEntryGetBuffer(Handle entry, size_t index, void** base, Handle attributes) {
  const auto found = find<CacheEntry>(entry);
  const auto told = find<Attributes>(attributes);
  if (!found || base == nullptr || !told) return missing(__func__, "entry, base or attributes");
  std::lock_guard<std::mutex> held(found->lock);
  if (index >= found->parts.size()) return refused(__func__, "the entry has no buffer of that index");
  *base = found->parts[index].base;
  told->size = found->parts[index].size;
  told->type = CPU;
  told->id = 0;
  return nullptr;
}

API Failed TRITONCACHE_CacheEntrySetBuffer(Handle entry, size_t index, void* base, Handle attributes) {
  const auto found = find<CacheEntry>(entry);
  if (!found || base == nullptr) return missing(__func__, "entry or base");
  Failed error = nullptr;
  const size_t size = attributes == nullptr ? 0 : host_size(__func__, attributes, &error);
  if (error != nullptr) return error;
  std::lock_guard<std::mutex> held(found->lock);
  if (index >= found->parts.size()) return refused(__func__, "the entry has no buffer of that index");
  found->parts[index].base = base;
  if (attributes != nullptr) found->parts[index].size = size;
  return nullptr;
}

API Failed TRITONCACHE_Copy(Handle allocator, Handle entry) {
  const auto found = find<CacheAllocator>(allocator);
  const auto of = find<CacheEntry>(entry);
  if (!found || !of) return missing(__func__, "allocator or entry");
  if (found->entry != of) return refused(__func__, "the allocator and the entry are of two calls");
  std::lock_guard<std::mutex> held(of->lock);
  if (of->parts.size() != 1) return refused(__func__, "the entry must have one buffer, as it was stored");
  const CacheEntry::Part part = of->parts[0];
  if (!of->stored) {
    if (part.size > found->most) return refused(__func__, "the buffer is larger than any that was stored");
    found->found.assign(static_cast<const char*>(part.base), part.size);
    found->copied = true;
    return nullptr;
  }
  if (found->given == nullptr) return refused(__func__, "the call that it was made for has ended");
  if (part.size < found->given->size()) return refused(__func__, "the buffer is smaller than what is to be stored");
  memcpy(part.base, found->given->data(), found->given->size());
  return nullptr;
}
