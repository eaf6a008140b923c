/* A response cache for the tests. What it does is the first word of the file that its setting `control` names, read at each
 * lookup and insertion; `go` is a named pipe, of which `slow` reads a byte before it goes on. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "abi.h"

error TRITONSERVER_BufferAttributesNew(object* attributes);
error TRITONSERVER_BufferAttributesDelete(object attributes);
error TRITONSERVER_BufferAttributesSetByteSize(object attributes, size_t size);
error TRITONSERVER_BufferAttributesByteSize(object attributes, size_t* size);
error TRITONSERVER_BufferAttributesSetMemoryType(object attributes, int type);
error TRITONSERVER_MetricSet(object metric, double value);
error TRITONCACHE_ApiVersion(uint32_t* major, uint32_t* minor);
error TRITONCACHE_CacheEntryBufferCount(object entry, size_t* count);
error TRITONCACHE_CacheEntryAddBuffer(object entry, void* base, object attributes);
error TRITONCACHE_CacheEntryGetBuffer(object entry, size_t index, void** base, object attributes);
error TRITONCACHE_CacheEntrySetBuffer(object entry, size_t index, void* base, object attributes);
error TRITONCACHE_Copy(object allocator, object entry);

#define MOST 256
struct row { char key[128]; char* data; size_t size; };
static struct row rows[MOST];
static size_t count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char control[4096], pipe_name[4096];
static object entries, last_entry, last_allocator;

#define CHECK(CALL) do { error failed_ = (CALL); if (failed_) return failed_; } while (0)

static void setting(const char* config, const char* name, char* room, size_t size) {
  char quoted[64];
  snprintf(quoted, sizeof quoted, "\"%s\": \"", name);
  const char* at = strstr(config, quoted);
  room[0] = 0;
  if (at == NULL) return;
  at += strlen(quoted);
  size_t length = strcspn(at, "\"");
  if (length >= size) length = size - 1;
  memcpy(room, at, length);
  room[length] = 0;
}

static void mode(char* room) {
  room[0] = 0;
  FILE* file = fopen(control, "r");
  if (file == NULL) return;
  if (fscanf(file, "%63s", room) != 1) room[0] = 0;
  fclose(file);
}

static int is(const char* found, const char* wanted) { return strcmp(found, wanted) == 0; }

static struct row* row_of(const char* key) {
  for (size_t i = 0; i < count; i++) {
    if (is(rows[i].key, key)) return &rows[i];
  }
  return NULL;
}

static void refuse(error failed, const char* what, int* wrong) {
  if (failed == NULL || TRITONSERVER_ErrorCode(failed) != INVALID_ARG) {
    fprintf(stderr, "misuse: %s was taken\n", what);
    (*wrong)++;
  }
  if (failed != NULL) TRITONSERVER_ErrorDelete(failed);
}

/* Everything that must be an error and no crash. */
static void misuse(object entry, object allocator) {
  int wrong = 0;
  size_t size;
  void* base;
  object attributes, on_gpu, empty;
  char byte = 0;
  TRITONSERVER_BufferAttributesNew(&attributes);
  TRITONSERVER_BufferAttributesSetByteSize(attributes, 1);
  TRITONSERVER_BufferAttributesNew(&on_gpu);
  TRITONSERVER_BufferAttributesSetByteSize(on_gpu, 1);
  TRITONSERVER_BufferAttributesSetMemoryType(on_gpu, 2);
  TRITONSERVER_BufferAttributesNew(&empty);
  object handles[] = {NULL, (object)0x1234, last_entry, allocator, attributes};
  for (size_t i = 0; i < sizeof handles / sizeof *handles; i++) {
    refuse(TRITONCACHE_CacheEntryBufferCount(handles[i], &size), "an entry's count", &wrong);
    refuse(TRITONCACHE_CacheEntryAddBuffer(handles[i], &byte, attributes), "an entry to add to", &wrong);
    refuse(TRITONCACHE_CacheEntryGetBuffer(handles[i], 0, &base, attributes), "an entry to get of", &wrong);
    refuse(TRITONCACHE_CacheEntrySetBuffer(handles[i], 0, &byte, NULL), "an entry to set", &wrong);
    refuse(TRITONCACHE_Copy(allocator, handles[i]), "an entry to copy", &wrong);
  }
  refuse(TRITONCACHE_Copy(last_allocator, entry), "an allocator of a call before", &wrong);
  refuse(TRITONCACHE_Copy(entry, entry), "an entry as allocator", &wrong);
  refuse(TRITONCACHE_Copy(allocator, entry), "an entry without a buffer", &wrong);
  refuse(TRITONCACHE_CacheEntryGetBuffer(entry, 0, &base, attributes), "an index", &wrong);
  refuse(TRITONCACHE_CacheEntrySetBuffer(entry, 0, &byte, NULL), "an index to set", &wrong);
  refuse(TRITONCACHE_CacheEntryAddBuffer(entry, NULL, attributes), "no address", &wrong);
  refuse(TRITONCACHE_CacheEntryAddBuffer(entry, &byte, on_gpu), "a buffer on a GPU", &wrong);
  refuse(TRITONCACHE_CacheEntryAddBuffer(entry, &byte, empty), "a buffer without bytes", &wrong);
  refuse(TRITONCACHE_CacheEntryAddBuffer(entry, &byte, NULL), "no attributes", &wrong);
  refuse(TRITONCACHE_ApiVersion(NULL, NULL), "no numbers", &wrong);
  TRITONSERVER_BufferAttributesDelete(attributes);
  TRITONSERVER_BufferAttributesDelete(on_gpu);
  TRITONSERVER_BufferAttributesDelete(empty);
  fprintf(stderr, "misuse: %d of what must be refused was taken\n", wrong);
}

