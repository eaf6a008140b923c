"""Calls ONNX Runtime's shared library through its C ABI.

The problem: onnxruntime's Python interface takes and returns Python objects, holds the GIL around every call and costs
several times as much as a small model. Its wheel also contains a library with the C ABI that other languages use,
which needs no Python. The choice: that library is opened at run time (the build does not know onnxruntime), and the
functions in use are taken from its table by their positions.

Rules:
 1. The table is append-only and a function keeps its position for ever, as the public header promises
    (onnxruntime_c_api.h). API_VERSION is that of the oldest supported onnxruntime; functions added to the table
    later are not used.
 2. Before anything else, probe() sends a tensor and a string through the library: if the table is not what we expect,
    this must show while loading, when the Python module can still be used instead.
 3. There is one environment per process. It is never released, because the library's own threads and objects in other
    threads may outlive any moment that we could choose.
 4. The library calls log() on any of its threads, with or without the GIL. log() does not take the GIL; it only stores
    the message. messages() returns the stored ones. At most MESSAGES are stored; further ones are counted.
"""
import os
import threading

from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free
from libc.string cimport memcmp, memcpy, memset, strdup

from neptrio.request.infer_request cimport (
    DT_BF16, DT_BOOL, DT_BYTES, DT_FP16, DT_FP32, DT_FP64, DT_INT8, DT_INT16, DT_INT32, DT_INT64,
    DT_UINT8, DT_UINT16, DT_UINT32, DT_UINT64,
)

cdef extern from "dlfcn.h" nogil:
    void* dlopen(const char*, int)
    void* dlsym(void*, const char*)
    char* dlerror()
    int RTLD_NOW
    int RTLD_LOCAL

cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, void*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)

cdef enum:
    API_VERSION = 20  # onnxruntime 1.20
    MESSAGES = 64
    WARNING = 2       # less severe messages are not wanted
    ARENA = 1
    DEFAULT_MEMORY = 0
    STRING = 8        # element type of strings
    INT32 = 6

ctypedef void** (*GetApi)(uint32_t version) noexcept nogil
ctypedef const char* (*GetVersion)() noexcept nogil

cdef struct ApiBase:
    GetApi get_api
    GetVersion get_version

ctypedef ApiBase* (*GetApiBase)() noexcept nogil

_CODES = {
    1: "FAIL", 2: "INVALID_ARGUMENT", 3: "NO_SUCHFILE", 4: "NO_MODEL", 5: "ENGINE_ERROR",
    6: "RUNTIME_EXCEPTION", 7: "INVALID_PROTOBUF", 8: "MODEL_LOADED", 9: "NOT_IMPLEMENTED",
    10: "INVALID_GRAPH", 11: "EP_FAIL", 12: "MODEL_LOAD_CANCELED", 13: "MODEL_REQUIRES_COMPILATION",
    14: "NOT_FOUND",
}


