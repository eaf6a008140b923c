"""The model's end of the rings, in the process of an isolated model.

The main thread waits on one ring for batches, and for the answer to a call that it makes; a second
thread waits on another for everything that must be heard while the main thread executes. Whoever
has something to say pushes on the third.

What belongs to whom:
 1. A message of the server belongs to the server. A GivenMessage is the right to look at it; when the last
    array over it is gone the server is told, and only then is its memory used again.
 2. A message of ours lies in our half of the shared memory, whose accounts (cext/rings/slab) are this process's
    own. One whose tensors were copied by the server is free as soon as the server has passed its
    descriptor; one that it looks at where it lies is `lent` until it gives it back.
 3. Packing runs Python code (a lazy array, a string's encoding), so other threads may run in between:
    a Packer is checked out by one of them at a time.
 4. A push is never given up and never blocks a finalizer: a release that finds the ring full waits in
    `unsaid` for the next push.
 5. Any thread may have to make room in the second thread's ring. To take a descriptor and to put it at the end of `heard`
    is one step: no Python code runs in between, so no two threads change the order. From there, one thread at a time
    takes and handles them (hear() of ring_child.py).
 6. A process that the model forks has the same memory and is no end of the rings. Once told by leave() it touches neither:
    what would be pushed raises, what would be taken is not there, and nothing is released.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.memoryview cimport PyMemoryView_FromObject, PyMemoryView_GET_BUFFER
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy
from posix.time cimport nanosleep, timespec
from posix.unistd cimport write

from neptrio.request.sched cimport sched_yield
from neptrio.rings.packet cimport Packer, Reader, read_raw, read_text, read_u32, read_u64
from neptrio.rings.ring cimport (
    Entry,
    RingEnd,
    Segment,
    ring_advance,
    ring_head,
    ring_must_wake,
    ring_peek,
    ring_push,
    ring_spin,
    ring_wait,
)
from neptrio.rings.kinds cimport *
from neptrio.rings.slab cimport Block, Slab, block_of

import json
from collections import deque

import numpy as np

from triton_python_backend_utils._process.reserved import sealed_memory
from triton_python_backend_utils._errors import ErrorCode, TritonError, TritonModelException
from triton_python_backend_utils._execute import OPEN_ANSWER, RESCHEDULED_ANSWER
from triton_python_backend_utils._foreign import text_of
from triton_python_backend_utils._host import FORKED
from triton_python_backend_utils._request import InferenceRequest, InferenceResponse, InferenceTrace
from triton_python_backend_utils._tensor import Tensor
from triton_python_backend_utils._types import _NUMPY, join_strings, numpy_dtype, split_strings

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(object)

cdef enum:
    MOST_IN_VAIN = 63       # see ChildEnd.wait_answer()
    STRINGS = 13
    OFFER_ABOVE = 16384     # bytes of a response, behind which the core is offered to others
    WITHOUT_GIL = 65536      # bytes; below this, giving the GIL up costs more than the copy

cdef object _frombuffer = np.frombuffer
cdef object _ndarray = np.ndarray
cdef object _dumps = json.dumps
cdef object _loads = json.loads
cdef dict _DTYPES = _NUMPY
cdef tuple _HOST = (1, 0)



@cython.final
cdef class Heard:
    """Descriptors in the order in which they came. In memory of C, so that to add one runs nothing else."""

    cdef Entry* entries
    cdef size_t room
    cdef size_t first
    cdef size_t count

    def __dealloc__(self):
        free(self.entries)

    cdef int make_room(self) except -1:
        """Room for one more."""
        cdef Entry* grown
        cdef size_t room, head
        if self.count < self.room:
            return 0
        room = 2 * self.room if self.room else 16
        grown = <Entry*>malloc(room * sizeof(Entry))
        if grown == NULL:
            raise MemoryError
        head = self.room - self.first
        if self.count:
            memcpy(grown, self.entries + self.first, head * sizeof(Entry))
            memcpy(grown + head, self.entries, self.first * sizeof(Entry))
        free(self.entries)
        self.entries, self.room, self.first = grown, room, 0
        return 0

    cdef void add(self, const Entry* entry) noexcept:
        """Call make_room() before."""
        self.entries[(self.first + self.count) % self.room] = entry[0]
        self.count += 1

    cdef bint take(self, Entry* entry) noexcept:
        if self.count == 0:
            return False
        entry[0] = self.entries[self.first]
        self.first = (self.first + 1) % self.room
        self.count -= 1
        return True


@cython.no_gc
cdef class GivenMessage:
    """A message of the server; rule 1."""

    cdef ChildEnd end
    cdef Segment segment
    cdef uint64_t offset
    cdef const char* base
    cdef uint64_t size       # of its own part
    cdef uint64_t length

    def __dealloc__(self):
        if self.end is not None:
            self.end.release(self.offset)


@cython.no_gc
@cython.freelist(64)
cdef class InputBytes:
    """The writable memory of an input."""

    cdef GivenMessage message
    cdef const char* data
    cdef uint64_t size
    cdef int dtype
    cdef tuple shape
    cdef bint readonly

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void*>self.data, self.size, self.readonly, flags)


@cython.no_gc
cdef class OutputBytes:
    """Memory of this process's half that a response can carry as it is."""

    cdef Segment segment
    cdef Block block

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.segment.base + self.block.offset, self.block.size, False, flags)


