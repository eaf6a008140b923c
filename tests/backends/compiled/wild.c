/* What no backend should do: each is an error of its own, and the process goes on. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "probe.h"

enum { CPU, PINNED, GPU };

static object used(int type, int64_t id, size_t size) {
  object made;
  fine(TRITONSERVER_BufferAttributesNew(&made));
  fine(TRITONSERVER_BufferAttributesSetMemoryType(made, type));
  fine(TRITONSERVER_BufferAttributesSetMemoryTypeId(made, id));
  fine(TRITONSERVER_BufferAttributesSetByteSize(made, size));
  return made;
}

/* reports memory that there cannot be, and some that there is; with `nothing` none */
static void reports(object instance, object request, bool nothing) {
  object rows[4], model;
  char texts[2][200], text[500];
  int i;
  fine(TRITONBACKEND_ModelInstanceModel(instance, &model));
  if (nothing) {
    fine(TRITONBACKEND_ModelReportMemoryUsage(model, NULL, 0));
    answer_text(request, "");
    return;
  }
  rows[0] = used(GPU, -1, 5);
  said(texts[0], 200, TRITONBACKEND_ModelReportMemoryUsage(model, rows, 1));
  fine(TRITONSERVER_BufferAttributesSetMemoryType(rows[0], 7));
  said(texts[1], 200, TRITONBACKEND_ModelReportMemoryUsage(model, rows, 1));
  fine(TRITONSERVER_BufferAttributesDelete(rows[0]));
  rows[0] = used(CPU, -1, 1000);
  rows[1] = used(PINNED, -1, SIZE_MAX);
  rows[2] = used(PINNED, 1 << 20, SIZE_MAX);
  rows[3] = used(GPU, 1, 77);
  fine(TRITONBACKEND_ModelReportMemoryUsage(model, rows, 4));
  for (i = 0; i < 4; i++) fine(TRITONSERVER_BufferAttributesDelete(rows[i]));
  snprintf(text, sizeof text, "%s|%s", texts[0], texts[1]);
  answer_text(request, text);
}

/* sizes that are no array's, as of a number below 0 */
static void sizes(object request) {
  object response, made;
  int64_t shape[1] = {1};
  double bucket = 1;
  char texts[6][200], text[1300];
  fine(TRITONBACKEND_ResponseNew(&response, request));
  said(texts[0], 200, TRITONBACKEND_ResponseOutput(response, &made, "OUT", 8, shape, UINT32_MAX));
  fine(TRITONBACKEND_ResponseDelete(response));
  said(texts[1], 200, TRITONBACKEND_StateNew(&made, request, "STATE", 8, shape, UINT32_MAX));
  fine(TRITONSERVER_InferenceRequestNew(&made, server, "identity", -1));
  said(texts[2], 200, TRITONSERVER_InferenceRequestAddInput(made, "IN", 8, shape, UINT64_MAX));
  fine(TRITONSERVER_InferenceRequestAddInput(made, "IN", 8, shape, 1));
  fine(TRITONSERVER_InferenceRequestAppendInputData(made, "IN", shape, 4, 0, 0));
  said(texts[3], 200, TRITONSERVER_InferenceRequestAppendInputData(made, "IN", shape, SIZE_MAX, 0, 0));
  fine(TRITONSERVER_InferenceRequestDelete(made));
  said(texts[4], 200, TRITONSERVER_MessageNewFromSerializedJson(&made, "{}", SIZE_MAX));
  fine(TRITONSERVER_MetricArgsNew(&made));
  said(texts[5], 200, TRITONSERVER_MetricArgsSetHistogram(made, &bucket, UINT64_MAX));
  fine(TRITONSERVER_MetricArgsDelete(made));
  if (TRITONSERVER_ParameterBytesNew("bytes", "", UINT64_MAX) != NULL) abort();
  snprintf(text, sizeof text, "%s|%s|%s|%s|%s|%s", texts[0], texts[1], texts[2], texts[3], texts[4], texts[5]);
  answer_text(request, text);
}

/* no elements, but of numbers that no tensor has */
static void empty_but_huge(object request) {
  const int64_t shape[3] = {1 << 20, (int64_t)1 << 40, 0};
  object response;
  fine(TRITONBACKEND_ResponseNew(&response, request));
  output(response, "OUT", 8, shape, 3, 0);
  fine(TRITONBACKEND_ResponseSend(response, 1, NULL));
}

/* an error whose code is none */
static void no_code(object request) {
  object response;
  error failed = TRITONSERVER_ErrorNew(-1, "it has failed");
  fine(TRITONBACKEND_ResponseNew(&response, request));
  fine(TRITONBACKEND_ResponseSend(response, 1, failed));
  TRITONSERVER_ErrorDelete(failed);
}

/* with a MiB */
void answer_at_length(object request) {
  const int64_t shape[2] = {1, 1 << 18};
  object response;
  fine(TRITONBACKEND_ResponseNew(&response, request));
  memset(output(response, "OUT", 8, shape, 2, 1 << 20), 1, 1 << 20);
  fine(TRITONBACKEND_ResponseSend(response, 1, NULL));
}

static void process(object request) {
  char text[32];
  snprintf(text, sizeof text, "%d", (int)getpid());
  answer_text(request, text);
}

void wild(object instance, object request, const char* what) {
  if (strcmp(what, " process") == 0) process(request);
  if (strcmp(what, " memory") == 0) reports(instance, request, false);
  if (strcmp(what, " no memory") == 0) reports(instance, request, true);
  if (strcmp(what, " sizes") == 0) sizes(request);
  if (strcmp(what, " empty") == 0) empty_but_huge(request);
  if (strcmp(what, " code") == 0) no_code(request);
}