class OrtError(Exception):
    """An error of ONNX Runtime: `code` is its own, `said` the text without any prefix."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"[ONNXRuntimeError] : {code} : {_CODES.get(code, 'UNKNOWN')} : {said}")
        self.code = code
        self.said = said


class Unusable(Exception):
    """The library cannot be used; the text says why."""


cdef int[17] _DATATYPES  # protocol's datatype, by ONNX's element type
_DATATYPES[:] = [0, DT_FP32, DT_UINT8, DT_INT8, DT_UINT16, DT_INT16, DT_INT32, DT_INT64, DT_BYTES, DT_BOOL,
                 DT_FP16, DT_FP64, DT_UINT32, DT_UINT64, 0, 0, DT_BF16]
cdef int[15] _ELEMENTS   # ONNX's element type, by the protocol's datatype
memset(_ELEMENTS, 0, sizeof(_ELEMENTS))
cdef int _i
for _i in range(17):
    if _DATATYPES[_i]:
        _ELEMENTS[_DATATYPES[_i]] = _i


cdef int datatype_of(int element) noexcept nogil:
    return _DATATYPES[element] if 0 <= element < 17 else 0


cdef int element_of(int dtype) noexcept nogil:
    return _ELEMENTS[dtype] if 0 <= dtype < 15 else 0


cdef object failure(Status status):
    error = OrtError(ort.error_code(status), ort.error_message(status).decode(errors="replace").strip())
    ort.release_status(status)
    return error


cdef int check(Status status) except -1:
    if status != NULL:
        raise failure(status)
    return 0


# -- messages --------------------------------------------------------------------------------------

cdef struct Message:
    int severity
    char* category
    char* where
    char* text

cdef pthread_mutex_t _messages_lock
cdef Message[MESSAGES] _messages
cdef int _waiting = 0
cdef int _dropped = 0
pthread_mutex_init(&_messages_lock, NULL)


cdef void log(void* param, int severity, const char* category, const char* id, const char* where,
              const char* message) noexcept nogil:
    global _waiting, _dropped
    cdef Message* m
    pthread_mutex_lock(&_messages_lock)
    if _waiting == MESSAGES:
        _dropped += 1
    else:
        m = &_messages[_waiting]
        m.severity = severity
        m.category = strdup(category)
        m.where = strdup(where)
        m.text = strdup(message)
        _waiting += 1
    pthread_mutex_unlock(&_messages_lock)


def messages() -> list:
    """Removes and returns the stored messages: [(severity, category, where, text)].

    Severities are 0 (verbose) to 4 (fatal).
    """
    global _waiting, _dropped
    cdef Message[MESSAGES] taken
    cdef int i, n, dropped
    if not _waiting:
        return []
    pthread_mutex_lock(&_messages_lock)
    n = _waiting
    dropped = _dropped
    memcpy(taken, _messages, n * sizeof(Message))
    _waiting = _dropped = 0
    pthread_mutex_unlock(&_messages_lock)
    found = []
    for i in range(n):
        found.append((taken[i].severity, _text(taken[i].category), _text(taken[i].where), _text(taken[i].text)))
        free(taken[i].category)
        free(taken[i].where)
        free(taken[i].text)
    if dropped:
        found.append((WARNING, "neptrio", "", f"{dropped} more messages were dropped"))
    return found


cdef str _text(const char* text):
    return "" if text == NULL else text.decode(errors="replace").strip()


# -- loading ---------------------------------------------------------------------------------------

_lock = threading.Lock()
_loaded = None  # (path, version), or the Unusable that loading has raised


def load(str path not None) -> str:
    """Opens the library, once per process, and returns its version. Raises Unusable with the reason.

    Any thread. Only the first path is ever opened; later calls get the result of the first.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            try:
                _loaded = (path, _open(path))
            except Unusable as error:
                _loaded = error
        if isinstance(_loaded, Unusable):
            raise _loaded
        return _loaded[1]


cdef str _open(str path):
    global env, cpu_memory, allocator
    cdef void* handle
    cdef void* symbol
    cdef void** table
    cdef ApiBase* base
    cdef Status status
    cdef bytes encoded = os.fsencode(path)
    cdef const char* file = encoded
    with nogil:  # opening reads tens of megabytes
        handle = dlopen(file, RTLD_NOW | RTLD_LOCAL)
    if handle == NULL:
        raise Unusable(f"it cannot be opened: {dlerror().decode(errors='replace')}")
    symbol = dlsym(handle, b"OrtGetApiBase")
    if symbol == NULL:
        raise Unusable("it has no OrtGetApiBase")
    base = (<GetApiBase>symbol)()
    version = base.get_version().decode(errors="replace")
    table = base.get_api(API_VERSION)
    if table == NULL:
        raise Unusable(f"version {version} does not have version {API_VERSION} of the C API")
    _take(table)
    try:
        with nogil:
            status = ort.create_env(log, NULL, WARNING, b"neptrio", &env)
        check(status)
        check(ort.create_memory_info(ARENA, DEFAULT_MEMORY, &cpu_memory))
        check(ort.default_allocator(&allocator))
        probe()
    except OrtError as error:
        raise Unusable(f"version {version} fails at first use: {error}") from None
    return version


