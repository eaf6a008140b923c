/* Modules and kernels: text that names a shared object and its kernels' parameters.
 *
 *     neptrio fake module
 *     object PATH
 *     kernel NAME 8p 8p 4 8
 *
 * A parameter is its size in bytes; `p` says that it is a pointer. Pointers are checked and given
 * their second address before the kernel is called (fake.h, rule 1).
 */
#include "fake.h"
#include <dlfcn.h>
#include <fcntl.h>

static __thread sigjmp_buf* jump;
static struct sigaction before[2];

static void on_fault(int number) {
    if (jump) siglongjmp(*jump, number);
    sigaction(number, &before[number == SIGBUS], NULL); /* not in a kernel: as without this handler */
}

static void catch_faults(void) {
    static int done;
    if (done++) return;
    struct sigaction action = {.sa_handler = on_fault, .sa_flags = SA_NODEFER};
    sigaction(SIGSEGV, &action, &before[0]);
    sigaction(SIGBUS, &action, &before[1]);
}

int run_function(Function* function, Op* op) {
    uint64_t values[64];
    void* arguments[64];
    memcpy(values, op->owned, sizeof(uint64_t) * (size_t)function->count);
    for (int i = 0; i < function->count; i++) {
        arguments[i] = &values[i];
        if (!function->pointer[i] || !values[i]) continue;
        if (is_pinned((void*)values[i], 1)) continue;
        void* memory = behind(values[i], 1);
        if (!memory || find(values[i])->device != function->module->context->device) {
            fprintf(stderr, "fake CUDA: argument %d of kernel %s, %llx, is not live device memory\n", i, function->name,
                    (unsigned long long)values[i]);
            return ILLEGAL_ADDRESS;
        }
        values[i] = (uint64_t)(uintptr_t)memory;
    }
    catch_faults();
    sigjmp_buf here;
    int result = OK;
    if (sigsetjmp(here, 1))
        result = ILLEGAL_ADDRESS;
    else {
        jump = &here;
        result = function->entry(arguments, op->grid, op->block);
        result = result == 3 ? ASSERT : result ? LAUNCH_TIMEOUT : OK;
    }
    jump = NULL;
    return result;
}

/* ---------------------------------------------------------------- loading */

static int copy_file(const char* path, char* name) {
    const int from = open(path, O_RDONLY | O_CLOEXEC), to = mkstemp(name);
    char buffer[65536];
    ssize_t n = 0;
    while (from >= 0 && to >= 0 && (n = read(from, buffer, sizeof buffer)) > 0)
        if (write(to, buffer, (size_t)n) != n) break;
    if (from >= 0) close(from);
    if (to >= 0) close(to);
    return from >= 0 && to >= 0 && n == 0;
}

static int open_object(Module* module, const char* path) {
    char name[] = "/tmp/fake-module-XXXXXX"; /* a file of its own: its variables belong to this module */
    if (copy_file(path, name)) module->object = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!module->object) fprintf(stderr, "fake CUDA: %s\n", dlerror());
    unlink(name);
    return module->object ? OK : INVALID_IMAGE;
}

static int add_kernel(Module* module, char* line) {
    char *rest, entry[160];
    char* word = strtok_r(line, " ", &rest);
    module->functions = realloc(module->functions, sizeof(Function) * (size_t)(module->count + 1));
    Function* f = &module->functions[module->count++];
    memset(f, 0, sizeof *f);
    f->dynamic = 49152;
    snprintf(f->name, sizeof f->name, "%s", word);
    snprintf(entry, sizeof entry, "neptrio_run_%s", word);
    *(void**)&f->entry = dlsym(module->object, entry);
    while ((word = strtok_r(NULL, " ", &rest)) && f->count < 64) {
        f->size[f->count] = atoi(word);
        f->pointer[f->count++] = strchr(word, 'p') != NULL;
    }
    return f->entry ? OK : INVALID_IMAGE;
}

