/* Devices, contexts, errors, and how functions are found. */
#include "fake.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/syscall.h>

static _Atomic int64_t private_numbers[NUMBERS];
_Atomic int64_t* numbers = private_numbers;
pthread_mutex_t lock;
Context contexts[8];
int device_count = -1;
static __thread Context* stack[16];
static pid_t starter;
static __thread int depth;

__attribute__((constructor)) static void begin(void) {
    pthread_mutexattr_t recursive;
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&lock, &recursive);
    const char* path = getenv("FAKE_CUDA_NUMBERS");
    const int fd = path ? open(path, O_RDWR) : -1;
    if (fd >= 0) {
        void* found = mmap(NULL, sizeof private_numbers, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (found != MAP_FAILED) numbers = found;
        close(fd);
    }
    for (int i = 0; i < 8; i++) contexts[i].device = i;
}

/* Rule 8. Python says whether this thread has the GIL; a client without Python has none. */
void check_caller(const char* function) {
    static int (*has_gil)(void);
    static int (*running)(void);
    if (!has_gil) {
        *(void**)&has_gil = dlsym(RTLD_DEFAULT, "PyGILState_Check");
        *(void**)&running = dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    }
    if (has_gil && running && running() && has_gil()) violation(OK, "%s: called with the GIL", function);
    if (!numbers[MAIN_THREAD] && syscall(SYS_gettid) == getpid())
        violation(OK, "%s: called on the process's first thread", function);
}

locked enter(const char* function) {
    check_caller(function);
    pthread_mutex_lock(&lock);
    return 1;
}

void leave(locked* held) {
    (void)held;
    pthread_mutex_unlock(&lock);
}

int violation(int result, const char* format, ...) {
    va_list rest;
    va_start(rest, format);
    char text[256], path[512];
    const char* place = getenv("FAKE_CUDA_NUMBERS");
    vsnprintf(text, sizeof text, format, rest);
    va_end(rest);
    numbers[VIOLATIONS]++; /* who reads the text finds it counted */
    fprintf(stderr, "fake CUDA: %s\n", text);
    snprintf(path, sizeof path, "%s.violations", place ? place : "/dev/null");
    FILE* told = place ? fopen(path, "a") : NULL;
    if (told) {
        fprintf(told, "%s\n", text);
        fclose(told);
    }
    return result;
}

void journal(const char* format, ...) {
    static FILE* file;
    const char* place = getenv("FAKE_CUDA_NUMBERS");
    char path[512];
    va_list rest;
    if (!numbers[JOURNAL] || !place) return;
    if (!file) {
        snprintf(path, sizeof path, "%s.journal", place);
        file = fopen(path, "a");
    }
    if (!file) return;
    va_start(rest, format);
    vfprintf(file, format, rest);
    va_end(rest);
    fflush(file);
}

int due(int which) {
    return numbers[which] > 0 && --numbers[which] == 0;
}

Context* current(void) {
    return depth ? stack[depth - 1] : NULL;
}

int ready(Context* context) {
    if (device_count < 0) return NOT_INITIALIZED;
    if (starter != getpid()) return violation(NOT_INITIALIZED, "a call in a process that was forked after cuInit");
    if (!context) return violation(INVALID_CONTEXT, "a call without a current context");
    if (!context->retained) return violation(INVALID_CONTEXT, "a call in a context that was given back");
    return context->sticky;
}

/* ---------------------------------------------------------------- start, devices */

int cuInit(unsigned flags) {
    (void)flags;
    if (device_count >= 0 && starter != getpid())
        return violation(NOT_INITIALIZED, "cuInit in a process that was forked after cuInit");
    if (device_count >= 0) return device_count ? OK : NO_DEVICE; /* takes no time again */
    ENTER;
    starter = getpid();
    const char* count = getenv("FAKE_CUDA_DEVICES");
    const char* connections = getenv("CUDA_DEVICE_MAX_CONNECTIONS"); /* read once, as by a driver */
    journal("init %s\n", connections ? connections : "-");
    device_count = count ? atoi(count) : 1;
    return device_count ? OK : NO_DEVICE;
}

int cuDriverGetVersion(int* version) {
    *version = 13000;
    return OK;
}

int cuDeviceGetCount(int* count) {
    *count = device_count < 0 ? 0 : device_count;
    return device_count < 0 ? NOT_INITIALIZED : OK;
}

int cuDeviceGet(int* device, int ordinal) {
    if (ordinal < 0 || ordinal >= device_count) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

int cuDeviceGetName(char* name, int length, int device) {
    snprintf(name, (size_t)length, "Fake GPU %d", device);
    return OK;
}

int cuDeviceGetUuid(unsigned char* uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = (unsigned char)(i == 15 ? device : 0xf0 + i);
    return OK;
}

int cuDeviceTotalMem(size_t* bytes, int device) {
    (void)device;
    *bytes = numbers[MEMORY] ? (size_t)numbers[MEMORY] : (size_t)1 << 30;
    return OK;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case 75: *value = 9; break;       /* compute capability 9.0 */
    case 76: *value = 0; break;
    case 97: *value = 232448; break;  /* shared memory per block, opt-in */
    case 115: *value = 1; break;      /* memory pools */
    case 41: *value = 1; break;       /* unified addressing */
    case 16: *value = 132; break;     /* multiprocessors */
    case 95: *value = 1; break;       /* cooperative launches */
    case 120: *value = 1; break;      /* clusters */
    default: *value = 0;
    }
    return OK;
}

