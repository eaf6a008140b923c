/* Statistics that the backend reports itself, at times that say which: of responses, one of each outcome; of requests, before and
 * after their answers; of executions. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "probe.h"

enum { START = 1000000 };

static object statistics;

static error report(object instance, object factory, uint64_t start, uint64_t output_start, uint64_t end, error failed) {
  if (statistics == NULL) fine(TRITONBACKEND_ModelInstanceResponseStatisticsNew(&statistics));
  fine(TRITONBACKEND_ModelInstanceResponseStatisticsSetModelInstance(statistics, instance));
  fine(TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseFactory(statistics, factory));
  fine(TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseStart(statistics, start));
  fine(TRITONBACKEND_ModelInstanceResponseStatisticsSetComputeOutputStart(statistics, output_start));
  fine(TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseEnd(statistics, end));
  fine(TRITONBACKEND_ModelInstanceResponseStatisticsSetError(statistics, failed));
  return TRITONBACKEND_ModelInstanceReportResponseStatistics(statistics);
}

void measured(object instance, object request) {
  object factory, response, unset;
  error internal = TRITONSERVER_ErrorNew(INTERNAL, "it failed"), cancelled = TRITONSERVER_ErrorNew(CANCELLED, "cancelled");
  char texts[3][300], all[1000];
  fine(TRITONBACKEND_ResponseFactoryNew(&factory, request));
  fine(report(instance, factory, START, START + 1000, START + 3000, NULL));
  fine(report(instance, factory, START, 0, START + 500, NULL));
  fine(report(instance, factory, START, 0, START + 700, internal));
  fine(report(instance, factory, START, START + 10, START + 30, internal));
  fine(report(instance, factory, START, START + 10, START + 50, cancelled));
  said(texts[0], 300, report(instance, factory, START, START - 1, START + 1, NULL));
  said(texts[1], 300, report(instance, factory, START, 0, START - 1, internal));
  fine(TRITONBACKEND_ModelInstanceResponseStatisticsNew(&unset));
  said(texts[2], 300, TRITONBACKEND_ModelInstanceReportResponseStatistics(unset));
  fine(TRITONBACKEND_ModelInstanceResponseStatisticsDelete(unset));
  fine(TRITONBACKEND_ModelInstanceResponseStatisticsDelete(statistics));
  statistics = NULL;
  snprintf(all, sizeof all, "%s|%s|%s", texts[0], texts[1], texts[2]);
  fine(TRITONBACKEND_ResponseNewFromFactory(&response, factory));
  text_output(response, all);
  fine(TRITONBACKEND_ResponseSend(response, 1, NULL));
  fine(TRITONBACKEND_ResponseFactoryDelete(factory));
  TRITONSERVER_ErrorDelete(internal);
  TRITONSERVER_ErrorDelete(cancelled);
}

/* ------------------------------------------------------------ requests and executions */

static uint64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* a time, so long after which it is now later than all that is reported */
static uint64_t begun(void) {
  uint64_t t = now();
  while (now() < t + 9000) continue;
  return t;
}

static error of_request(object instance, object request, bool success) {
  uint64_t t = begun();
  return TRITONBACKEND_ModelInstanceReportStatistics(instance, request, success, t, t + 1000, t + 3001, t + 7003);
}

static void of_execution(object instance, uint64_t size) {
  uint64_t t = begun();
  fine(TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, size, t, t + 10, t + 31, t + 73));
}

struct held { object instance, request, factory; const char* what; };

static void* answered_first(void* with) {
  struct held* held = with;
  object response;
  fine(TRITONBACKEND_ResponseNewFromFactory(&response, held->factory));
  text_output(response, "held");
  fine(TRITONBACKEND_ResponseSend(response, 1, NULL));
  if (strcmp(held->what, " late") == 0) {
    usleep(1000); /* so that the answer is often with its client; both orders are right */
    fine(of_request(held->instance, held->request, true));
    of_execution(held->instance, 1);
  }
  fine(TRITONBACKEND_ResponseFactoryDelete(held->factory));
  fine(TRITONBACKEND_RequestRelease(held->request, 1));
  free(held);
  return NULL;
}

/* answers a request, reports it in some way, and releases it */
void stated(object instance, object request, const char* what) {
  error failed;
  char text[300] = "done";
  if (strcmp(what, " late") == 0 || strcmp(what, " never, and answered late") == 0) {
    struct held* held = malloc(sizeof *held);
    pthread_t thread;
    held->instance = instance;
    held->request = request;
    held->what = what[1] == 'l' ? " late" : "";
    fine(TRITONBACKEND_ResponseFactoryNew(&held->factory, request));
    pthread_create(&thread, NULL, answered_first, held);
    pthread_detach(thread);
    return;
  }
  if (strcmp(what, " twice") == 0) {
    fine(of_request(instance, request, true));
    said(text, sizeof text, of_request(instance, request, true));
  }
  if (strcmp(what, " success of an error") == 0) {
    object response;
    fine(TRITONBACKEND_ResponseNew(&response, request));
    failed = TRITONSERVER_ErrorNew(INTERNAL, "an error, and a success");
    fine(TRITONBACKEND_ResponseSend(response, 1, failed));
    TRITONSERVER_ErrorDelete(failed);
  } else {
    answer_text(request, text);
  }
  if (strncmp(what, " success", 8) == 0) fine(of_request(instance, request, true));
  if (strcmp(what, " failure of an answer") == 0) fine(of_request(instance, request, false));
  if (strcmp(what, " success") == 0) of_execution(instance, 1);
  if (strcmp(what, " in two executions") == 0) {
    fine(of_request(instance, request, true));
    of_execution(instance, 2);
    of_execution(instance, 3);
  }
  if (strcmp(what, " endless") == 0) {
    uint64_t m = UINT64_MAX;
    fine(TRITONBACKEND_ModelInstanceReportStatistics(instance, request, true, m, m, m, m));
    fine(TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, m, m, m, m, m));
  }
  fine(TRITONBACKEND_RequestRelease(request, 1));
}
