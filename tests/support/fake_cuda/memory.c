/* Device memory behind addresses that nobody can touch, pools, pinned memory, regions of other processes. */
#include "fake.h"
#include <fcntl.h>
#include <sys/stat.h>

#define ARENA ((size_t)1 << 40)
#define PAGE ((size_t)65536)

static char *device_base[8], *host_base[8]; /* two addresses of the same memory */
static size_t taken[8];
static Allocation* allocations;

typedef struct Pinned {
    char* address;
    size_t size;
    int registered;
    Context* context;
    struct Pinned* next;
} Pinned;
static Pinned* pinned;

static size_t whole(size_t n) {
    return (n + PAGE - 1) & ~(PAGE - 1);
}

static int reserve(int device) {
    if (device_base[device]) return OK;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char* a = mmap(NULL, ARENA, PROT_NONE, flags, -1, 0);
    char* b = mmap(NULL, ARENA, PROT_NONE, flags, -1, 0);
    if (a == MAP_FAILED || b == MAP_FAILED) return OUT_OF_MEMORY;
    device_base[device] = (char*)(((uintptr_t)a + PAGE - 1) & ~(PAGE - 1));
    host_base[device] = (char*)(((uintptr_t)b + PAGE - 1) & ~(PAGE - 1));
    return OK;
}

static size_t in_use(int device) {
    size_t sum = 0;
    for (Allocation* a = allocations; a; a = a->next)
        if (a->device == device && !a->ipc) sum += whole(a->size);
    return sum;
}

static int fails(void) {
    static int left;
    if (due(FAIL_ALLOCATION)) left = numbers[FAIL_TIMES] ? (int)numbers[FAIL_TIMES] : 1;
    return left > 0 && left--;
}