cdef void _take(void** table) noexcept:
    # the positions of onnxruntime_c_api.h, in our order
    (<void**>&ort.create_status)[0] = table[0]
    (<void**>&ort.error_code)[0] = table[1]
    (<void**>&ort.error_message)[0] = table[2]
    (<void**>&ort.release_status)[0] = table[93]
    (<void**>&ort.create_env)[0] = table[4]
    (<void**>&ort.create_session)[0] = table[7]
    (<void**>&ort.create_session_from)[0] = table[8]
    (<void**>&ort.release_session)[0] = table[95]
    (<void**>&ort.run)[0] = table[9]
    (<void**>&ort.create_options)[0] = table[10]
    (<void**>&ort.release_options)[0] = table[100]
    (<void**>&ort.save_optimised)[0] = table[11]
    (<void**>&ort.set_execution_mode)[0] = table[13]
    (<void**>&ort.enable_mem_pattern)[0] = table[16]
    (<void**>&ort.disable_mem_pattern)[0] = table[17]
    (<void**>&ort.enable_arena)[0] = table[18]
    (<void**>&ort.disable_arena)[0] = table[19]
    (<void**>&ort.set_log_severity)[0] = table[22]
    (<void**>&ort.set_optimization)[0] = table[23]
    (<void**>&ort.set_intra_threads)[0] = table[24]
    (<void**>&ort.set_inter_threads)[0] = table[25]
    (<void**>&ort.add_config_entry)[0] = table[130]
    (<void**>&ort.register_library)[0] = table[228]
    (<void**>&ort.input_count)[0] = table[30]
    (<void**>&ort.output_count)[0] = table[31]
    (<void**>&ort.initializer_count)[0] = table[32]
    (<void**>&ort.input_type)[0] = table[33]
    (<void**>&ort.output_type)[0] = table[34]
    (<void**>&ort.initializer_type)[0] = table[35]
    (<void**>&ort.input_name)[0] = table[36]
    (<void**>&ort.output_name)[0] = table[37]
    (<void**>&ort.initializer_name)[0] = table[38]
    (<void**>&ort.release_type)[0] = table[98]
    (<void**>&ort.kind_of_type)[0] = table[56]
    (<void**>&ort.tensor_of_type)[0] = table[55]
    (<void**>&ort.sequence_of_type)[0] = table[104]
    (<void**>&ort.sequence_element)[0] = table[107]
    (<void**>&ort.map_of_type)[0] = table[103]
    (<void**>&ort.map_key)[0] = table[105]
    (<void**>&ort.map_value)[0] = table[106]
    (<void**>&ort.optional_of_type)[0] = table[250]
    (<void**>&ort.optional_content)[0] = table[251]
    (<void**>&ort.element_type)[0] = table[60]
    (<void**>&ort.rank)[0] = table[61]
    (<void**>&ort.dimensions)[0] = table[62]
    (<void**>&ort.symbols)[0] = table[63]
    (<void**>&ort.create_tensor)[0] = table[48]
    (<void**>&ort.create_tensor_over)[0] = table[49]
    (<void**>&ort.is_tensor)[0] = table[50]
    (<void**>&ort.tensor_data)[0] = table[51]
    (<void**>&ort.tensor_shape)[0] = table[65]
    (<void**>&ort.release_tensor_shape)[0] = table[99]
    (<void**>&ort.release_value)[0] = table[96]
    (<void**>&ort.strings_length)[0] = table[53]
    (<void**>&ort.strings)[0] = table[54]
    (<void**>&ort.string_buffer)[0] = table[252]
    (<void**>&ort.create_memory_info)[0] = table[69]
    (<void**>&ort.default_allocator)[0] = table[78]
    (<void**>&ort.free_memory)[0] = table[76]


cdef int probe() except -1:
    """Passes a numeric tensor and one of strings through the library and back. Raises Unusable."""
    cdef int64_t[2] dims
    cdef int64_t[2] told
    cdef int[6] numbers
    cdef size_t[2] offsets
    cdef char[16] text
    cdef void* value = NULL
    cdef void* shape = NULL
    cdef void* data = NULL
    cdef char* buffer = NULL
    cdef size_t n = 0
    cdef int element = 0, yes = 0
    dims[0] = 2
    dims[1] = 3
    memset(told, 0, sizeof(told))
    check(ort.create_tensor_over(cpu_memory, numbers, sizeof(numbers), dims, 2, INT32, &value))
    check(ort.tensor_shape(value, &shape))
    check(ort.element_type(shape, &element))
    check(ort.rank(shape, &n))
    if n == 2:
        check(ort.dimensions(shape, told, 2))
    ort.release_tensor_shape(shape)
    check(ort.tensor_data(value, &data))
    check(ort.is_tensor(value, &yes))
    ort.release_value(value)
    if element != INT32 or n != 2 or told[0] != 2 or told[1] != 3 or data != <void*>numbers or yes != 1:
        raise Unusable("a tensor does not come back as it was given")
    dims[0] = 2
    check(ort.create_tensor(allocator, dims, 1, STRING, &value))
    check(ort.string_buffer(value, 1, 3, &buffer))
    memcpy(buffer, b"a\0b", 3)
    check(ort.strings_length(value, &n))
    if n == 3:
        check(ort.strings(value, text, 3, offsets, 2))
    ort.release_value(value)
    if n != 3 or offsets[0] != 0 or offsets[1] != 0 or memcmp(text, b"a\0b", 3) != 0:
        raise Unusable("a string does not come back as it was given")
    return 0