static void close_module(Module* module) {
    void (*end)(void) = NULL;
    if (module->object) {
        *(void**)&end = dlsym(module->object, "neptrio_close");
        if (end) end();
        dlclose(module->object);
    }
    module->object = NULL;
    module->context = NULL;
    numbers[LIVE_MODULES]--;
}

static Module* modules[1024];

void forget_modules(Context* context) {
    for (int i = 0; i < 1024; i++)
        if (modules[i] && modules[i]->context == context) {
            close_module(modules[i]);
            modules[i] = NULL;
        }
}

/* Writes a compiler's text where the caller wants its errors (CU_JIT_ERROR_LOG_BUFFER and its size). */
static void tell_jit(unsigned count, const int* options, void** values) {
    char* buffer = NULL;
    size_t size = 0;
    for (unsigned i = 0; i < count; i++) {
        if (options[i] == 5) buffer = values[i];
        if (options[i] == 6) size = (size_t)(uintptr_t)values[i];
    }
    if (buffer && size) snprintf(buffer, size, "ptxas fatal   : Unresolved extern function 'fake_missing'");
}

int cuModuleLoadData(Module** made, const char* image);

int cuModuleLoadDataEx(Module** made, const char* image, unsigned count, const int* options, void** values) {
    const int result = cuModuleLoadData(made, image);
    if (result) tell_jit(count, options, values);
    return result;
}

int cuModuleLoadData(Module** made, const char* image) {
    ENTER;
    const int refused = unsafe(__func__);
    if (refused) return refused;
    int result = ready(current());
    if (result) return result;
    if (strncmp(image, "neptrio fake module\n", 20) || due(FAIL_LOAD)) return INVALID_IMAGE;
    char *text = strdup(image), *rest;
    Module* module = calloc(1, sizeof *module);
    module->context = current();
    numbers[LIVE_MODULES]++;
    for (char* line = strtok_r(text, "\n", &rest); line && !result; line = strtok_r(NULL, "\n", &rest)) {
        if (!strncmp(line, "object ", 7)) result = open_object(module, line + 7);
        if (!strncmp(line, "kernel ", 7)) result = add_kernel(module, line + 7);
    }
    free(text);
    for (int i = 0; !result && i < 1024; i++)
        if (!modules[i]) {
            modules[i] = *made = module;
            for (int k = 0; k < module->count; k++) module->functions[k].module = module;
            return OK;
        }
    close_module(module);
    return result ? result : OUT_OF_MEMORY;
}

int cuModuleUnload(Module* module) {
    ENTER;
    const int refused = unsafe(__func__);
    if (refused) return refused;
    if (!module || !module->context) return violation(INVALID_HANDLE, "a module was unloaded twice");
    synchronize(module->context);
    for (int i = 0; i < 1024; i++)
        if (modules[i] == module) modules[i] = NULL;
    close_module(module);
    return OK;
}

int cuModuleGetFunction(Function** function, Module* module, const char* name) {
    ENTER;
    const int result = ready(current());
    if (result) return result;
    for (int i = 0; i < module->count; i++)
        if (!strcmp(module->functions[i].name, name)) {
            *function = &module->functions[i];
            return OK;
        }
    return NOT_FOUND;
}

int cuModuleGetFunctionCount(unsigned* count, Module* module) {
    *count = (unsigned)module->count;
    return OK;
}

int cuModuleEnumerateFunctions(Function** functions, unsigned most, Module* module) {
    for (unsigned i = 0; i < most && i < (unsigned)module->count; i++) functions[i] = &module->functions[i];
    return OK;
}

int cuFuncGetName(const char** name, Function* function) {
    *name = function->name;
    return OK;
}

int cuFuncGetParamInfo(Function* function, size_t index, size_t* offset, size_t* size) {
    size_t at = 0;
    if (index >= (size_t)function->count) return INVALID_VALUE;
    for (size_t i = 0; i <= index; i++) {
        const size_t n = (size_t)function->size[i];
        at = (at + n - 1) / n * n;
        if (i < index) at += n;
    }
    *offset = at;
    if (size) *size = (size_t)function->size[index];
    return OK;
}