def _array(InputBytes source not None):
    """The array of an input (Tensor._over's convert)."""
    if source.dtype == STRINGS:
        elements = split_strings(source)
        array = np.empty(len(elements), dtype=object)
        array[:] = elements
        return array.reshape(source.shape)
    dtype = _DTYPES.get(source.dtype)
    if dtype is None:
        dtype = numpy_dtype(source.dtype)
    if source.size == 0:
        return np.empty(source.shape, dtype)
    array = _frombuffer(source, dtype)
    if len(source.shape) != 1:
        array = array.reshape(source.shape)
    return array


cdef struct Sole:
    # how many references there are, here, to what belongs to an answer and to nobody else
    Py_ssize_t response
    Py_ssize_t tensors
    Py_ssize_t tensor
    Py_ssize_t array
    Py_ssize_t base


cdef class ChildEnd:
    """See the module's text. `links` sends segments over the socket and knows those that came."""

    cdef Segment segment
    cdef RingEnd work
    cdef RingEnd control
    cdef RingEnd answers
    cdef Slab slab
    cdef Packer packer
    cdef object passing          # deque of (position in the ring, Block): copied once the server is past it
    cdef dict lent               # offset -> (Block or Segment, what it refers to)
    cdef Heard heard             # what was taken from the second thread's ring and is not handled yet; rule 5
    cdef list unsaid             # entries that found the ring full in a finalizer
    cdef object links
    cdef int bell
    cdef uint64_t outputs_first
    cdef uint64_t number
    cdef int64_t spin_ns            # how long to ask for a call's answer before falling asleep; 0: not at all
    cdef int in_vain                # for so many answers it was not asked for, after it had been in vain
    cdef readonly int not_now       # for so many it will not be
    cdef readonly bint read_only
    cdef bint measuring
    cdef bint left                  # rule 6
    cdef Sole most
    cdef str model_name
    cdef int64_t model_version
    cdef list output_names
    cdef object channel          # channel(id, wanted names) makes a request's way back

    def __init__(self, int fd, int bell, dict layout, links, channel, str model_name, int64_t model_version,
                 list output_names, bint read_only, int64_t spin_ns):
        self.segment = Segment(fd, layout["size"])
        self.bell = bell
        self.work.base = self.segment.base + <size_t>layout["work"]
        self.work.entries = layout["work_entries"]
        self.control.base = self.segment.base + <size_t>layout["control"]
        self.control.entries = layout["control_entries"]
        self.answers.base = self.segment.base + <size_t>layout["done"]
        self.answers.entries = layout["done_entries"]
        self.outputs_first = layout["outputs"]
        self.slab = Slab(layout["outputs"], layout["area"])
        self.links = links
        self.channel = channel
        self.passing = deque()
        self.lent = {}
        self.heard = Heard()
        self.unsaid = []
        self.model_name = model_name
        self.model_version = model_version
        self.output_names = output_names
        self.read_only = read_only
        self.spin_ns = spin_ns
        self.in_vain = self.not_now = 0
        self.measure()

    # ------------------------------------------------------------ taking

    def wait(self) -> bool:
        """Sleeps until the main thread's ring holds something; False after a signal."""
        cdef int got
        with nogil:
            got = ring_wait(&self.work, 0, -1)
        return got > 0

    def wait_answer(self) -> bool:
        """The same for the answer to a call, which often comes sooner than one falls asleep and is woken up. So it asks
        for a while first; when that was in vain, it does so less and less often, until it is not."""
        cdef bint came = False
        if self.spin_ns > 0:
            if self.not_now > 0:
                self.not_now -= 1
            else:
                with nogil:
                    came = ring_spin(&self.work, self.spin_ns)
                if came:
                    self.in_vain = 0
                    return True
                self.in_vain = self.not_now = min(2 * self.in_vain + 1, MOST_IN_VAIN)
        return self.wait()

    def wait_control(self) -> bool:
        """Sleeps until the second thread's ring holds something; False after a signal."""
        cdef int got
        with nogil:
            got = ring_wait(&self.control, 0, -1)
        return got > 0

    def take(self):
        """The next of the main thread's ring as (kind, id, message, length), or None."""
        cdef Entry entry
        if ring_peek(&self.work, &entry) <= 0:
            return None
        ring_advance(&self.work)
        return entry.kind, entry.id, self.given(&entry) if entry.kind != LOOK else None, entry.length

    def take_control(self):
        """The next of the second thread's ring as (kind, id, message, length), or None. One thread at a time."""
        cdef Entry entry
        self.take_returns()
        if not self.heard.take(&entry):
            return None
        return entry.kind, entry.id, self.given(&entry) if entry.kind == CALL_RESPONSE else None, entry.length

    def take_returns(self) -> bool:
        """Empties the second thread's ring and takes memory back that the server has returned. True when something else
        waits to be handled, which take_control() gives. Any thread."""
        cdef Entry entry
        if self.left:
            return False
        while True:
            self.heard.make_room()
            if ring_peek(&self.control, &entry) <= 0:
                return self.heard.count > 0
            ring_advance(&self.control)
            if entry.kind != RETURN:
                self.heard.add(&entry)
            else:
                self.lent.pop(entry.offset, None)

    @property
    def has_control(self) -> bool:
        """Something waits in the second thread's ring, or was taken from it and is not handled."""
        cdef Entry entry
        if self.left:
            return False
        return self.heard.count > 0 or ring_peek(&self.control, &entry) > 0

    cdef GivenMessage given(self, Entry* entry):
        cdef GivenMessage message = GivenMessage.__new__(GivenMessage)
        message.offset = entry.offset
        if entry.offset & OWN:
            message.segment = Segment(self.links.segment(entry.offset & ~OWN), entry.length)
            message.base = message.segment.base
        else:
            message.segment = self.segment
            message.base = self.segment.base + entry.offset
        message.size = entry.size
        message.length = entry.length
        message.end = self
        return message

    def requests(self, uint64_t number, GivenMessage message not None) -> list:
        """What execute() is called with."""
        cdef Reader reader
        cdef uint32_t i, j, n, inputs, extra, flags, count
        cdef list made = [], names, wanted
        cdef str context
        reader.at = message.base
        reader.end = message.base + message.size
        reader.bad = False
        n = read_u32(&reader)
        for i in range(n):
            request = InferenceRequest.__new__(InferenceRequest)
            flags = read_u32(&reader)
            inputs = read_u32(&reader)
            request._timeout = read_u64(&reader)
            if flags & TEXT_ID:
                request._correlation_id = read_text(&reader)
            else:
                request._correlation_id = read_u64(&reader)
            request._request_id = read_text(&reader)
            context = read_text(&reader) if flags & CONTEXT else None
            request._parameters = _loads(read_text(&reader)) if flags & PARAMETERS else None
            wanted = None
            if flags & NAMES:
                count = read_u32(&reader)
                extra = read_u32(&reader)
                wanted = [read_text(&reader) for j in range(count)]
                names = wanted[:count - extra] if extra else wanted[:]
            else:
                names = self.output_names[:]
            request._requested_output_names = names
            id = number << REQUEST_BITS | i
            request._trace = InferenceTrace(id, context) if flags & TRACED else None
            request._flags = flags & (START | END)
            request._model_name = self.model_name
            request._model_version = self.model_version
            request._preferred_memory = None
            request._release_flags = 1
            request._channel = self.channel(id, wanted)
            request._inputs = self.tensors(&reader, message, inputs)
            made.append(request)
        return made

    cdef list tensors(self, Reader* reader, GivenMessage message, uint32_t count):
        cdef list made = []
        cdef InputBytes source
        cdef uint32_t i, j, dimensions, place
        cdef const char* data = message.base + (message.size + 63) // 64 * 64
        for i in range(count):
            source = InputBytes.__new__(InputBytes)
            tensor = Tensor.__new__(Tensor)
            tensor._name = read_text(reader)
            source.dtype = read_u32(reader)
            dimensions = read_u32(reader)
            if dimensions == 1:
                source.shape = (read_u64(reader),)
            elif dimensions == 2:
                source.shape = (read_u64(reader), read_u64(reader))
            else:
                source.shape = tuple([read_u64(reader) for j in range(dimensions)])
            place = read_u32(reader)
            source.data = (data if place == HERE else self.segment.base) + read_u64(reader)
            source.size = read_u64(reader)
            source.message = message
            source.readonly = self.read_only
            tensor._array = None
            tensor._dtype = source.dtype
            tensor._shape = source.shape
            tensor._source = source
            tensor._convert = _array
            tensor._keep = False
            tensor._device = _HOST
            made.append(tensor)
        return made

    def response(self, GivenMessage message not None):
        """(InferenceResponse or None, final) of a response of another model."""
        cdef Reader reader
        cdef uint32_t flags
        reader.at = message.base
        reader.end = message.base + message.size
        reader.bad = False
        flags = read_u32(&reader)
        if flags & NULL_RESPONSE:
            return None, bool(flags & FINAL)
        how = read_u32(&reader)
        text = read_text(&reader)
        made = InferenceResponse.__new__(InferenceResponse)
        made._parameters = _loads(text) if text else None
        made._error = None
        made._tensors = []
        if how == ERROR:
            text = read_text(&reader)
            made._error = TritonError(text, ErrorCode(read_u32(&reader)))
        else:
            made._tensors = self.tensors(&reader, message, read_u32(&reader))
        return made, bool(flags & FINAL)

    def sequence_end(self, GivenMessage message not None):
        """(correlation id, reason)."""
        cdef Reader reader
        reader.at = message.base
        reader.end = message.base + message.size
        reader.bad = False
        id = read_text(&reader) if read_u32(&reader) else read_u64(&reader)
        return id, read_text(&reader)

    # ------------------------------------------------------------ saying

    def leave(self):
        """This is a process that the model has forked (rule 6)."""
        self.left = True

    cdef int check(self) except -1:
        if self.left:
            raise TritonModelException(FORKED)
        return 0

    cdef int release(self, uint64_t offset) except -1:
        """Nothing looks at a message of the server any more. Never blocks, wakes nobody."""
        cdef Entry entry
        if self.left:
            return 0
        entry.kind, entry.size, entry.id, entry.offset, entry.length = RELEASE, 0, 0, offset, 0
        if ring_push(&self.answers, &entry) <= 0:
            self.unsaid.append(offset)
        return 0

    cdef int push(self, Entry* entry) except -1:
        """Pushes and, where the server sleeps, rings."""
        cdef timespec pause
        cdef uint64_t one = 1
        cdef Entry old
        self.check()
        while self.unsaid:
            old.kind, old.size, old.id, old.offset, old.length = RELEASE, 0, 0, self.unsaid[len(self.unsaid) - 1], 0
            if ring_push(&self.answers, &old) <= 0:
                break
            self.unsaid.pop()
        while True:
            done = ring_push(&self.answers, entry)
            if done > 0:
                break
            if done < 0:
                raise RuntimeError("the ring to the server is broken: something wrote over the shared memory")
            self.ring()
            pause.tv_sec, pause.tv_nsec = 0, 50000
            with nogil:
                nanosleep(&pause, NULL)
        self.ring()
        return 0

    cdef void ring(self) noexcept:
        cdef uint64_t one = 1
        if ring_must_wake(&self.answers) and write(self.bell, &one, 8) < 0:
            pass  # its counter is full: the server is told already

    def post(self, uint32_t kind, uint64_t id, uint64_t length=0):
        """Pushes a descriptor without a message."""
        cdef Entry entry
        entry.kind, entry.size, entry.id, entry.offset, entry.length = kind, 0, id, 0, length
        self.push(&entry)

    cdef Packer checkout(self):
        cdef Packer packer = self.packer
        self.packer = None
        if packer is None:
            packer = Packer()
        packer.reset()
        return packer

    cdef int send(self, uint32_t kind, uint64_t id, Packer packer, list refers) except -1:
        """Sends the packed message. `refers`: what it refers to in the shared memory, None for nothing."""
        cdef Entry entry
        cdef Block block
        cdef Segment segment
        cdef Py_ssize_t i
        cdef char* target
        cdef uint64_t total = packer.total(), head
        cdef bint keep = refers is not None
        self.check()
        for i in range(packer.count):
            if packer.pieces[i].size > KEEP_ABOVE:
                keep = True
                break
        if self.passing:
            head = ring_head(&self.answers)
            while self.passing and self.passing[0][0] < head:
                self.passing.popleft()
        block = block_of(self.slab, total)
        if block is None:
            self.links.catch_up()
            block = block_of(self.slab, total)
        entry.kind, entry.size, entry.id, entry.length = kind, <uint32_t>packer.used, id, total
        if block is not None:
            entry.offset = block.offset
            target = self.segment.base + block.offset
            owner = block
        else:
            self.number += 1
            segment = Segment(sealed_memory("neptrio-message", total), total)
            entry.offset = OWN | self.number
            target = segment.base
            owner = None
        if total > WITHOUT_GIL:
            with nogil:
                packer.copy(target)
        else:
            packer.copy(target)
        packer.reset()
        self.packer = packer
        if block is None:
            self.links.send_segment(segment.fd, self.number, total)
            if refers is not None:
                self.lent[entry.offset] = (None, refers)
        elif keep:
            self.lent[entry.offset] = (block, refers)
            entry.length |= KEEP
        self.push(&entry)
        if block is not None and not keep:
            self.passing.append((self.answers.own - 1, block))
        return 0

    def result(self, uint64_t number, int64_t began, int64_t made, int64_t executed, int64_t packed, list answers,
               failed, GivenMessage given):
        """Sends a batch's answers: (InferenceResponse, wanted names), OPEN_ANSWER or RESCHEDULED_ANSWER each.

        `failed(text)` words the error of a response that cannot be sent; `given` is the batch's message.
        """
        cdef Packer packer = self.checkout()
        cdef list refers = []
        packer.u64(began)
        packer.u64(made)
        packer.u64(executed)
        packer.u64(packed)
        packer.u32(0)
        self.pack_answers(packer, answers, refers, failed, given)
        self.send(RESULT, number, packer, refers or None)

    cdef int pack_answers(self, Packer packer, list answers, list refers, failed, GivenMessage given) except -1:
        packer.u32(<uint32_t>len(answers))
        for answer in answers:
            if answer is OPEN_ANSWER:
                packer.u32(OPEN)
            elif answer is RESCHEDULED_ANSWER:
                packer.u32(RESCHEDULED)
            elif type(answer) is str:
                pack_error(packer, answer, 1)
            else:
                self.pack_response(packer, answer[0], answer[1], True, refers, failed, given)
        return 0

    cdef int measure(self) except -1:
        """Counts the references to answers that nobody else has: what is above is shared. How many there are is a matter
        of the compiler's and the interpreter's version, so it is not written down."""
        cdef Packer packer = Packer()
        packer.reset()
        self.measuring = True
        self.pack_answers(packer, _specimen(), [], None, None)
        self.measuring = False
        return 0

    def failure(self, uint64_t number, int64_t began, int64_t made, int64_t executed, int64_t packed, str text):
        """Sends that a whole batch failed."""
        cdef Packer packer = self.checkout()
        packer.u64(began)
        packer.u64(made)
        packer.u64(executed)
        packer.u64(packed)
        packer.u32(1)
        packer.text(text)
        self.send(RESULT, number, packer, None)

    def respond(self, uint64_t id, response, names, bint final, uint64_t size):
        """Sends a response of a sender. Raises what a tensor that cannot be sent raises."""
        cdef Packer packer = self.checkout()
        cdef list refers = []
        cdef bint large
        packer.u32((FINAL if final else 0) | (NULL_RESPONSE if response is None else 0))
        packer.u64(size)
        if response is not None:
            self.pack_response(packer, response, names, False, refers, None, None)
        large = packer.total() > OFFER_ABOVE
        self.send(SEND, id, packer, refers or None)
        if large:  # the next one would come before the server and the client had a core for this one
            with nogil:
                sched_yield()

    def call(self, uint64_t key, request, bint decoupled, bint blocking, parent, uint64_t batch):
        """Sends a request to another model."""
        cdef Packer packer = self.checkout()
        cdef list refers = []
        cdef uint32_t flags = request._flags & (START | END)
        id = request._correlation_id
        if type(id) is str:
            flags |= TEXT_ID
        if decoupled:
            flags |= DECOUPLED
        if blocking:
            flags |= BLOCKING
        if parent is not None:
            flags |= PARENT
        packer.u32(flags)
        packer.text(request._model_name)
        packer.u64(0 if request._model_version < 0 else request._model_version + 1)
        packer.text(str(request._request_id))
        packer.u64(<uint64_t>int(request._timeout))
        if flags & TEXT_ID:
            packer.text(id)
        else:
            packer.u64(id)
        packer.u64(0 if parent is None else parent)
        packer.u64(batch)
        packer.text(_dumps(request._parameters) if request._parameters else "")
        packer.u32(<uint32_t>len(request._requested_output_names))
        for name in request._requested_output_names:
            packer.text(name)
        packer.u32(<uint32_t>len(request._inputs))
        for tensor in request._inputs:
            self.pack_tensor(packer, tensor, False, refers, None)
        self.send(CALL, key, packer, refers or None)

    cdef int pack_response(self, Packer packer, response, names, bint sole, list refers, failed,
                           GivenMessage given) except -1:
        """With `failed`, what cannot be packed becomes an error response; else it is raised."""
        cdef size_t used = packer.used
        cdef Py_ssize_t count = packer.count
        cdef uint64_t data = packer.data
        cdef uint32_t n = 0
        cdef size_t at
        cdef list tensors
        error = response._error
        parameters = response._parameters
        if error is not None:
            packer.u32(ERROR)
            packer.text(_dumps(parameters) if parameters else "")
            packer.text(error._message)
            packer.u32(error._code)
            return 0
        try:
            tensors = response._tensors
            if self.measuring:
                self.most.response, self.most.tensors = Py_REFCNT(response), Py_REFCNT(tensors)
            sole = sole and Py_REFCNT(response) <= self.most.response and Py_REFCNT(tensors) <= self.most.tensors
            packer.u32(RESPONSE)
            packer.text(_dumps(parameters) if parameters else "")
            at = packer.used
            packer.u32(0)
            for tensor in tensors:
                if self.measuring:
                    self.most.tensor = Py_REFCNT(tensor)
                if names is None or tensor._name in names:
                    self.pack_tensor(packer, tensor, sole and Py_REFCNT(tensor) <= self.most.tensor, refers, given)
                    n += 1
            packer.patch_u32(at, n)
        except Exception as problem:
            if failed is None:
                self.packer = packer
                raise
            packer.truncate(used, count, data)
            pack_error(packer, failed(f"cannot use an output tensor: {text_of(problem)}"), 1)
        return 0

    cdef int pack_tensor(self, Packer packer, tensor, bint sole, list refers, GivenMessage given) except -1:
        cdef int dtype = tensor._dtype
        cdef uint32_t place = HERE
        cdef uint64_t offset
        cdef uint64_t size
        cdef const char* data
        cdef size_t inside
        cdef tuple shape
        cdef Py_ssize_t refs = self.most.array  # the tensor's, the memoryview's and ours
        array = tensor._array
        if array is None:
            array = tensor.as_numpy()
            sole = True  # it was made for us
            if tensor._array is None:
                refs -= 1
        if type(array) is not _ndarray:
            array = np.asarray(array)
            sole = False
        shape = array.shape
        if dtype == STRINGS:
            view = join_strings(array)
            data = PyBytes_AS_STRING(view)
            size = PyBytes_GET_SIZE(view)
            packer.held.append(view)
        else:
            wanted = _DTYPES.get(dtype)
            if wanted is None:
                wanted = numpy_dtype(dtype)
            if array.dtype != wanted or not array.flags.c_contiguous:
                array = array.astype(wanted, order="C")
            if dtype == 14:
                view = PyMemoryView_FromObject(array.reshape(-1).view(np.uint8))
            else:
                view = PyMemoryView_FromObject(array)
            data = <const char*>PyMemoryView_GET_BUFFER(view).buf
            size = PyMemoryView_GET_BUFFER(view).len
            inside = data - self.segment.base
            if self.measuring:
                self.most.array = Py_REFCNT(array)
                _exclusive(array, self.most.array, given, &self.most, True)
            if size > KEEP_ABOVE and inside < self.segment.size and sole and _exclusive(
                    array, refs, given, &self.most, False):
                place = GIVEN if inside < self.outputs_first else LENT
                refers.append(array)
            else:
                packer.held.append(view)
        packer.text(tensor._name)
        packer.u32(dtype)
        packer.u32(<uint32_t>len(shape))
        for dimension in shape:
            packer.u64(dimension)
        packer.u32(place)
        packer.u64(packer.piece(data, size) if place == HERE else inside)
        packer.u64(size)
        return 0

    def empty(self, tuple shape, dtype):
        """An array in this process's half of the shared memory, None when there is no room for it."""
        cdef OutputBytes memory
        cdef uint64_t size = dtype.itemsize
        cdef Block block
        for n in shape:
            size *= n
        if size == 0 or self.left:
            return None
        block = block_of(self.slab, size)
        if block is None:
            self.links.catch_up()
            block = block_of(self.slab, size)
            if block is None:
                return None
        memory = OutputBytes.__new__(OutputBytes)
        memory.segment = self.segment
        memory.block = block
        return _frombuffer(memory, dtype).reshape(shape)

    def end(self):
        """Nobody will return what was lent: lets go of it, for who outlives its end of the rings.

        Without this, an input that was returned as an output holds its message, the message this end, and this end
        the input; an array has no part in the collector's search for such circles.
        """
        self.lent.clear()
        self.passing.clear()
        self.heard = Heard()

    def statistics(self) -> dict:
        """What is held."""
        return {"lent": len(self.lent), "passing": len(self.passing), "used": self.slab.used}


def _specimen() -> list:
    """Answers to which nobody but the list refers, as result() gets them."""
    array = np.zeros(2, np.uint8)[:1]
    return [(InferenceResponse([Tensor("", array)]), None)]


cdef bint _exclusive(object array, Py_ssize_t refs, GivenMessage given, Sole* most, bint measuring):
    """True when nobody shares the array's memory (backends.python.tensors rule 2), and the server can be told where
    it lies: in our own half, or in the batch that is answered."""
    if Py_REFCNT(array) > refs:
        return False
    base = array.base
    while base is not None:
        if type(base) is OutputBytes:
            return True
        if type(base) is InputBytes:
            return (<InputBytes>base).message is given
        if measuring:
            most.base = Py_REFCNT(base)
        if type(base) is not _ndarray or Py_REFCNT(base) > most.base:  # the array below's `base` and ours
            return False
        base = base.base
    return False


cdef int pack_error(Packer packer, str text, uint32_t code) except -1:
    packer.u32(ERROR)
    packer.text("")
    packer.text(text)
    packer.u32(code)
    return 0
