"""Runs Triton's compiled backend in the process of a model: what interface.h calls the host.

The problem: a backend is a C library that calls back from any thread, while the model's process speaks rings and Python. The
choice: the library beside this module (abi) has all that a backend calls; this module gives it requests whose inputs are the
memory that came over the rings, and makes responses of what it returns.

Rules:
 1. A function that the library calls takes the GIL itself, raises nothing, and finds what it needs by a number, never by an
    address that came from a backend.
 2. An entry is in `entries` as long as its request may be asked about or answered: it goes with the answer that execute()
    returns, or when the library says that nothing is left that could answer it.
 3. A request's inputs are kept by its entry until the backend has released it.
 4. A response takes the memory of its outputs over, whatever becomes of it.
 5. What a backend reports of a request goes to the server before its answer, or with it. Where it may come later the server is
    told so, and told again when the request is released without a report.
"""
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t

from neptrio.backends.compiled.asked cimport asks, failure, put, unheard
from neptrio.backends.compiled.inferred cimport infers
from neptrio.backends.compiled.interface cimport *
from neptrio.backends.compiled.shapes cimport *
from neptrio.rings.answers cimport OutputBytes
from neptrio.rings.kinds cimport FAILED, KEEP_ABOVE, LATER, RELEASED, SUCCEEDED

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np

from triton_python_backend_utils import _host
from triton_python_backend_utils._errors import TritonModelException
from triton_python_backend_utils._request import InferenceResponse

cdef extern from "dlfcn.h" nogil:
    void* dlopen(const char*, int)
    void* dlsym(void*, const char*)
    char* dlerror()
    int RTLD_NOW
    int RTLD_GLOBAL

cdef enum:
    ROOM = 8192          # for the text of an error

ctypedef const compiled_library* (*library_function)() noexcept nogil

cdef const compiled_library* library = NULL
cdef Host running = None

KINDS = {"AUTO": 0, "CPU": 1, "GPU": 2, "MODEL": 3}
MOST_TIME = (1 << 63) - 1  # that can be said of a batch; the server keeps times within its own
UNANSWERED = "the backend has let go of the request without a response"


cdef class Timed(list):
    """Responses, with the times of their execution that the backend has reported: began, inputs made, executed; None for none."""

    cdef readonly object times


# ---------------------------------------------------------------- the model

cdef class Entry:
    """A request that the backend has: rule 2."""

    cdef object request      # None once it is released: rule 3
    cdef object back
    cdef object sender
    cdef bint later         # it was said that a report may still come: rule 5