static error act(const char* what) {
  if (is(what, "hang")) for (;;) pause();
  if (is(what, "segfault")) { fprintf(stderr, "about to crash\n"); *(volatile int*)8 = 1; }
  if (is(what, "abort")) abort();
  if (is(what, "exit")) exit(3);
  if (is(what, "scribble")) { /* to the server, past the interface */
    char bytes[4096];
    memset(bytes, 0x5a, sizeof bytes);
    for (int i = 3; i < 64; i++) send(i, bytes, sizeof bytes, MSG_NOSIGNAL);
  }
  if (is(what, "unasked")) { /* one answer too many, to a question that nobody has asked */
    struct { uint32_t kind; int32_t code; uint64_t number, size; } head = {2, -1, 1u << 30, 0};
    for (int i = 3; i < 64; i++) send(i, &head, sizeof head, MSG_NOSIGNAL);
  }
  if (is(what, "flood")) { /* the head of a message that is larger than any */
    struct { uint32_t kind; int32_t code; uint64_t number, size; } head = {3, -1, 0, (uint64_t)1 << 40};
    for (int i = 3; i < 64; i++) send(i, &head, sizeof head, MSG_NOSIGNAL);
  }
  if (is(what, "fail")) return TRITONSERVER_ErrorNew(UNAVAILABLE, "no connection to the store");
  if (is(what, "slow")) {
    FILE* file = fopen(pipe_name, "r");
    if (file != NULL) { fgetc(file); fclose(file); }
  }
  return NULL;
}

static void stay(void) { for (;;) pause(); }

error TRITONCACHE_CacheInitialize(object* cache, const char* config) {
  uint32_t major, minor;
  object family;
  char what[64];
  CHECK(TRITONCACHE_ApiVersion(&major, &minor));
  if (major != 0 || minor < 1) return TRITONSERVER_ErrorNew(UNSUPPORTED, "an interface of another version");
  setting(config, "control", control, sizeof control);
  setting(config, "go", pipe_name, sizeof pipe_name);
  mode(what);
  if (is(what, "linger")) atexit(stay); /* refuses, and does not end */
  if (is(what, "refuse") || is(what, "linger")) return TRITONSERVER_ErrorNew(INVALID_ARG, "the setting 'control' says refuse");
  if (is(what, "die")) abort();
  if (is(what, "chatter")) { /* a message before the one that says whether it is ready, and no other */
    struct { uint32_t kind; int32_t code; uint64_t number, size; double gauges[3]; } told = {3, -1, 0, 24, {0, 0, 0}};
    for (int i = 3; i < 64; i++) send(i, &told, sizeof told, MSG_NOSIGNAL);
    stay();
  }
  if (is(what, "stall")) { fprintf(stderr, "it stalls\n"); for (;;) pause(); }
  fprintf(stderr, "begun with %s\n", config);
  CHECK(TRITONSERVER_LogMessage(1, "probe.c", 1, "a warning of the cache's"));
  CHECK(TRITONSERVER_MetricFamilyNew(&family, 1, "nv_cache_num_entries", "entries"));
  CHECK(TRITONSERVER_MetricNew(&entries, family, NULL, 0));
  *cache = rows;
  return NULL;
}

