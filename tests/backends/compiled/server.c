/* What a backend asks of the server about itself and its models. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "probe.h"

/* which levels of the log are shown, from info to verbose ones */
const char* shown(void) {
  static char text[5];
  int level;
  for (level = 0; level < 4; level++) text[level] = TRITONSERVER_LogIsEnabled(level) ? '1' : '0';
  return text;
}

/* answers with what the server says, or with its error; `what` is " SUBJECT MODEL" */
void server_says(object request, const char* what) {
  char subject[32] = "", model[64] = "", text[300];
  object message = NULL;
  const char* json;
  size_t size;
  error failed = NULL;
  sscanf(what, " %31s %63s", subject, model);
  if (strcmp(subject, "ready") == 0) {
    bool ready;
    uint32_t flags;
    fine(TRITONSERVER_ServerIsReady(server, &ready));
    fine(TRITONSERVER_ServerModelBatchProperties(server, model, -1, &flags, NULL));
    snprintf(text, sizeof text, "ready=%d batching=%u", ready, flags);
    answer_text(request, text);
    return;
  }
  if (strcmp(subject, "metrics") == 0) {
    object metrics;
    char missing[100];
    failed = TRITONSERVER_ServerMetrics(server, &metrics);
    said(text, sizeof text, failed);
    if (failed != NULL) {
      answer_text(request, text);
      return;
    }
    said(missing, sizeof missing, TRITONSERVER_MetricsFormatted(metrics, 1, &json, &size));
    if (strcmp(missing, "3 TRITONSERVER_MetricsFormatted: there is no format 1") != 0) abort();
    fine(TRITONSERVER_MetricsFormatted(metrics, 0, &json, &size));
    if (strlen(json) != size) abort();
    answer_text(request, json);
    fine(TRITONSERVER_MetricsDelete(metrics));
    said(missing, sizeof missing, TRITONSERVER_MetricsFormatted(metrics, 0, &json, &size));
    if (strncmp(missing, "3 ", 2) != 0) abort();
    return;
  }
  if (strcmp(subject, "server") == 0) failed = TRITONSERVER_ServerMetadata(server, &message);
  if (strcmp(subject, "metadata") == 0) failed = TRITONSERVER_ServerModelMetadata(server, model, -1, &message);
  if (strcmp(subject, "config") == 0) failed = TRITONSERVER_ServerModelConfig(server, model, 1, 1, &message);
  if (strcmp(subject, "format") == 0) failed = TRITONSERVER_ServerModelConfig(server, model, 1, 2, &message);
  if (strcmp(subject, "statistics") == 0) failed = TRITONSERVER_ServerModelStatistics(server, model, -1, &message);
  if (strcmp(subject, "index") == 0) failed = TRITONSERVER_ServerModelIndex(server, 0, &message);
  if (strcmp(subject, "ready-index") == 0) failed = TRITONSERVER_ServerModelIndex(server, 1, &message);
  if (failed != NULL) {
    said(text, sizeof text, failed);
    answer_text(request, text);
    return;
  }
  fine(TRITONSERVER_MessageSerializeToJson(message, &json, &size));
  answer_text(request, json);
  fine(TRITONSERVER_MessageDelete(message));
}