int cuFuncGetAttribute(int* value, int attribute, Function* function) {
    (void)function;
    const int used = (int)numbers[REGISTERS], most = used ? 65536 / used / 32 * 32 : 1024;
    *value = attribute == 0 ? (most < 1024 ? most : 1024) : 0; /* threads per block; static shared memory does not count */
    return OK;
}

int cuFuncSetAttribute(Function* function, int attribute, int value) {
    if (attribute == 8) function->dynamic = value; /* MAX_DYNAMIC_SHARED_SIZE_BYTES */
    return OK;
}

/* ---------------------------------------------------------------- launching */

int cuLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, Stream* stream, void** arguments, void** extra) {
    ENTER;
    if (!stream || !stream->context) return violation(INVALID_HANDLE, "a launch in a stream that is gone");
    const int result = ready(stream->context);
    if (result) return result;
    if (extra || !function->module->context) return violation(INVALID_HANDLE, "a launch from a module that is gone");
    if (function->module->context != stream->context)
        return violation(INVALID_HANDLE, "kernel %s was launched in another context's stream", function->name);
    if (!gx || !gy || !gz || !bx || !by || !bz || gy > 65535 || gz > 65535 || (uint64_t)bx * by * bz > 1024 || bz > 64 ||
        (int)shared > function->dynamic)
        return violation(INVALID_VALUE, "kernel %s: %u,%u,%u blocks of %u,%u,%u threads, %u bytes shared", function->name, gx,
                         gy, gz, bx, by, bz, shared);
    if (due(FAIL_LAUNCH)) return (int)numbers[FAIL_LAUNCH_WITH];
    if (numbers[REGISTERS] && (uint64_t)bx * by * bz * (uint64_t)numbers[REGISTERS] > 65536) return 701;
    numbers[LAUNCHES]++;
    if (!stream->capturing) journal("launch %d %s\n", stream->number, function->name);
    uint64_t* values = calloc((size_t)function->count + 1, sizeof *values);
    for (int i = 0; i < function->count; i++) memcpy(&values[i], arguments[i], (size_t)function->size[i]);
    return push(stream, (Op){.kind = LAUNCH, .function = function, .grid = {gx, gy, gz}, .block = {bx, by, bz},
                             .shared = shared, .owned = values, .size = sizeof(uint64_t) * ((size_t)function->count + 1)});
}

typedef struct { int id, pad; int value[16]; } Attribute;
typedef struct {
    unsigned grid[3], block[3], shared;
    Stream* stream;
    Attribute* attributes;
    unsigned count;
} LaunchConfig;

/* Blocks are launched one after the other here, so what a cooperative kernel waits for never comes: only its limits are
   checked, and that the clusters divide the grid. */
int cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** arguments, void** extra) {
    check_caller(__func__);
    const unsigned* g = config->grid;
    for (unsigned i = 0; i < config->count; i++) {
        const int* value = config->attributes[i].value;
        if (config->attributes[i].id == 2 && value[0]) { /* cooperative: all blocks at once */
            if ((uint64_t)g[0] * g[1] * g[2] > 132) return COOPERATIVE_TOO_LARGE;
            numbers[COOPERATIVE]++;
        } else if (config->attributes[i].id == 4) { /* cluster dimensions */
            for (int axis = 0; axis < 3; axis++)
                if (value[axis] <= 0 || g[axis] % (unsigned)value[axis])
                    return violation(INVALID_VALUE, "clusters of %d do not divide a grid of %u", value[axis], g[axis]);
            numbers[CLUSTERS]++;
        }
    }
    const unsigned* b = config->block;
    return cuLaunchKernel(function, g[0], g[1], g[2], b[0], b[1], b[2], config->shared, config->stream, arguments, extra);
}