error TRITONCACHE_CacheFinalize(object cache) {
  fprintf(stderr, "finalized %s\n", cache == rows ? "the cache" : "another");
  return NULL;
}

error TRITONCACHE_CacheLookup(object cache, const char* key, object entry, object allocator) {
  char what[64];
  (void)cache;
  mode(what);
  CHECK(act(what));
  pthread_mutex_lock(&lock);
  if (is(what, "misuse")) misuse(entry, allocator);
  last_entry = entry;
  last_allocator = allocator;
  struct row* row = is(what, "swap") && count ? &rows[0] : row_of(key);
  error failed = NULL;
  if (row == NULL) {
    failed = TRITONSERVER_ErrorNew(NOT_FOUND, "there is no such key");
  } else if (!is(what, "claim")) {
    char* copy = malloc(row->size * 2 + 16);
    size_t size = row->size;
    memcpy(copy, row->data, row->size);
    if (is(what, "garbage")) memset(copy, 0xa5, size);
    if (is(what, "flip")) copy[size - 1] ^= 1;
    if (is(what, "short")) size = 7;
    if (is(what, "long")) { memset(copy + size, 0, size + 16); size = size * 2 + 16; }
    object attributes;
    failed = TRITONSERVER_BufferAttributesNew(&attributes);
    if (!failed) failed = TRITONSERVER_BufferAttributesSetByteSize(attributes, is(what, "huge") ? (size_t)1 << 60 : size);
    if (!failed) failed = TRITONCACHE_CacheEntryAddBuffer(entry, copy, attributes);
    if (!failed && is(what, "twice")) failed = TRITONCACHE_CacheEntryAddBuffer(entry, copy, attributes);
    if (!failed) failed = TRITONCACHE_Copy(allocator, entry);
    TRITONSERVER_BufferAttributesDelete(attributes);
    free(copy);
  }
  pthread_mutex_unlock(&lock);
  return failed;
}

error TRITONCACHE_CacheInsert(object cache, const char* key, object entry, object allocator) {
  char what[64];
  size_t buffers, size;
  void* base;
  object attributes;
  (void)cache;
  mode(what);
  if (is(what, "forget")) return NULL;
  CHECK(TRITONCACHE_CacheEntryBufferCount(entry, &buffers));
  if (buffers != 1) return TRITONSERVER_ErrorNew(INTERNAL, "an answer of several buffers");
  CHECK(TRITONSERVER_BufferAttributesNew(&attributes));
  CHECK(TRITONCACHE_CacheEntryGetBuffer(entry, 0, &base, attributes));
  CHECK(TRITONSERVER_BufferAttributesByteSize(attributes, &size));
  TRITONSERVER_BufferAttributesDelete(attributes);
  pthread_mutex_lock(&lock);
  error failed = NULL;
  if (row_of(key) != NULL) {
    failed = TRITONSERVER_ErrorNew(6, "the key exists already");
  } else if (count < MOST) {
    struct row* row = &rows[count];
    snprintf(row->key, sizeof row->key, "%s", key);
    row->data = calloc(1, size);
    row->size = size;
    if (count % 2) {
      memcpy(row->data, base, size);
    } else {
      failed = TRITONCACHE_CacheEntrySetBuffer(entry, 0, row->data, NULL);
      if (!failed) failed = TRITONCACHE_Copy(allocator, entry);
    }
    if (!failed) count++;
    if (!failed) failed = TRITONSERVER_MetricSet(entries, (double)count);
  }
  pthread_mutex_unlock(&lock);
  return failed;
}
