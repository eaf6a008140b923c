// What a cache's library asks of its host beside the cache: gauges of its own, and lines of the log.
//
// Its metrics are kept here, so that it can read what it has written. Those with Triton's names for what only the library knows
// are told the server, the others are not shown. No other function of the host can be reached: each needs a handle of a model, a
// request or a server, of which there is none in this process.
#include <map>

#include "caches.h"

namespace compiled {
namespace {

struct CacheMetric {
  std::string family;
  double value = 0;
};

struct CacheMetrics {  // never destroyed, as the table of handles
  std::mutex lock;
  uint64_t last = 0;
  std::map<uint64_t, std::string> families;
  std::map<uint64_t, CacheMetric> metrics;
};

CacheMetrics& all() {
  static CacheMetrics* made = new CacheMetrics;
  return *made;
}

int family(int, const char* name, const char*, uint64_t* id, char*, size_t) {
  std::lock_guard<std::mutex> held(all().lock);
  *id = ++all().last;
  all().families[*id] = name;
  return COMPILED_FINE;
}

int metric(uint64_t family, const compiled_parameter*, uint32_t, const double*, uint32_t, int, uint64_t* id, char*, size_t) {
  std::lock_guard<std::mutex> held(all().lock);
  *id = ++all().last;
  all().metrics[*id].family = all().families[family];
  return COMPILED_FINE;
}

int change(uint64_t metric, int what, double value, double* found, char*, size_t) {
  std::lock_guard<std::mutex> held(all().lock);
  double& number = all().metrics[metric].value;
  if (what == COMPILED_SET) number = value;
  if (what == COMPILED_INCREMENT || what == COMPILED_OBSERVE) number += value;
  *found = number;
  return COMPILED_FINE;
}

void forget(uint64_t id) {
  std::lock_guard<std::mutex> held(all().lock);
  all().families.erase(id);
  all().metrics.erase(id);
}

// A line on standard error, which the server reads: how serious it is, then the text.
void log(int level, const char*, int, const char* text) {
  static const char NAMES[] = "IWEV";
  std::string line = std::string("[") + (level >= 0 && level <= 3 ? NAMES[level] : 'I') + "] " + text + "\n";
  for (size_t i = 0; i + 1 < line.size(); i++) {
    if (line[i] == '\n') line[i] = ' ';
  }
  fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace

void host_for_caches() {
  host = {};
  host.family = family;
  host.metric = metric;
  host.change = change;
  host.forget_metric = forget;
  host.log = log;
}

CacheNumbers cache_numbers() {
  CacheNumbers made = {0, 0, 0};
  std::lock_guard<std::mutex> held(all().lock);
  for (const auto& row : all().metrics) {
    const CacheMetric& one = row.second;
    if (one.family == "nv_cache_num_entries") made.entries = one.value;
    if (one.family == "nv_cache_num_evictions") made.evictions = one.value;
    if (one.family == "nv_cache_util") made.utilization = one.value;
  }
  return made;
}

}  // namespace compiled
