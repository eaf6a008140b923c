/* Requests that the backend gives back, to be executed again. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "probe.h"

enum { RELEASE_ALL = 1, RELEASE_RESCHEDULE = 2, START = 1, FINAL = 1 };

/* gives it back twice; whether it did */
int again(object request) {
  static int times;
  if (times++ % 3 < 2) {
    fine(TRITONBACKEND_RequestRelease(request, RELEASE_RESCHEDULE));
    return 1;
  }
  answer_text(request, "at the third time");
  return 0;
}

/* what is kept of a sequence, by its id */
static struct counting { int32_t left; object factory, response; } sequences[64];

static void refused(error failed) {
  char text[300];
  said(text, sizeof text, failed);
  if (strncmp(text, "3 ", 2) != 0 || strstr(text, "given back, before") == NULL) abort();
}

/* A response in each execution, sent behind the release, until its input is counted down to 0. */
void count_down(object request, const char* how) {
  struct counting* counting;
  object input, response, factory;
  const void* data;
  uint64_t size, id;
  uint32_t flags, release;
  int type = 0;
  const bool first = strcmp(how, ", made before the release") == 0; /* `how` is the request's, and goes with it */
  const bool keeps = strcmp(how, ", and keep a factory") == 0;
  int64_t at = 0, shape[2] = {1, 1};
  fine(TRITONBACKEND_RequestCorrelationId(request, &id));
  counting = &sequences[id % 64];
  fine(TRITONBACKEND_RequestFlags(request, &flags));
  if (flags & START) {
    fine(TRITONBACKEND_RequestInput(request, "IN", &input));
    fine(TRITONBACKEND_InputBuffer(input, 0, &data, &size, &type, &at));
    counting->left = *(const int32_t*)data;
  }
  if (counting->factory != NULL) { /* of an execution that is over */
    refused(TRITONBACKEND_ResponseNewFromFactory(&response, counting->factory));
    refused(TRITONBACKEND_ResponseFactorySendFlags(counting->factory, FINAL));
    refused(TRITONBACKEND_ResponseSend(counting->response, 0, NULL));
    fine(TRITONBACKEND_ResponseFactoryDelete(counting->factory));
    counting->factory = NULL;
  }
  release = counting->left > 0 ? RELEASE_RESCHEDULE : RELEASE_ALL;
  fine(TRITONBACKEND_ResponseFactoryNew(&factory, request));
  if (first) {
    fine(TRITONBACKEND_ResponseNew(&response, request));
    fine(TRITONBACKEND_RequestRelease(request, release));
  } else {
    fine(TRITONBACKEND_RequestRelease(request, release));
    fine(TRITONBACKEND_ResponseNewFromFactory(&response, factory));
  }
  *(int32_t*)output(response, "OUT", 8, shape, 2, 4) = counting->left;
  fine(TRITONBACKEND_ResponseSend(response, counting->left > 0 ? 0 : FINAL, NULL));
  if (keeps && counting->left > 0) {
    counting->factory = factory;
    fine(TRITONBACKEND_ResponseNewFromFactory(&counting->response, factory));
    *(int32_t*)output(counting->response, "OUT", 8, shape, 2, 4) = -1;
  } else {
    fine(TRITONBACKEND_ResponseFactoryDelete(factory));
  }
  counting->left--;
}
