// What the process of a cache (cache_serve.cpp) asks of a library, and the bytes that it exchanges with the server.
#pragma once

#include "objects.h"

namespace compiled {

// Both directions: a head, then the key (of questions) and `size` bytes. backends/compiled/cache_process.py has the same.
enum CacheQuestion : uint32_t { CACHE_LOOKUP = 1, CACHE_INSERT = 2 };
enum CacheAnswer : uint32_t { CACHE_BEGUN = 1, CACHE_ANSWERED = 2, CACHE_NUMBERS = 3 };

struct CacheQuestionHead {
  uint32_t kind, key_size;
  uint64_t number, size;
};

struct CacheAnswerHead {
  uint32_t kind;
  int32_t code;  // FINE or an error's; the bytes are its text then
  uint64_t number, size;
};

// what a library says of itself with the gauges of Triton's names
struct CacheNumbers {
  double entries, evictions, utilization;
  bool operator==(const CacheNumbers& other) const {
    return entries == other.entries && evictions == other.evictions && utilization == other.utilization;
  }
};

// The library of one cache. begin() is called first, once; lookup() and insert() from any thread; finish() last.
struct CacheLibrary {
  int begin(const char* path, const char* config, std::string* error);
  int lookup(const std::string& key, size_t most, std::string* found, std::string* error);
  int insert(const std::string& key, std::string& value, std::string* error);  // the library is given its address
  int finish(std::string* error);

 private:
  typedef Failed (*Initialize)(void**, const char*);
  typedef Failed (*Finalize)(void*);
  typedef Failed (*Use)(void*, const char*, Handle, Handle);
  void* cache = nullptr;
  Finalize finalize = nullptr;
  Use look_up = nullptr, store = nullptr;
};

// cache_metrics.cpp
void host_for_caches();  // sets compiled::host
CacheNumbers cache_numbers();

}  // namespace compiled