/* New device memory; `fd` >= 0: shared memory of that file instead. */
static int allocate(Allocation** made, int device, size_t size, int fd, int ipc) {
    size_t total;
    cuDeviceTotalMem(&total, device);
    if (!size) return INVALID_VALUE;
    numbers[ALLOCATIONS]++;
    if (!ipc && (fails() || size > total || in_use(device) + whole(size) > total)) return OUT_OF_MEMORY;
    if (reserve(device) || taken[device] + whole(size) + 2 * PAGE > ARENA - PAGE) return OUT_OF_MEMORY;
    char* at = host_base[device] + taken[device];
    if (fd >= 0) {
        if (mmap(at, whole(size), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) return INVALID_VALUE;
    } else if (mprotect(at, whole(size), PROT_READ | PROT_WRITE))
        return OUT_OF_MEMORY;
    if (!ipc) memset(at, 0xCD, size);
    Allocation* a = calloc(1, sizeof *a);
    a->address = (Ptr)(uintptr_t)(device_base[device] + taken[device]);
    a->size = size;
    a->reserved = whole(size);
    a->device = device;
    a->ready = 1;
    a->ipc = ipc;
    a->fd = fd;
    a->next = allocations;
    allocations = a;
    taken[device] += whole(size) + PAGE;
    if (!ipc) {
        numbers[LIVE_ALLOCATIONS]++;
        numbers[LIVE_BYTES] += (int64_t)size;
    } else
        numbers[LIVE_IPC]++;
    *made = a;
    return OK;
}

Allocation* find(Ptr address) {
    for (Allocation* a = allocations; a; a = a->next)
        if (address >= a->address && address < a->address + a->size) return a;
    return NULL;
}

static char* host_of(Ptr address, int device) {
    return host_base[device] + ((char*)(uintptr_t)address - device_base[device]);
}

void* behind(Ptr address, size_t size) {
    Allocation* a = find(address);
    if (!a || address + size > a->address + a->size || !a->ready) return NULL;
    return host_of(address, a->device);
}

int is_device(const void* pointer) {
    for (int i = 0; i < 8; i++)
        if (device_base[i] && (char*)pointer >= device_base[i] && (char*)pointer < device_base[i] + ARENA) return 1;
    return 0;
}

int is_pinned(const void* pointer, size_t size) {
    for (Pinned* p = pinned; p; p = p->next)
        if ((char*)pointer >= p->address && (char*)pointer + size <= p->address + p->size) return 1;
    return 0;
}

static void drop_pool(Pool* pool) {
    if (!pool->doomed || pool->used || pool->gone) return;
    pool->gone = 1; /* not freed: a use of it is told */
    numbers[LIVE_POOLS]--;
}

void release(Allocation* allocation) {
    for (Allocation** at = &allocations; *at; at = &(*at)->next)
        if (*at == allocation) {
            *at = allocation->next;
            break;
        }
    mmap(host_of(allocation->address, allocation->device), allocation->reserved, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (allocation->fd >= 0) close(allocation->fd);
    if (allocation->pool) {
        Pool* pool = allocation->pool;
        pool->used -= allocation->size;
        if (pool->high > pool->threshold) pool->high = pool->used > pool->threshold ? pool->used : pool->threshold;
        drop_pool(pool);
    }
    if (allocation->ipc)
        numbers[LIVE_IPC]--;
    else {
        numbers[LIVE_ALLOCATIONS]--;
        numbers[LIVE_BYTES] -= (int64_t)allocation->size;
    }
    free(allocation);
}

static void drop_pinned(Pinned* gone) {
    numbers[PINNED_BYTES] -= (int64_t)gone->size;
    for (Pinned** at = &pinned; *at; at = &(*at)->next)
        if (*at == gone) {
            *at = gone->next;
            break;
        }
    if (!gone->registered) munmap(gone->address, whole(gone->size));
    numbers[LIVE_PINNED]--;
    free(gone);
}

/* The context goes, and everything in it. */
void forget_memory(Context* context) {
    for (Allocation *a = allocations, *next; a; a = next) {
        next = a->next;
        if (a->context == context || (a->pool && a->device == context->device)) release(a);
    }
    for (Pinned *p = pinned, *next; p; p = next) {
        next = p->next;
        if (p->context == context) drop_pinned(p);
    }
}

/* ---------------------------------------------------------------- plain memory */

int cuMemAlloc(Ptr* address, size_t size) {
    ENTER;
    const int refused = unsafe(__func__);
    if (refused) return refused;
    Context* context = current();
    int result = ready(context);
    if (result) return result;
    const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)whole(size))) return OUT_OF_MEMORY;
    Allocation* a;
    result = allocate(&a, context->device, size, fd, 0);
    if (result) {
        close(fd);
        return result;
    }
    a->context = context;
    *address = a->address;
    return OK;
}

int cuMemFree(Ptr address) {
    ENTER;
    const int refused = unsafe(__func__);
    if (refused) return refused;
    const int result = ready(current());
    if (result) return result;
    Allocation* a = find(address);
    if (!a || a->address != address || a->ipc) return violation(INVALID_VALUE, "cuMemFree(%llx): not an allocation", address);
    synchronize(current());
    release(a);
    return current()->sticky;
}

int cuMemGetInfo(size_t* left, size_t* total) {
    ENTER;
    const int result = ready(current());
    if (result) return result;
    cuDeviceTotalMem(total, current()->device);
    *left = *total - in_use(current()->device);
    return OK;
}

int cuMemGetAddressRange(Ptr* base, size_t* size, Ptr address) {
    ENTER;
    Allocation* a = find(address);
    if (!a) return NOT_FOUND;
    if (base) *base = a->address;
    if (size) *size = a->size;
    return OK;
}

int cuPointerGetAttribute(void* data, int attribute, Ptr address) {
    ENTER;
    Allocation* a = find(address);
    if (!a) return INVALID_VALUE;
    if (attribute == 9) *(int*)data = a->device; /* CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL */
    else return INVALID_VALUE;
    return OK;
}

/* ---------------------------------------------------------------- pools */

typedef struct { int type, handles, where, device; } PoolProperties;
static Pool* pools;

void forget_pools(int device) {
    for (Pool* pool = pools; pool; pool = pool->next)
        if (pool->device == device) {
            pool->doomed = 1;
            drop_pool(pool);
        }
}

