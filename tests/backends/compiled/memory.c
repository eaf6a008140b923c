/* Memory of the server's, as `what` says: "memory of N" takes some of GPU N and some that is page-locked, "memory page-locked" only that
 * ("none of a GPU"), "memory back" returns what is kept,
 * "memory back as the CPU's" what is page-locked as if it were not. Answers with the error, if there is one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "probe.h"

static void *on_device, *locked;
static int64_t device;

void memory(object request, const char* what) {
  char text[200] = "";
  if (strncmp(what, "memory of ", 10) == 0) {
    void* found = NULL;
    const int64_t id = atoll(what + 10);
    error failed = TRITONBACKEND_MemoryManagerAllocate(manager, &found, 2, id, 1000);
    if (failed != NULL) {
      said(text, sizeof text, failed);
    } else {
      on_device = found;
      device = id;
    }
  }
  if (strncmp(what, "memory back", 11) == 0) {
    const int how = what[11] == 0 ? 1 : 0;
    if (on_device != NULL) fine(TRITONBACKEND_MemoryManagerFree(manager, on_device, 2, device));
    fine(TRITONBACKEND_MemoryManagerFree(manager, locked, how, 0));
    on_device = locked = NULL;
  } else if (*text == 0) {
    fine(TRITONBACKEND_MemoryManagerAllocate(manager, &locked, 1, 0, 100));
    memset(locked, 1, 100);
  }
  answer_text(request, text);
}