cdef class Host:
    """The backend of one model in this process."""

    cdef dict entries        # by the request's key
    cdef object asked        # the Host of triton_python_backend_utils
    cdef bint decoupled

    def __init__(self):
        """Opens the library that backends are bound to. Raises TritonModelException."""
        global running
        self.entries = {}
        self.asked = _host.find()
        open_library(self.asked)
        running = self

    def begin(self, dict start, str config, bint auto_complete):
        """Opens the backend and begins its model; returns the configuration. Raises TritonModelException."""
        cdef compiled_start given
        cdef Room room = Room()
        cdef char text[ROOM]
        cdef int code
        given.library, given.folder = room.text(start["library"]), room.text(start["folder"])
        given.backend, given.backend_config = room.text(start["backend"]), room.text(start["backend_config"])
        given.model, given.version = room.text(start["model"]), start["version"]
        given.repository, given.config = room.text(start["repository"]), room.text(config)
        given.auto_complete, given.strategy = auto_complete, room.text("" if auto_complete else start["strategy"])
        text[0] = 0
        with nogil:
            code = library.begin(&given, text, ROOM)
        if code != COMPILED_FINE:
            raise TritonModelException(said(text))
        return said(library.config())

    def groups(self):
        """The instance groups that the backend prefers: (kind, count)."""
        cdef compiled_group found[16]
        cdef uint32_t count = library.groups(found, 16), i
        names = {number: name for name, number in KINDS.items()}
        return [(names.get(found[i].kind, "AUTO"), found[i].count) for i in range(count)]

    def manner(self) -> dict:
        """What the backend has said of itself when it began."""
        cdef compiled_manner told
        library.manner(&told)
        return {"device blocking": bool(told.device_blocking), "parallel loading": bool(told.parallel_loading)}

    def instance(self, str name, str kind, int device, bint passive, str policy, list profiles, list secondary,
                 bint decoupled):
        """Begins the instance. Raises TritonModelException."""
        cdef compiled_instance given
        cdef Room room = Room()
        cdef char text[ROOM]
        cdef int code
        cdef int64_t* ids = <int64_t*>room.take(len(secondary) * sizeof(int64_t))
        for i, row in enumerate(secondary):
            ids[i] = row[1]
        given.name, given.kind, given.device = room.text(name), KINDS.get(kind, 0), device
        given.host_policy, given.passive = room.text(policy), passive
        given.profiles, given.profile_count = room.texts(profiles), len(profiles)
        given.secondary_kinds = room.texts([row[0] for row in secondary])
        given.secondary_ids, given.secondary_count = ids, len(secondary)
        self.decoupled = decoupled
        text[0] = 0
        with nogil:
            code = library.instance(&given, text, ROOM)
        if code != COMPILED_FINE:
            raise TritonModelException(said(text))

    def ready(self) -> bool:
        cdef char text[ROOM]
        cdef int code
        text[0] = 0
        with nogil:
            code = library.ready(text, ROOM)
        if code != COMPILED_FINE:
            self.asked.log(2, f"the backend says that it is not ready: {said(text)}", "compiled", 0)
        return code == COMPILED_FINE

    def finish(self):
        """Ends instance, model and backend. Raises TritonModelException."""
        cdef char text[ROOM]
        with nogil:
            library.finish(text, ROOM)
        if text[0]:
            raise TritonModelException(said(text))

    def execute(self, list requests):
        """Runs a batch, or as many as a strategy makes of it; returns what execute() of a Python model does, of the last."""
        cdef uint32_t count = len(requests), at = 0, some, i
        cdef Room room = Room()
        cdef compiled_request* given = <compiled_request*>room.take(count * sizeof(compiled_request))
        cdef Entry entry
        for i in range(count):
            request = requests[i]
            entry = Entry.__new__(Entry)
            entry.request, entry.back = request, request._channel
            entry.sender = request.get_response_sender() if self.decoupled else None
            self.fill(&given[i], request, room)
            self.entries[request._channel.id] = entry
        while True:
            with nogil:
                some = library.together(&given[at], count - at)
            if at + some == count:
                return self.executed(requests[at:] if at else requests, &given[at], some)
            self.asked.answer_first(some, self.executed(requests[at:at + some], &given[at], some))
            at += some

    cdef object executed(self, list requests, compiled_request* given, uint32_t count):
        """Runs some requests together."""
        cdef const compiled_execution* executions = NULL
        cdef uint32_t execution_count = 0, i
        cdef char text[ROOM]
        cdef int code
        cdef Timed made
        cdef list stated = []
        text[0] = 0
        self.asked.execution_begins()
        with nogil:
            code = library.execute(given, count, &executions, &execution_count, text, ROOM)
        if code != COMPILED_FINE:
            return self.failed(requests, code, said(text))
        made = Timed()
        for i in range(count):
            made.append(self.settled(requests[i], given[i].handle, stated))
        rows = [(min(executions[i].size, MOST_TIME), *times_of(&executions[i].times)) for i in range(execution_count)]
        if rows:
            made.times = rows[len(rows) - 1][1:4]
        elif stated and len(stated[0]) > 2:
            made.times = stated[0][2:5]
        if stated or rows:
            self.asked.stated_with_answers(stated, rows)
        return None if self.decoupled else made

    cdef int fill(self, compiled_request* given, request, Room room) except -1:
        id = request._correlation_id
        trace = request._trace
        given.key = request._channel.id
        given.id = room.text(request._request_id)
        given.correlation, given.correlation_text = 0, NULL
        if type(id) is str:
            given.correlation_text = room.text(id)
        else:
            given.correlation = id
        given.flags, given.timeout_us = request._flags, request._timeout
        given.traced, given.context = trace is not None, NULL
        if trace is not None:
            given.trace, given.trace_parent = trace._id, trace._parent
        if trace is not None and trace._context is not None:
            given.context = room.text(trace._context)
        given.inputs, given.input_count = room.tensors(request._inputs), len(request._inputs)
        names = request._requested_output_names
        given.outputs, given.output_count = room.texts(names), len(names)
        parameters = request._parameters or {}
        given.parameters, given.parameter_count = room.parameters(parameters), len(parameters)
        given.direct, given.handle = self.decoupled, 0
        return 0

    cdef object failed(self, list requests, int code, str text):
        """The backend has given the whole batch back, with an error."""
        cdef Entry entry
        made = []
        for request in requests:
            entry = self.entries.pop(request._channel.id)
            response = InferenceResponse(error=error_of(code, text))
            if entry.sender is None:
                made.append(response)
            elif not entry.sender._channel.closed:  # by a response before
                entry.sender.send(response, 1)
        return None if self.decoupled else made

    cdef object settled(self, request, uint64_t handle, list stated):
        """What has become of a request: its response, or None where a sender has it or it is executed again. Adds what was reported
        of it to `stated`."""
        cdef compiled_settled found
        cdef uint64_t key = request._channel.id
        cdef Entry entry = self.entries[key]
        response = None
        if library.waits(handle):  # from settle() on, any thread may answer it
            entry.sender = entry.back.sender(None)
        library.settle(handle, &found)
        if found.released:
            entry.request = None
        row = None
        if found.stated.said:
            row = stated_of(key, &found.stated)
        elif found.outcome == COMPILED_ANSWERED and found.response.later and entry.request is not None:
            entry.later = True
            row = key, LATER
        if row is not None and entry.sender is None:
            stated.append(row)
        elif row is not None:  # it is answered before the others
            self.asked.stated(row)
        if found.outcome == COMPILED_OPEN:
            return self.left(handle)
        sender = entry.sender
        if found.outcome == COMPILED_ANSWERED and not found.released:
            entry.sender = None  # rule 3: on_forgotten() lets go of it
        else:
            self.entries.pop(key, None)
        if found.outcome == COMPILED_ANSWERED:
            response = self.response(&found.response)
            library.carried(handle)
        elif found.outcome == COMPILED_AGAIN:
            request.set_release_flags(2)
            return self.left(handle)
        else:
            response = InferenceResponse(error=error_of(1, UNANSWERED))
        self.left(handle)
        if sender is not None:
            sender.send(response, 1)
            return None
        return response

    cdef object left(self, uint64_t handle):
        with nogil:  # it may call on_forgotten()
            library.dropped(handle)
        return None

    cdef object response(self, const compiled_response* given):
        """A response; it has the outputs' memory, and whoever calls tells the library so: rule 4."""
        cdef uint32_t i
        cdef const compiled_tensor* at
        cdef OwnBytes own
        tensors = []
        for i in range(given.output_count):
            at = &given.outputs[i]
            if at.token != NULL:
                memory = <object>at.token
                Py_DECREF(memory)  # the library's reference
            else:
                own = OwnBytes.__new__(OwnBytes)
                own.data, own.size = <void*>at.data, at.size
                memory = own
            if given.code == COMPILED_FINE:
                tensors.append(tensor_over(said(at.name), at.datatype, at.shape, at.dims, memory, at.data, at.size))
        error = None if given.code == COMPILED_FINE else error_of(given.code, said(given.error))
        values = values_of(given.parameters, given.parameter_count)
        return InferenceResponse(tensors, error, values or None)


