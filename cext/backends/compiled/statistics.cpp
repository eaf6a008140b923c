// Statistics of responses, as a backend reports them: durations, which the server counts by a response's place in its request.
//
// A response is known by what was said of it: with an error it failed, or was cancelled where the error says so; without one it
// is empty where no output was begun. Its place is how many were reported before for its request, whoever made the factory.
#include "objects.h"

namespace compiled {

struct Statistics : Object {
  static constexpr Kind KIND = Kind::STATISTICS;
  Statistics() : Object(KIND) {}
  std::mutex lock;
  std::shared_ptr<Instance> instance;
  std::shared_ptr<Factory> factory;
  uint64_t start = 0, output_start = 0, end = 0;
  int code = COMPILED_FINE;
};

}  // namespace compiled

using namespace compiled;

API Failed TRITONBACKEND_ModelInstanceResponseStatisticsNew(Handle* statistics) {
  GIVEN(statistics);
  *statistics = add(std::make_shared<Statistics>());
  return nullptr;
}

API Failed TRITONBACKEND_ModelInstanceResponseStatisticsDelete(Handle statistics) {
  return take<Statistics>(statistics) ? nullptr : missing(__func__, "Statistics handle");
}

API Failed TRITONBACKEND_ModelInstanceResponseStatisticsSetModelInstance(Handle statistics, Handle instance) {
  FOUND(Statistics, found, statistics);
  FOUND(Instance, of, instance);
  std::lock_guard<std::mutex> held(found->lock);
  found->instance = of;
  return nullptr;
}

API Failed TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseFactory(Handle statistics, Handle factory) {
  FOUND(Statistics, found, statistics);
  FOUND(Factory, of, factory);
  std::lock_guard<std::mutex> held(found->lock);
  found->factory = of;
  return nullptr;
}

static Failed set(const char* function, Handle statistics, uint64_t Statistics::*which, uint64_t ns) {
  const auto found = find<Statistics>(statistics);
  if (!found) return missing(function, "Statistics handle");
  std::lock_guard<std::mutex> held(found->lock);
  (*found).*which = ns;
  return nullptr;
}

API Failed TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseStart(Handle statistics, uint64_t ns) {
  return set(__func__, statistics, &Statistics::start, ns);
}

API Failed TRITONBACKEND_ModelInstanceResponseStatisticsSetComputeOutputStart(Handle statistics, uint64_t ns) {
  return set(__func__, statistics, &Statistics::output_start, ns);
}

API Failed TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseEnd(Handle statistics, uint64_t ns) {
  return set(__func__, statistics, &Statistics::end, ns);
}

API Failed TRITONBACKEND_ModelInstanceResponseStatisticsSetError(Handle statistics, Failed error) {
  FOUND(Statistics, found, statistics);
  const auto said = find<Error>(error);
  if (error != nullptr && !said) return missing(__func__, "Error handle");
  std::lock_guard<std::mutex> held(found->lock);
  found->code = said ? said->code : int(COMPILED_FINE);
  return nullptr;
}

API Failed TRITONBACKEND_ModelInstanceReportResponseStatistics(Handle statistics) {
  FOUND(Statistics, found, statistics);
  compiled_durations told = {};
  {
    std::lock_guard<std::mutex> held(found->lock);
    if (!found->instance || !found->factory) return missing(__func__, "a model instance or a response factory");
    const bool outputs = found->output_start > 0 && found->code != CANCELLED;
    const uint64_t computed = outputs ? found->output_start : found->end;
    if (found->start > computed || computed > found->end) {
      return fail(INVALID_ARG, std::string(__func__) + ": response start, compute output start and response end are not in "
                                                       "this order");
    }
    told.outcome = found->code == CANCELLED        ? COMPILED_CANCELLED
                   : found->code != COMPILED_FINE ? COMPILED_FAILED
                   : outputs                      ? COMPILED_SUCCEEDED
                                                  : COMPILED_EMPTY;
    told.computing_ns = computed - found->start;
    told.output_ns = found->end - computed;
    std::lock_guard<std::mutex> held_too(found->factory->reply->lock);
    told.place = found->factory->reply->reported++;
  }
  host.measured(&told);
  return nullptr;
}
