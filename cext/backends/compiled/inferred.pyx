"""Requests that a backend makes to models of the server.

Rules, beside those of host.pyx:
 1. A call is known to the library by a number.
 2. The backend's callbacks run on a thread of their own, one after the other, in the order in which the responses have come. They
    may wait: for a lock, or in a ResponseSend until the client has read. So who hears a response only puts it into a queue, and
    goes on to hear the acknowledgements and cancellations that end such waiting.
 3. The server hears that a response was taken when its callback has returned. So the queue holds of each call what a Python model
    may have left untaken.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from neptrio.backends.compiled.asked cimport failure, put, unheard
from neptrio.backends.compiled.interface cimport *
from neptrio.backends.compiled.shapes cimport *

import json
import queue
import threading

from neptrio.backends.compiled.raw_input import CannotBeDeduced, deduced
from triton_python_backend_utils._errors import ErrorCode, TritonError
from triton_python_backend_utils._process import threads
from triton_python_backend_utils._request import InferenceRequest, InferenceTrace


cdef enum:
    LENGTH = 4               # bytes in which the number of a raw input's stands before them
    STRINGS = 13


cdef class Inferring:
    """Who is asked, the calls under way by number, and their responses on the way to the backend: rule 2."""

    cdef object asked        # the Host of triton_python_backend_utils
    cdef dict calls
    cdef object arrived      # (Called, response, final, times) of each
    cdef bint delivering     # a thread takes them
    cdef object lock         # of what was said last

    cdef int begin(self) except -1:
        """Starts the thread, which the process does not wait for when it ends. Raises NoThread."""
        with self.lock:
            if not self.delivering:
                threads.start(deliver_for_ever)
                self.delivering = True
        return 0


cdef Inferring running = None
cdef const compiled_library* library = NULL


def deliver_for_ever():
    """Hands responses to the backend: rule 2."""
    while True:
        called, response, final, times = running.arrived.get()
        try:
            called.hand_over(response, final, times)
        except BaseException as error:
            unheard("a response of a request of the backend was not given to it", error)
        called = response = None  # the memory that it is in goes back to the server


cdef object raw_tensor(const compiled_call* call):
    """The only input of a request, which is what the model's configuration says."""
    cdef const char* data = <const char*>call.inputs[0].data
    cdef size_t size = call.inputs[0].size, skipped
    cdef LentBytes memory = LentBytes.__new__(LentBytes)
    cdef Room room = Room()
    cdef int64_t* dims
    code, found = running.asked.described("config", said(call.model), "" if call.version < 0 else str(call.version))
    if code >= 0:
        raise TritonError(found, ErrorCode(code))
    name, datatype, shape = deduced(json.loads(found), size - LENGTH)
    dims = <int64_t*>room.take(len(shape) * sizeof(int64_t))
    for i, dim in enumerate(shape):
        dims[i] = dim
    skipped = 0 if datatype == STRINGS else LENGTH
    memory.data, memory.size = data + skipped, size - skipped
    return tensor_over(name, datatype, dims, <uint32_t>len(shape), memory, memory.data, memory.size)

cdef int on_infer(const compiled_call* call, char* text, size_t room) noexcept with gil:
    cdef uint32_t i
    cdef const compiled_tensor* at
    cdef LentBytes memory
    try:
        if not running.delivering:
            running.begin()
        tensors = [raw_tensor(call)] if call.raw else []
        for i in range(0 if call.raw else call.input_count):
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
        request._priority, request._timed = call.priority, bool(call.timed)
        running.calls[call.call] = made = Called(call.call)
        made.begin(running.asked, request)
        return COMPILED_FINE
    except CannotBeDeduced as error:
        return put(error, text, room, 3)
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
    """A request that the backend has made. Its responses may come, and be handed over, before begin() has returned."""

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

    def deliver(self, response, final, times=None):
        running.arrived.put((self, response, final, times))

    def hand_over(self, response, final, times):
        """Calls the backend with a response."""
        cdef Room room = Room()
        cdef compiled_response given
        cdef compiled_passed passed
        cdef bint timed = times is not None
        cdef int stage
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
        if timed:
            for stage in range(COMPILED_STAGES):
                passed.stages[stage] = times[stage]
            passed.version = times[COMPILED_STAGES]
        if final:
            running.calls.pop(self.number, None)
        with nogil:
            library.deliver(number, NULL if null else &given, last, &passed if timed else NULL)
        if not null or last:  # the end counts as a response of the call, too
            with self.lock:
                handle = self.handle
                if handle is None:
                    self.early.append(response)
            if handle is not None:
                handle.took(response)


cdef int infers(compiled_host* functions, const compiled_library* opened, asked) except -1:
    """Fills in the functions of this module; `asked` makes the requests, and `opened` is given their responses."""
    global running, library
    running = Inferring.__new__(Inferring)
    running.asked, running.calls = asked, {}
    running.arrived, running.lock = queue.SimpleQueue(), threading.Lock()
    library = opened
    functions.infer, functions.cancel_call = on_infer, on_cancel_call
    return 0