cdef tuple times_of(const compiled_times* times):
    return (min(times.exec_start, MOST_TIME), min(times.compute_start, MOST_TIME), min(times.compute_end, MOST_TIME),
            min(times.exec_end, MOST_TIME))


cdef tuple stated_of(uint64_t key, const compiled_stated* stated):
    """What was reported of a request, as Host.stated() takes it."""
    return key, SUCCEEDED if stated.success else FAILED, *times_of(&stated.times)


# ---------------------------------------------------------------- called by the library: rule 1

cdef int on_respond(uint64_t key, const compiled_response* given, char* text, size_t room) noexcept with gil:
    cdef Entry entry
    try:
        response = None if given.null else running.response(given)
        entry = running.entries.get(key)
        if entry is None or entry.sender is None:
            return put("the request was answered before", text, room, 3)
        if given.stated.said:
            running.asked.stated(stated_of(key, &given.stated))
        elif given.later and entry.request is not None:  # which nobody can release between here and the next line
            entry.later = True
            running.asked.stated((key, LATER))
        entry.sender.send(response, given.flags)
        return COMPILED_FINE
    except BaseException as error:
        return failure(error, text, room)

cdef void on_released(uint64_t key) noexcept with gil:
    cdef Entry entry = running.entries.get(key)
    try:
        if entry is not None:
            entry.request = None
            if entry.later:
                running.asked.stated((key, RELEASED))
    except BaseException as error:
        unheard("the release of a request was not told", error)

