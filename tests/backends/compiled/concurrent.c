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

/* whether nobody else is here for so many milliseconds: on the device, or (-1) in the model */
static bool alone(object instance, int milliseconds, int32_t device) {
  char path[512];
  int file;
  folder_of(instance, path, sizeof path, "held", device);
  file = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
  usleep((useconds_t)milliseconds * 1000);
  if (file < 0) return false;
  close(file);
  unlink(path);
  return true;
}

/* whether another instance of the model, on any device, comes here at the same time */
static bool met(object instance, const char* where) {
  char path[512];
  off_t size;
  int waited, file;
  folder_of(instance, path, sizeof path, where, -1);
  file = open(path, O_CREAT | O_RDWR | O_APPEND | O_CLOEXEC, 0600);
  if (write(file, "1", 1) != 1) abort();
  for (waited = 0; (size = lseek(file, 0, SEEK_END)) < 2 && waited < 20000; waited++) usleep(1000);
  close(file);
  return size == 2;
}

/* ModelInstanceInitialize of models whose names say how */
void loads(object instance, const char* how) {
  if (strcmp(how, "in line") == 0) fprintf(stderr, "probe: loads %s\n", alone(instance, 1000, -1) ? "alone" : "not alone");
  if (strcmp(how, "at once") == 0) fprintf(stderr, "probe: loads %s\n", met(instance, "loads") ? "together" : "by itself");
}

/* answers after so many milliseconds: INSTANCE, and whether nobody else executed on its device meanwhile. 0: crashes when the
 * file "go" of the device is there */
void hold(object instance, object request, int milliseconds) {
  char path[512], text[300];
  const char* name;
  int32_t device;
  fine(TRITONBACKEND_ModelInstanceDeviceId(instance, &device));
  fine(TRITONBACKEND_ModelInstanceName(instance, &name));
  if (milliseconds == 0) {
    folder_of(instance, path, sizeof path, "crashes", device);
    fclose(fopen(path, "w"));
    folder_of(instance, path, sizeof path, "go", device);
    while (access(path, F_OK) != 0) usleep(1000);
    abort();
  }
  snprintf(text, sizeof text, "%s of GPU %d %s", name, device, alone(instance, milliseconds, device) ? "alone" : "not alone");
  answer_text(request, text);
}

/* answers when another instance is asked for the same at the same time */
void meet(object instance, object request, const char* where) {
  answer_text(request, met(instance, where) ? "met" : "nobody came");
}
