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
"""
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t

from neptrio.backends.compiled.asked cimport asks, failure, put, unheard
from neptrio.backends.compiled.interface cimport *
from neptrio.backends.compiled.shapes cimport *
from neptrio.rings.answers cimport OutputBytes
from neptrio.rings.kinds cimport KEEP_ABOVE

import threading
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np

from triton_python_backend_utils import _host
from triton_python_backend_utils._errors import TritonModelException
from triton_python_backend_utils._request import InferenceRequest, InferenceResponse, InferenceTrace

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
    """Responses, with the times that the backend has reported: began, inputs made, executed; None for none."""

    cdef readonly object times


# ---------------------------------------------------------------- the model

cdef class Entry:
    """A request that the backend has: rule 2."""

    cdef object request      # None once it is released: rule 3
    cdef object back
    cdef object sender


cdef class Host:
    """The backend of one model in this process."""

    cdef dict entries        # by the request's key
    cdef dict calls          # under way, by number
    cdef object asked        # the Host of triton_python_backend_utils
    cdef bint decoupled

    def __init__(self):
        """Opens the library that backends are bound to. Raises TritonModelException."""
        global running
        self.entries, self.calls = {}, {}
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
        cdef compiled_times times
        cdef char text[ROOM]
        cdef int code
        cdef uint32_t i
        cdef Timed made
        text[0] = 0
        with nogil:
            code = library.execute(given, count, &times, text, ROOM)
        if code != COMPILED_FINE:
            return self.failed(requests, code, said(text))
        if self.decoupled:
            return None
        made = Timed()
        for i in range(count):
            made.append(self.settled(requests[i], given[i].handle))
        if times.reported:
            made.times = tuple([min(each, MOST_TIME) for each in (times.exec_start, times.compute_start, times.compute_end)])
        return made

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
            else:
                entry.sender.send(response, 1)
        return None if self.decoupled else made

    cdef object settled(self, request, uint64_t handle):
        """What has become of a request: its response, or None where a sender has it."""
        cdef compiled_settled found
        cdef uint64_t key = request._channel.id
        cdef Entry entry = self.entries[key]
        response = None
        if library.waits(handle):  # from settle() on, any thread may answer it
            entry.sender = entry.back.sender(None)
        library.settle(handle, &found)
        if found.released:
            entry.request = None
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


# ---------------------------------------------------------------- called by the library: rule 1

cdef int on_respond(uint64_t key, const compiled_response* given, char* text, size_t room) noexcept with gil:
    cdef Entry entry
    try:
        response = None if given.null else running.response(given)
        entry = running.entries.get(key)
        if entry is None or entry.sender is None:
            return put("the request was answered before", text, room, 3)
        entry.sender.send(response, given.flags)
        return COMPILED_FINE
    except BaseException as error:
        return failure(error, text, room)

cdef void on_released(uint64_t key) noexcept with gil:
    cdef Entry entry = running.entries.get(key)
    if entry is not None:
        entry.request = None

cdef void on_forgotten(uint64_t key) noexcept with gil:
    cdef Entry entry = running.entries.pop(key, None)
    try:
        if entry is not None and entry.sender is not None and not entry.sender._channel.closed:
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

cdef int on_infer(const compiled_call* call, char* text, size_t room) noexcept with gil:
    cdef uint32_t i
    cdef const compiled_tensor* at
    cdef LentBytes memory
    try:
        tensors = []
        for i in range(call.input_count):
            at = &call.inputs[i]
            memory = LentBytes.__new__(LentBytes)
            memory.data, memory.size = at.data, at.size
            tensors.append(tensor_over(said(at.name), at.datatype, at.shape, at.dims, memory, at.data, at.size))
        request = InferenceRequest(
            said(call.id),
            call.correlation if call.correlation_text == NULL else said(call.correlation_text),
            tensors,
            [said(call.outputs[i]) for i in range(call.output_count)],
            said(call.model),
            call.version,
            call.flags,
            call.timeout_us,
            None,
            InferenceTrace(call.trace_key) if call.trace_key else None,
            values_of(call.parameters, call.parameter_count) or None,
        )
        running.calls[call.call] = made = Called(call.call)
        made.begin(running.asked, request)
        return COMPILED_FINE
    except BaseException as error:
        running.calls.pop(call.call, None)
        return failure(error, text, room)

cdef void on_cancel_call(uint64_t call) noexcept with gil:
    try:
        made = running.calls.get(call)
        if made is not None:
            made.cancel()
    except BaseException as error:
        unheard("a request of the backend was not cancelled", error)


class Called:
    """A request that the backend has made. Its responses come on the second thread, perhaps before begin() has returned."""

    def __init__(self, number):
        self.number = number
        self.handle = None
        self.early = []
        self.lock = threading.Lock()

    def begin(self, asked, request):
        handle = asked.infer(request, True, self.deliver, False)
        with self.lock:
            self.handle = handle
            early, self.early = self.early, []
        for response in early:
            handle.took(response)

    def cancel(self):
        with self.lock:
            handle = self.handle
        if handle is not None:
            handle.cancel()

    def deliver(self, response, final):
        cdef Room room = Room()
        cdef compiled_response given
        cdef uint64_t number = self.number
        cdef bint last = final
        cdef bint null = response is None
        if not null:
            error = response._error
            parameters = response._parameters or {}
            given.code, given.error = COMPILED_FINE, NULL
            if error is not None:
                given.code, given.error = int(error._code), room.text(error._message)
            given.flags, given.null = 0, 0
            given.outputs, given.output_count = room.tensors(response._tensors), len(response._tensors)
            given.parameters, given.parameter_count = room.parameters(parameters), len(parameters)
        if final:
            running.calls.pop(self.number, None)
        with nogil:
            library.deliver(number, NULL if null else &given, last)
        if not null or last:  # the end counts as a response of the call, too
            with self.lock:
                handle = self.handle
                if handle is None:
                    self.early.append(response)
            if handle is not None:
                handle.took(response)


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
    functions.infer, functions.cancel_call = on_infer, on_cancel_call
    asks(&functions, asked)
    library.hosted(&functions)
    return 0