/* ---------------------------------------------------------------- contexts */

int cuDevicePrimaryCtxRetain(Context** context, int device) {
    ENTER;
    if (device < 0 || device >= device_count) return INVALID_DEVICE;
    if (contexts[device].sticky) return contexts[device].sticky;
    if (!contexts[device].retained++) numbers[LIVE_CONTEXTS]++;
    *context = &contexts[device];
    return OK;
}

static void forget(Context* context) {
    forget_streams(context);
    forget_modules(context);
    forget_memory(context);
}

/* The process ends, and with it what nobody could give back. */
__attribute__((destructor)) static void end(void) {
    for (int i = 0; i < 8 && starter == getpid(); i++)
        if (contexts[i].sticky && contexts[i].retained && !pthread_mutex_trylock(&lock)) {
            forget(&contexts[i]);
            forget_pools(i);
            numbers[LIVE_CONTEXTS]--;
            pthread_mutex_unlock(&lock);
        }
}

int cuDevicePrimaryCtxRelease(int device) {
    ENTER;
    Context* context = &contexts[device];
    if (!context->retained) return violation(INVALID_CONTEXT, "the context of GPU %d was given back twice", device);
    if (--context->retained == 0) {
        numbers[LIVE_CONTEXTS]--;
        if (!context->sticky) forget(context);
    }
    return OK;
}

int cuDevicePrimaryCtxReset(int device) {
    ENTER;
    Context* context = &contexts[device];
    forget(context); /* what is retained stays so, and so does an error */
    numbers[RESETS]++;
    return violation(context->sticky, "the context of GPU %d was reset: other libraries use it too", device);
}

int cuDeviceCanAccessPeer(int* can, int device, int other) {
    *can = device != other && !numbers[NO_PEERS];
    return OK;
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
    *flags = 0;
    *active = contexts[device].retained > 0;
    return OK;
}

int cuCtxSetCurrent(Context* context) {
    check_caller(__func__);
    if (!depth) depth = 1;
    stack[depth - 1] = context;
    return OK;
}

int cuCtxGetCurrent(Context** context) {
    *context = current();
    return OK;
}

int cuCtxPushCurrent(Context* context) {
    check_caller(__func__);
    if (!context || depth == 16) return violation(INVALID_CONTEXT, "cuCtxPushCurrent: no context, or too many");
    stack[depth++] = context;
    return OK;
}

int cuCtxPopCurrent(Context** context) {
    if (!depth) return violation(INVALID_CONTEXT, "cuCtxPopCurrent: nothing was pushed");
    Context* was = stack[--depth];
    if (context) *context = was;
    return OK;
}

int cuCtxGetDevice(int* device) {
    if (!current()) return INVALID_CONTEXT;
    *device = current()->device;
    return OK;
}

int cuCtxSynchronize(void) {
    ENTER;
    int recorded = 0; /* in whatever mode, by whatever thread */
    for (Stream* s = streams; s; s = s->next)
        if (s->capturing && s->context == current()) recorded = s->spoilt = 1;
    if (recorded) return CAPTURE_UNSUPPORTED;
    const int refused = unsafe(__func__);
    if (refused) return refused;
    const int result = ready(current());
    return result ? result : synchronize(current());
}

/* ---------------------------------------------------------------- errors */

static const struct { int code; const char *name, *text; } names[] = {
    {OK, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {ASSERT, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {714, "CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error"},
    {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", "operation not supported on global/shared address space"},
    {718, "CUDA_ERROR_INVALID_PC", "invalid program counter"},
    {COOPERATIVE_TOO_LARGE, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"},
    {721, "CUDA_ERROR_TENSOR_MEMORY_LEAK", "tensor memory not completely freed"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {810, "CUDA_ERROR_MPS_CLIENT_TERMINATED", "MPS client has been terminated"},
    {911, "CUDA_ERROR_EXTERNAL_DEVICE", "an async error has occurred in an external device"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a thread-local capture sequence from another thread"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not permitted when a stream is capturing"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

int cuGetErrorName(int code, const char** name) {
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code) {
            *name = names[i].name;
            return OK;
        }
    *name = NULL;
    return INVALID_VALUE;
}

int cuGetErrorString(int code, const char** text) {
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code) {
            *text = names[i].text;
            return OK;
        }
    *text = NULL;
    return INVALID_VALUE;
}

/* ---------------------------------------------------------------- functions by name */

int cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags, int* status) {
    static void* self;
    (void)version;
    (void)flags;
    if (!self) {
        Dl_info info;
        dladdr((void*)cuGetProcAddress_v2, &info);
        self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }
    char name[128];
    snprintf(name, sizeof name, "%s", symbol);
    *function = self ? dlsym(self, name) : NULL;
    char* end = strstr(name, "_v2");
    if (!*function && end && !end[3]) { /* one form of each is here */
        *end = 0;
        *function = dlsym(self, name);
    }
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}

int cuGetProcAddress(const char* symbol, void** function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