int cuMemPoolCreate(Pool** pool, const PoolProperties* properties) {
    ENTER;
    if (properties->where != 1 || properties->device >= device_count) return INVALID_VALUE;
    *pool = calloc(1, sizeof **pool);
    (*pool)->device = properties->device;
    (*pool)->peers = 1u << properties->device;
    (*pool)->next = pools;
    pools = *pool;
    numbers[LIVE_POOLS]++;
    return OK;
}

int cuMemPoolDestroy(Pool* pool) {
    ENTER;
    pool->doomed = 1; /* it goes with the last allocation */
    drop_pool(pool);
    return contexts[pool->device].sticky;
}

typedef struct { int where, device, flags; } Access;

int cuMemPoolSetAccess(Pool* pool, const Access* access, size_t count) {
    ENTER;
    for (size_t i = 0; i < count; i++) {
        journal("access %d %d\n", pool->device, access[i].device);
        if (access[i].where != 1 || access[i].device >= device_count || numbers[NO_PEERS]) return INVALID_DEVICE;
        if (access[i].flags == 3) pool->peers |= 1u << access[i].device;
        else pool->peers &= ~(1u << access[i].device);
    }
    return OK;
}

int cuMemPoolSetAttribute(Pool* pool, int attribute, uint64_t* value) {
    if (attribute == 4) pool->threshold = *value;
    return OK;
}

int cuMemPoolGetAttribute(Pool* pool, int attribute, uint64_t* value) {
    ENTER;
    progress();
    switch (attribute) {
    case 5: *value = pool->high; break; /* reserved now */
    case 6: *value = pool->high; break;
    case 7: *value = pool->used; break; /* used now */
    default: *value = pool->high;
    }
    return OK;
}

int cuMemPoolTrimTo(Pool* pool, size_t keep) {
    ENTER;
    numbers[TRIMS]++;
    if (pool->high > keep) pool->high = pool->used > keep ? pool->used : keep;
    return OK;
}

int cuMemAllocFromPoolAsync(Ptr* address, size_t size, Pool* pool, Stream* stream) {
    ENTER;
    int result = ready(stream->context);
    if (result) return result;
    if (pool->doomed) return violation(INVALID_VALUE, "an allocation from a pool that was destroyed");
    if (stream->capturing) return violation(CAPTURE_UNSUPPORTED, "an allocation while a graph is recorded");
    progress();
    Allocation* a;
    result = allocate(&a, pool->device, size, -1, 0);
    if (result) return result;
    a->pool = pool;
    a->ready = 0; /* until the stream is there */
    pool->used += size;
    if (pool->used > pool->high) pool->high = pool->used;
    *address = a->address;
    return push(stream, (Op){.kind = ALLOC, .to = a->address});
}

int cuMemFreeAsync(Ptr address, Stream* stream) {
    ENTER;
    const int result = ready(stream->context);
    if (result) return result;
    Allocation* a = find(address);
    if (!a || a->address != address || !a->pool) return violation(INVALID_VALUE, "cuMemFreeAsync(%llx): not a pool's", address);
    return push(stream, (Op){.kind = FREE, .to = address});
}

/* ---------------------------------------------------------------- pinned host memory */

static int over(size_t size) {
    return numbers[PIN_LIMIT] && numbers[PINNED_BYTES] + (int64_t)size > numbers[PIN_LIMIT];
}

static int note_pinned(void* address, size_t size, int registered) {
    Pinned* p = calloc(1, sizeof *p);
    *p = (Pinned){address, size, registered, current(), pinned};
    pinned = p;
    numbers[LIVE_PINNED]++;
    numbers[PINNED_BYTES] += (int64_t)size;
    journal("pin %zu\n", size);
    pause_ns(numbers[PIN_NS]);
    return OK;
}

