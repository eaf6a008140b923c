"""What a backend asks of the server and tells it beside requests: log lines, metrics, loading and readiness of models, memory
that it holds, durations of its responses.

Rules: those of host.pyx. A metric is known to the library by a number.
"""
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from neptrio.backends.compiled.interface cimport *
from neptrio.backends.compiled.shapes cimport RAW, said, values_of

import json
import mmap
import sys

from triton_python_backend_utils._errors import ErrorCode, TritonModelException
from triton_python_backend_utils._foreign import text_of

LEVELS = 4  # of the log: neptrio.execution.log_levels
MEMORY = ("CPU", "CPU_PINNED", "GPU")
MOST_BYTES = (1 << 62) - 1  # that the server believes
# as interface.h has them
SUBJECTS = ("ready", "server", "metadata", "config", "statistics", "index", "ready index", "batching", "metrics")


cdef class Asking:
    """Who is asked, and the metrics by number."""

    cdef object host         # of triton_python_backend_utils
    cdef dict metrics
    cdef object shown        # the memory of functions.shown
    cdef uint64_t last

    cdef uint64_t numbered(self, object metric):
        self.last += 1
        self.metrics[self.last] = metric
        return self.last


cdef Asking running = None


cdef int put(object text, char* room, size_t size, int code) noexcept:
    cdef bytes made = str(text).encode("utf-8", "replace")[:size - 1]
    memcpy(room, PyBytes_AS_STRING(made), len(made))
    room[len(made)] = 0
    return code


cdef int failure(object error, char* room, size_t size) noexcept:
    return put(text_of(error), room, size, error._number if isinstance(error, TritonModelException) else ErrorCode.INTERNAL)


cdef void unheard(str what, object error) noexcept:
    """For what gives the backend no error: a line of the process, which the server logs."""
    sys.stderr.write(f"{what}: {text_of(error)}\n")

cdef void on_log(int level, const char* file, int line, const char* text) noexcept with gil:
    try:
        running.host.log(level if 0 <= level <= 3 else 0, said(text), said(file), line)
    except BaseException as error:
        unheard("a line of the backend's log was not taken", error)

cdef void on_memory(const compiled_memory* held, uint32_t count) noexcept with gil:
    cdef uint32_t i
    cdef dict rows = {}
    cdef object key
    try:
        for i in range(count):
            key = (MEMORY[held[i].type], held[i].id)
            rows[key] = min(rows.get(key, 0) + held[i].size, MOST_BYTES)
        running.host.holds_memory([(kind, id, size) for (kind, id), size in rows.items()])
    except BaseException as error:
        unheard("the backend's report of its memory was not taken", error)

cdef void on_measured(const compiled_durations* durations) noexcept with gil:
    try:
        running.host.response_measured(durations.place, durations.outcome, durations.computing_ns, durations.output_ns)
    except BaseException as error:
        unheard("the backend's statistics of a response were not taken", error)

cdef int on_family(int kind, const char* name, const char* description, uint64_t* id, char* text,
                   size_t room) noexcept with gil:
    try:
        id[0] = running.numbered(running.host.metric_family(said(name), said(description), kind))
        return COMPILED_FINE
    except BaseException as error:
        return failure(error, text, room)

cdef int on_metric(uint64_t family, const compiled_parameter* labels, uint32_t count, const double* buckets,
                   uint32_t bucket_count, int bucketed, uint64_t* id, char* text, size_t room) noexcept with gil:
    cdef uint32_t i
    try:
        bounds = [buckets[i] for i in range(bucket_count)] if bucketed else None
        id[0] = running.numbered(running.metrics[family].Metric(values_of(labels, count), bounds))
        return COMPILED_FINE
    except BaseException as error:
        return failure(error, text, room)

cdef int on_change(uint64_t metric, int what, double value, double* found, char* text, size_t room) noexcept with gil:
    try:
        made = running.metrics[metric]
        if what == 3:
            found[0] = made.value()
        else:
            getattr(made, ("increment", "set", "observe")[what])(value)
        return COMPILED_FINE
    except BaseException as error:
        return failure(error, text, room)

cdef void on_forget_metric(uint64_t id) noexcept with gil:
    running.metrics.pop(id, None)

cdef int on_load(const char* model, const compiled_parameter* given, uint32_t count, char* text,
                 size_t room) noexcept with gil:
    cdef uint32_t i
    try:
        config, files = "", {}
        for i in range(count):
            if given[i].type == RAW:
                files[said(given[i].name)] = <bytes>given[i].string[:given[i].size]
            else:
                config = said(given[i].string)
        running.host.load_model(said(model), files, config)
        return COMPILED_FINE
    except BaseException as error:
        return failure(error, text, room)

cdef int on_unload(const char* model, int dependents, char* text, size_t room) noexcept with gil:
    try:
        running.host.unload_model(said(model), bool(dependents))
        return COMPILED_FINE
    except BaseException as error:
        return failure(error, text, room)

cdef int on_ready(const char* model, int64_t version, int* found, char* text, size_t room) noexcept with gil:
    try:
        found[0] = running.host.is_model_ready(said(model), "" if version < 0 else str(version))
        return COMPILED_FINE
    except BaseException as error:
        return failure(error, text, room)

cdef int on_describe(int subject, const char* model, int64_t version,
                     void (*take)(void*, const char*, size_t) noexcept nogil, void* taker, char* text, size_t room) noexcept with gil:
    cdef bytes told
    try:
        code, found = running.host.described(SUBJECTS[subject], said(model), "" if version < 0 else str(version))
        if code >= 0:
            return put(found, text, room, code)
        told = found.encode()
        take(taker, PyBytes_AS_STRING(told), len(told))
        return COMPILED_FINE
    except BaseException as error:
        return failure(error, text, room)

cdef int on_labels(const char* model, int64_t version, const char* output, void (*take)(void*, const char*, size_t) noexcept nogil,
                   void* taker, char* text, size_t room) noexcept with gil:
    cdef bytes told
    try:
        code, found = running.host.described("labels", said(model), "" if version < 0 else str(version))
        if code >= 0:
            return put(found, text, room, code)
        told = b"".join([label.encode() + b"\0" for label in json.loads(found).get(said(output), ())])
        take(taker, PyBytes_AS_STRING(told), len(told))
        return COMPILED_FINE
    except BaseException as error:
        return failure(error, text, room)

cdef int on_decoupled(const char* model, int64_t version, int* found, char* text, size_t room) noexcept with gil:
    try:
        found[0] = running.host.is_model_decoupled(said(model), "" if version < 0 else str(version))
        return COMPILED_FINE
    except BaseException as error:
        return failure(error, text, room)


cdef int asks(compiled_host* functions, host) except -1:
    """Fills in the functions of this module; `host` is asked."""
    global running
    running = Asking.__new__(Asking)
    running.host, running.metrics = host, {}
    cdef const unsigned char[:] shown
    functions.shown = NULL
    if host.lent:
        running.shown = mmap.mmap(host.lent[0], LEVELS, prot=mmap.PROT_READ)
        shown = running.shown
        functions.shown = &shown[0]
    functions.log, functions.memory, functions.measured = on_log, on_memory, on_measured
    functions.family, functions.metric, functions.change = on_family, on_metric, on_change
    functions.forget_metric = on_forget_metric
    functions.load, functions.unload = on_load, on_unload
    functions.ready, functions.decoupled, functions.describe = on_ready, on_decoupled, on_describe
    functions.labels = on_labels
    return 0
