/* What a backend reads of a request's trace, and reports to it. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "probe.h"

static void report(object trace, const char* name) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  fine(TRITONSERVER_InferenceTraceReportActivity(trace, (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec, name));
}

/* answers with what the trace says */
void traced(object request, const char* what) {
  object trace, child;
  uint64_t id, parent, above, unknown;
  int64_t version;
  const char *name, *request_id, *context, *of_child;
  char text[1024], missing[2][200], long_name[3000];
  int i;
  fine(TRITONBACKEND_RequestTrace(request, &trace));
  if (trace == NULL) {
    said(text, sizeof text, TRITONSERVER_InferenceTraceReportActivity(NULL, 1, "NOBODY"));
    answer_text(request, text);
    return;
  }
  fine(TRITONSERVER_InferenceTraceId(trace, &id));
  fine(TRITONSERVER_InferenceTraceParentId(trace, &parent));
  fine(TRITONSERVER_InferenceTraceModelName(trace, &name));
  fine(TRITONSERVER_InferenceTraceModelVersion(trace, &version));
  fine(TRITONSERVER_InferenceTraceRequestId(trace, &request_id));
  fine(TRITONSERVER_InferenceTraceContext(trace, &context));
  report(trace, "OUTER_START");
  report(trace, "INNER_START");
  report(trace, "a \"point\"");
  report(trace, "INNER_END");
  report(trace, "OUTER_END");
  report(trace, "ALONE");
  report(trace, "COMPUTE_START"); /* a name that is the server's own */
  report(trace, "UNENDED_START");
  if (strcmp(what, " without end") == 0) {
    memset(long_name, 'x', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = 0;
    for (i = 0; i < 2000; i++) report(trace, long_name);
    fine(TRITONSERVER_InferenceTraceReportActivity(trace, UINT64_MAX, "NEVER"));
  }
  fine(TRITONSERVER_InferenceTraceSpawnChildTrace(trace, &child));
  fine(TRITONSERVER_InferenceTraceParentId(child, &above));
  said(missing[0], 200, TRITONSERVER_InferenceTraceId(child, &unknown));
  said(missing[1], 200, TRITONSERVER_InferenceTraceReportActivity(child, 1, "EARLY"));
  fine(TRITONSERVER_InferenceTraceSetContext(child, "{\"mine\":1}"));
  fine(TRITONSERVER_InferenceTraceContext(child, &of_child));
  snprintf(text, sizeof text, "%lu|%lu|%s|%ld|%s|%s|%lu|%s|%s|%s", (unsigned long)id, (unsigned long)parent, name, (long)version,
           request_id, context, (unsigned long)above, missing[0], missing[1], of_child);
  fine(TRITONSERVER_InferenceTraceDelete(child));
  answer_text(request, text);
}
