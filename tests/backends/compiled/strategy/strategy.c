/* A batching strategy of the tests: what the requests of a batch ask for, the first number of IN, adds up to 10 at most. */
#include <stdio.h>
#include <stdlib.h>

#include "../abi.h"

struct strategy { const char* model; int batches; };

static void fine(error failed) {
  if (failed == NULL) return;
  fprintf(stderr, "strategy: %s\n", TRITONSERVER_ErrorMessage(failed));
  abort();
}

error TRITONBACKEND_ModelBatcherInitialize(void** batcher, object model) {
  struct strategy* made = calloc(1, sizeof *made);
  fine(TRITONBACKEND_ModelName(model, &made->model));
  *batcher = made;
  return NULL;
}

error TRITONBACKEND_ModelBatcherFinalize(void* batcher) {
  struct strategy* strategy = batcher;
  fprintf(stderr, "strategy: %s had %d batches\n", strategy->model, strategy->batches);
  free(strategy);
  return NULL;
}

error TRITONBACKEND_ModelBatchInitialize(const void* batcher, void** batch) {
  ((struct strategy*)batcher)->batches++;
  *batch = calloc(1, sizeof(int));
  return NULL;
}

error TRITONBACKEND_ModelBatchIncludeRequest(object request, void* batch, bool* include) {
  object input;
  const void* data;
  uint64_t size;
  int type = 0, *sum = batch;
  int64_t id = 0;
  fine(TRITONBACKEND_RequestInput(request, "IN", &input));
  fine(TRITONBACKEND_InputBuffer(input, 0, &data, &size, &type, &id));
  if (*(const int32_t*)data < 0) return TRITONSERVER_ErrorNew(INVALID_ARG, "a negative number");
  *sum += *(const int32_t*)data;
  *include = *sum <= 10;
  return NULL;
}

error TRITONBACKEND_ModelBatchFinalize(void* batch) {
  free(batch);
  return NULL;
}
