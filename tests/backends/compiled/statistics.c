/* Responses whose statistics the backend reports itself: one of each outcome, at times that say which. */
#include <stdio.h>

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