int cuMemHostAlloc(void** address, size_t size, unsigned flags) {
    ENTER;
    const int refused = unsafe(__func__);
    if (refused) return refused;
    (void)flags;
    const int result = ready(current());
    if (result) return result;
    if (!size || due(FAIL_PINNED) || over(size)) return size ? OUT_OF_MEMORY : INVALID_VALUE;
    *address = mmap(NULL, whole(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*address == MAP_FAILED) return OUT_OF_MEMORY;
    memset(*address, 0xCD, size);
    return note_pinned(*address, size, 0);
}

int cuMemHostRegister(void* address, size_t size, unsigned flags) {
    ENTER;
    const int refused = unsafe(__func__);
    if (refused) return refused;
    (void)flags;
    const int result = ready(current());
    if (result) return result;
    if (due(FAIL_PINNED) || over(size)) return OUT_OF_MEMORY;
    if ((uintptr_t)address % 4096) return violation(INVALID_VALUE, "cuMemHostRegister: not page-aligned");
    for (Pinned* p = pinned; p; p = p->next)
        if ((char*)address < p->address + whole(p->size) && p->address < (char*)address + size)
            return violation(ALREADY_REGISTERED, "cuMemHostRegister(%p): known already", address);
    return note_pinned(address, size, 1);
}

static int unpin(void* address, int registered) {
    const int result = ready(current());
    if (result) return result;
    for (Pinned* p = pinned; p; p = p->next)
        if (p->address == address && p->registered == registered) {
            synchronize(current());
            drop_pinned(p);
            return current()->sticky;
        }
    return violation(INVALID_VALUE, "pinned memory %p given back that is not", address);
}

int cuMemFreeHost(void* address) {
    ENTER;
    const int refused = unsafe(__func__);
    if (refused) return refused;
    return unpin(address, 0);
}

int cuMemHostUnregister(void* address) {
    ENTER;
    const int refused = unsafe(__func__);
    if (refused) return refused;
    return unpin(address, 1);
}

/* ---------------------------------------------------------------- memory of other processes */

typedef struct { char reserved[64]; } Handle;
typedef struct { char magic[8]; int pid, fd, device; uint64_t size, offset; } Shared;

int cuIpcGetMemHandle(Handle* handle, Ptr address) {
    ENTER;
    Allocation* a = find(address);
    if (!a || a->fd < 0 || a->ipc) return violation(INVALID_VALUE, "cuIpcGetMemHandle(%llx): not from cuMemAlloc", address);
    /* memory may be part of a larger block: the whole block is shared, and the handle says where in it */
    Shared shared = {"fakeipc", getpid(), a->fd, a->device, a->size, address - a->address};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &shared, sizeof shared);
    return OK;
}

int cuIpcOpenMemHandle(Ptr* address, Handle handle, unsigned flags) {
    ENTER;
    const int refused = unsafe(__func__);
    if (refused) return refused;
    (void)flags;
    int result = ready(current());
    if (result) return result;
    Shared shared;
    memcpy(&shared, &handle, sizeof shared);
    if (memcmp(shared.magic, "fakeipc", 8)) return INVALID_VALUE;
    if (shared.pid == getpid() || shared.device != current()->device) return INVALID_CONTEXT;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", shared.pid, shared.fd);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat file;
    if (fd < 0 || fstat(fd, &file)) return INVALID_VALUE;
    Allocation* a;
    for (a = allocations; a; a = a->next)
        if (a->ipc && a->owner == shared.pid && a->inode == file.st_ino && a->context == current()) {
            close(fd);
            a->opened++;
            *address = a->address + shared.offset;
            return OK;
        }
    result = allocate(&a, shared.device, shared.size, fd, 1);
    if (result) {
        close(fd);
        return result;
    }
    a->context = current();
    a->opened = 1;
    a->owner = shared.pid;
    a->inode = file.st_ino;
    *address = a->address + shared.offset;
    return OK;
}

int cuIpcCloseMemHandle(Ptr address) {
    ENTER;
    const int refused = unsafe(__func__);
    if (refused) return refused;
    const int result = ready(current());
    if (result) return result;
    Allocation* a = find(address);
    if (!a || !a->ipc) return violation(INVALID_VALUE, "cuIpcCloseMemHandle(%llx): not open", address);
    if (--a->opened) return OK;
    synchronize(current());
    release(a);
    return current()->sticky;
}
