/* Who executes at the same time: instances tell each other by files in the model's folder. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "probe.h"

/* the path of a file in the model's folder, of a device or (-1) of none */
static void folder_of(object instance, char* room, size_t size, const char* name, int32_t device) {
  object model;
  const char* folder;
  int type;
  fine(TRITONBACKEND_ModelInstanceModel(instance, &model));
  fine(TRITONBACKEND_ModelRepository(model, &type, &folder));
  snprintf(room, size, "%s/%s.%d", folder, name, device);
}

/* answers after so many milliseconds: INSTANCE, and whether nobody else executed on its device meanwhile. 0: crashes when the
 * file of the name "go" is there */
void hold(object instance, object request, int milliseconds) {
  char path[512], go[512], text[300];
  const char* name;
  int32_t device;
  int file;
  fine(TRITONBACKEND_ModelInstanceDeviceId(instance, &device));
  folder_of(instance, path, sizeof path, "held", device);
  file = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
  fine(TRITONBACKEND_ModelInstanceName(instance, &name));
  if (milliseconds == 0) {
    folder_of(instance, go, sizeof go, "go", device);
    while (access(go, F_OK) != 0) usleep(1000);
    unlink(path);
    abort();
  }
  usleep((useconds_t)milliseconds * 1000);
  snprintf(text, sizeof text, "%s of GPU %d %s", name, device, file >= 0 ? "alone" : "not alone");
  if (file >= 0) {
    close(file);
    unlink(path);
  }
  answer_text(request, text);
}

/* answers when another instance of the model, on any device, is asked for the same at the same time */
void meet(object instance, object request, const char* where) {
  char path[512];
  off_t size;
  int waited, file;
  folder_of(instance, path, sizeof path, where, -1);
  file = open(path, O_CREAT | O_RDWR | O_APPEND | O_CLOEXEC, 0600);
  if (write(file, "1", 1) != 1) abort();
  for (waited = 0; (size = lseek(file, 0, SEEK_END)) < 2 && waited < 20000; waited++) usleep(1000);
  close(file);
  answer_text(request, size == 2 ? "met" : "nobody came");
}