cdef void on_stated(uint64_t key, const compiled_stated* stated) noexcept with gil:
    try:
        running.asked.stated(stated_of(key, stated))
    except BaseException as error:
        unheard("the statistics of a request were not told", error)

cdef void on_activity(uint64_t key, uint64_t ns, const char* name) noexcept with gil:
    try:
        running.asked.activity_reported(key, min(ns, MOST_TIME), said(name))
    except BaseException as error:
        unheard("an activity of a trace was not told", error)

cdef void on_executed(const compiled_execution* execution) noexcept with gil:
    try:
        running.asked.execution_measured((min(execution.size, MOST_TIME), *times_of(&execution.times)))
    except BaseException as error:
        unheard("the statistics of an execution were not told", error)

cdef void on_forgotten(uint64_t key, const compiled_stated* stated) noexcept with gil:
    cdef Entry entry = running.entries.pop(key, None)
    try:
        if entry is not None and entry.sender is not None and not entry.sender._channel.closed:
            if stated.said:
                running.asked.stated(stated_of(key, stated))
            entry.sender.send(InferenceResponse(error=error_of(1, UNANSWERED)), 1)
    except BaseException as error:
        unheard("the end of a request without a response was not told", error)

cdef int on_cancelled(uint64_t key) noexcept with gil:
    cdef Entry entry
    try:
        entry = running.entries.get(key)
        if entry is None:
            return 0
        # it does not listen: that would call the backend's callbacks on a thread that may hold the backend's locks
        return entry.back.cancelled or entry.back.id in entry.back.child.cancelled
    except BaseException as error:
        unheard("whether a request is cancelled is not known", error)
        return 0

cdef void* on_allocate(size_t size, void** token) noexcept with gil:
    cdef OutputBytes memory
    try:
        made = running.asked.empty((size,), np.dtype(np.uint8))
        base = made.base
        while isinstance(base, np.ndarray):
            base = base.base
        if type(base) is not OutputBytes:
            return NULL
        memory = base
        Py_INCREF(memory)
        token[0] = <void*>memory
        return memory.segment.base + memory.block.offset
    except BaseException as error:
        unheard(f"no memory of {size} bytes for an output", error)
        return NULL

cdef void on_unused(void* token) noexcept with gil:
    Py_DECREF(<object>token)

def library_path():
    """The library that backends are bound to."""
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        if (folder / f"abi{suffix}").is_file():
            return str(folder / f"abi{suffix}")
    raise TritonModelException(
        "this server was built without the library that compiled backends need: build it where there is a C++ compiler"
    )


cdef int open_library(asked) except -1:
    global library
    cdef compiled_host functions
    cdef void* opened
    cdef bytes path = library_path().encode()
    if library != NULL:
        return 0
    opened = dlopen(path, RTLD_NOW | RTLD_GLOBAL)
    if opened == NULL:
        raise TritonModelException(said(dlerror()))
    library = (<library_function>dlsym(opened, b"neptrio_compiled_library"))()
    functions.respond, functions.released, functions.forgotten = on_respond, on_released, on_forgotten
    functions.cancelled, functions.allocate, functions.unused = on_cancelled, on_allocate, on_unused
    functions.shared_above = KEEP_ABOVE
    functions.stated, functions.executed, functions.activity = on_stated, on_executed, on_activity
    infers(&functions, library, asked)
    asks(&functions, asked)
    library.hosted(&functions)
    return 0
