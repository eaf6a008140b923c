// Metrics of a backend's own, which live in the server, and the values that they were given.
#include "objects.h"

namespace compiled {

struct Family : Object {
  static constexpr Kind KIND = Kind::FAMILY;
  Family() : Object(KIND) {}
  ~Family() override { if (id != 0) host.forget_metric(id); }
  int kind = 0;
  uint64_t id = 0;
};

struct Metric : Object {
  static constexpr Kind KIND = Kind::METRIC;
  Metric() : Object(KIND) {}
  ~Metric() override { if (id != 0) host.forget_metric(id); }
  std::shared_ptr<Family> family;
  uint64_t id = 0;
};

enum { MOST_BUCKETS = 10000 };

struct MetricArguments : Object {
  static constexpr Kind KIND = Kind::METRIC_ARGUMENTS;
  MetricArguments() : Object(KIND) {}
  bool bucketed = false;
  std::vector<double> buckets;
};

static Failed change(const char* function, Handle metric, int what, double value, double* result) {
  const auto found = find<Metric>(metric);
  if (!found) return missing(function, "Metric handle");
  char text[1024] = "";
  const int code = host.change(found->id, what, value, result, text, sizeof text);
  return code == COMPILED_FINE ? nullptr : fail(code, text);
}

}  // namespace compiled

using namespace compiled;

API Failed TRITONSERVER_MetricFamilyNew(Handle* family, int kind, const char* name, const char* description) {
  GIVEN(family);
  if (name == nullptr || description == nullptr) return missing(__func__, "name or description");
  if (kind < 0 || kind > 2) return fail(INVALID_ARG, std::string(__func__) + ": there is no such kind of metric");
  const auto made = std::make_shared<Family>();
  made->kind = kind;
  char text[1024] = "";
  const int code = host.family(kind, name, description, &made->id, text, sizeof text);
  if (code != COMPILED_FINE) return fail(code, text);
  *family = add(made);
  return nullptr;
}

DELETES(TRITONSERVER_MetricFamilyDelete, Family)
TELLS(TRITONSERVER_GetMetricFamilyKind, Family, int, found->kind)
TELLS(TRITONSERVER_GetMetricKind, Metric, int, found->family->kind)

API Failed TRITONSERVER_MetricArgsNew(Handle* arguments) {
  GIVEN(arguments);
  *arguments = add(std::make_shared<MetricArguments>());
  return nullptr;
}

API Failed TRITONSERVER_MetricArgsSetHistogram(Handle arguments, const double* buckets, uint64_t count) {
  FOUND(MetricArguments, found, arguments);
  if (buckets == nullptr && count > 0) return missing(__func__, "buckets");
  if (count > MOST_BUCKETS) return fail(INVALID_ARG, std::string(__func__) + ": more than " + std::to_string(MOST_BUCKETS) + " buckets");
  found->bucketed = true;
  found->buckets.assign(buckets, buckets + count);
  return nullptr;
}

DELETES(TRITONSERVER_MetricArgsDelete, MetricArguments)

API Failed TRITONSERVER_MetricNewWithArgs(Handle* metric, Handle family, const Handle* labels, uint64_t count,
                                          Handle arguments) {
  FOUND(Family, found, family);
  GIVEN(metric);
  if (labels == nullptr && count > 0) return missing(__func__, "labels");
  std::vector<std::shared_ptr<Parameter>> held;
  std::vector<compiled_parameter> given;
  for (uint64_t i = 0; i < count; i++) {
    const auto label = find<Parameter>(labels[i]);
    if (!label) return missing(__func__, "a label");
    if (label->value.type != STRING) return fail(INVALID_ARG, "parameter type must be STRING for labels");
    held.push_back(label);
    given.push_back(given_of(label->value));
  }
  const auto how = arguments == nullptr ? nullptr : find<MetricArguments>(arguments);
  if (arguments != nullptr && !how) return missing(__func__, "MetricArguments handle");
  const auto made = std::make_shared<Metric>();
  made->family = found;
  char text[1024] = "";
  const int code = host.metric(found->id, given.data(), uint32_t(given.size()), how ? how->buckets.data() : nullptr,
                               how ? uint32_t(how->buckets.size()) : 0, how && how->bucketed, &made->id, text, sizeof text);
  if (code != COMPILED_FINE) return fail(code, text);
  *metric = add(made);
  return nullptr;
}

API Failed TRITONSERVER_MetricNew(Handle* metric, Handle family, const Handle* labels, uint64_t count) {
  return TRITONSERVER_MetricNewWithArgs(metric, family, labels, count, nullptr);
}

DELETES(TRITONSERVER_MetricDelete, Metric)

API Failed TRITONSERVER_MetricValue(Handle metric, double* value) {
  GIVEN(value);
  return change(__func__, metric, COMPILED_VALUE, 0, value);
}

API Failed TRITONSERVER_MetricIncrement(Handle metric, double value) {
  double ignored;
  return change(__func__, metric, COMPILED_INCREMENT, value, &ignored);
}

API Failed TRITONSERVER_MetricSet(Handle metric, double value) {
  double ignored;
  return change(__func__, metric, COMPILED_SET, value, &ignored);
}

API Failed TRITONSERVER_MetricObserve(Handle metric, double value) {
  double ignored;
  return change(__func__, metric, COMPILED_OBSERVE, value, &ignored);
}
