"""The model's end of the rings, in the process of an isolated model.

The main thread waits on one ring for batches, and for the answer to a call that it makes; a second
thread waits on another for everything that must be heard while the main thread executes. Whoever
has something to say pushes on the third.

Rules:
 1. Whose memory a message is, and until when: cext/rings/line, whose accounts this end shares with the server's.
 2. Packing runs Python code (a lazy array, a string's encoding), so other threads may run in between:
    a MessageWriter is checked out by one of them at a time.
 3. A push is never given up: it waits for room. A finalizer does not wait (cext/rings/line, rule 4).
 4. Any thread may have to make room in the second thread's ring. To take a descriptor and to put it at the end of `heard`
    is one step: no Python code runs in between, so no two threads change the order. From there, one thread at a time
    takes and handles them (hear() of ring_child.py).
 5. A process that the model forks has the same memory and is no end of the rings. Once told by leave() it touches neither: what
    would be pushed raises, what would be taken is not there, and nothing is returned.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from posix.time cimport nanosleep, timespec
from posix.unistd cimport write

from neptrio.request.sched cimport sched_yield
from neptrio.rings.answers cimport AnswerPacker, OutputBytes
from neptrio.rings.body_area cimport BodyArea
from neptrio.rings.given cimport GivenMessage, GivenReader
from neptrio.rings.kinds cimport *
from neptrio.rings.line cimport Line
from neptrio.rings.packet cimport MessageWriter
from neptrio.rings.ring cimport (
    Entry,
    RingEnd,
    Segment,
    ring_advance,
    ring_must_wake,
    ring_peek,
    ring_spin,
    ring_wait,
)
from neptrio.rings.slab cimport Block, block_of

import json

import numpy as np

from triton_python_backend_utils._errors import TritonModelException
from triton_python_backend_utils._host import FORKED
from triton_python_backend_utils._process.reserved import sealed_memory

cdef enum:
    MOST_IN_VAIN = 63       # see ModelSide.wait_answer()
    OFFER_ABOVE = 16384     # bytes of a response, behind which the core is offered to others
    WITHOUT_GIL = 65536      # bytes; below this, giving the GIL up costs more than the copy

cdef object _frombuffer = np.frombuffer
cdef object _dumps = json.dumps


cdef class ModelSide(GivenReader):
    """See the module's text. `links` sends segments over the socket and knows those that came."""

    cdef RingEnd work
    cdef RingEnd control
    cdef BodyArea area
    cdef AnswerPacker pack
    cdef MessageWriter writer
    # what was taken from the second thread's ring and is not handled yet: the oldest, and the newest. A list of their own, as
    # the methods of Python's containers allocate objects, for which the collector may run, and with it any code (rule 4)
    cdef GivenMessage heard
    cdef GivenMessage heard_last
    cdef int bell
    cdef uint64_t number
    cdef int64_t spin_ns            # how long to ask for a call's answer before falling asleep; 0: not at all
    cdef int in_vain                # for so many answers it was not asked for, after it had been in vain
    cdef readonly int not_now       # for so many it will not be
    cdef bint left                  # rule 5
    cdef public object stated       # (requests, executions) that the next result or part is to say with its answers, or None

    def __init__(self, int fd, int bell, dict layout, links, channel, str model_name, int64_t model_version,
                 list output_names, bint read_only, int64_t spin_ns):
        self.segment = Segment(fd, layout["size"])
        self.bell = bell
        self.work.base = self.segment.base + <size_t>layout["work"]
        self.work.entries = layout["work_entries"]
        self.control.base = self.segment.base + <size_t>layout["control"]
        self.control.entries = layout["control_entries"]
        self.area = BodyArea(self.segment, layout["outputs"], layout["area"])
        self.out = Line(self.area, {}, layout["done"], layout["done_entries"], None, None)
        self.pack = AnswerPacker(self.segment, layout["outputs"], output_names)
        self.links = links
        self.channel = channel
        self.model_name = model_name
        self.model_version = model_version
        self.output_names = output_names
        self.read_only = read_only
        self.spin_ns = spin_ns
        self.in_vain = self.not_now = 0

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
        cdef GivenMessage message
        if ring_peek(&self.work, &entry) <= 0:
            return None
        message = self.given(&entry)
        ring_advance(&self.work)
        self.reach(message)
        return message.kind, message.id, message if message.size else None, message.length

    def take_control(self):
        """The next of the second thread's ring as (kind, id, message, length), or None. One thread at a time."""
        cdef GivenMessage message
        self.take_returns()
        message = self.heard
        if message is None:
            return None
        self.heard = message.after
        if self.heard is None:
            self.heard_last = None
        message.after = None
        self.reach(message)
        return message.kind, message.id, message if message.size else None, message.length

    def take_returns(self) -> bool:
        """Empties the second thread's ring and takes memory back that the server has returned. True when something else
        waits to be handled, which take_control() gives. Any thread."""
        cdef Entry entry
        cdef GivenMessage message
        if self.left:
            return False
        while ring_peek(&self.control, &entry) > 0:
            if entry.kind != RETURN:
                message = self.given(&entry)
                ring_advance(&self.control)
                if self.heard is None:
                    self.heard = message
                else:
                    self.heard_last.after = message
                self.heard_last = message
            else:
                ring_advance(&self.control)
                self.out.lent.pop(entry.offset, None)
        return self.heard is not None

    @property
    def has_control(self) -> bool:
        """Something waits in the second thread's ring, or was taken from it and is not handled."""
        cdef Entry entry
        if self.left:
            return False
        return self.heard is not None or ring_peek(&self.control, &entry) > 0

    # ------------------------------------------------------------ saying

    def leave(self):
        """This is a process that the model has forked (rule 5)."""
        self.left = self.out.closed = True

    cdef int check(self) except -1:
        if self.left:
            raise TritonModelException(FORKED)
        return 0

    cdef int push(self, const Entry* entry) except -1:
        """Pushes and, where the server sleeps, rings."""
        cdef timespec pause
        cdef int done
        self.check()
        while True:
            done = self.out.push_returns()
            if done > 0:
                done = self.out.push(entry)
            if done < 0:
                raise RuntimeError("the ring to the server is broken: something wrote over the shared memory")
            self.ring()
            if done > 0:
                return 0
            pause.tv_sec, pause.tv_nsec = 0, 50000
            with nogil:
                nanosleep(&pause, NULL)

    cdef void ring(self) noexcept:
        cdef uint64_t one = 1
        if ring_must_wake(&self.out.ring) and write(self.bell, &one, 8) < 0:
            pass  # its counter is full: the server is told already

    def post(self, uint32_t kind, uint64_t id, uint64_t length=0):
        """Pushes a descriptor without a message."""
        cdef Entry entry
        entry.kind, entry.size, entry.id, entry.offset, entry.length = kind, 0, id, 0, length
        self.push(&entry)

    cdef MessageWriter checkout(self):
        cdef MessageWriter writer = self.writer
        self.writer = None
        if writer is None:
            writer = MessageWriter()
        writer.reset()
        return writer

    cdef MessageWriter timed(self, int64_t began, int64_t made, int64_t executed, int64_t packed):
        """Begins what ends a batch."""
        cdef MessageWriter writer = self.checkout()
        writer.u64(began)
        writer.u64(made)
        writer.u64(executed)
        writer.u64(packed)
        return writer

    cdef int send(self, uint32_t kind, uint64_t id, MessageWriter writer, list refers) except -1:
        """Sends the packed message. `refers`: what it refers to in the shared memory, None for nothing."""
        cdef Entry entry
        cdef Segment segment = self.segment
        cdef char* target
        cdef uint64_t total = writer.total()
        self.check()
        entry.kind, entry.size, entry.id, entry.length = kind, <uint32_t>writer.used, id, total
        held = self.out.reserve(&entry, refers)
        if held is None:
            self.links.catch_up()
            held = self.out.reserve(&entry, refers)
        if held is None:
            self.number += 1
            segment = Segment(sealed_memory("neptrio-message", entry.length), entry.length)
            entry.offset = OWN | self.number
            self.out.lent[entry.offset] = refers
        target = segment.base + (entry.offset if held is not None else 0)
        if total > WITHOUT_GIL:
            with nogil:
                writer.copy(target)
        else:
            writer.copy(target)
        writer.reset()
        self.writer = writer
        if held is None:
            self.links.send_segment(segment.fd, entry.offset & ~OWN, entry.length)
        return self.push(&entry)

    def result(self, uint64_t number, int64_t began, int64_t made, int64_t executed, int64_t packed, list answers,
               failed, GivenMessage given):
        """Sends a batch's answers: (InferenceResponse, wanted names), OPEN_ANSWER or RESCHEDULED_ANSWER each.

        `failed(text)` words the error of a response that cannot be sent; `given` is the batch's message.
        """
        self.answers(0, number, self.timed(began, made, executed, packed), answers, failed, given)

    cdef int answers(self, uint32_t whole, uint64_t number, MessageWriter writer, list answers, failed,
                     GivenMessage given) except -1:
        cdef list refers = []
        stated, self.stated = self.stated, None
        writer.u32(whole if stated is None else whole | STATED_TOO)
        self.pack.answers(writer, answers, refers, failed, given)
        if stated is not None:
            pack_stated(writer, stated[0], stated[1])
        self.send(RESULT, number, writer, refers or None)
        return 0

    def part(self, uint64_t number, int64_t began, int64_t made, int64_t executed, int64_t packed, list answers, failed,
             GivenMessage given):
        """As result(), for the first requests of a batch that have no answer yet; result() follows with those of the last."""
        self.answers(2, number, self.timed(began, made, executed, packed), answers, failed, given)

    def failure(self, uint64_t number, int64_t began, int64_t made, int64_t executed, int64_t packed, str text):
        """Sends that a whole batch failed."""
        cdef MessageWriter writer = self.timed(began, made, executed, packed)
        self.stated = None
        writer.u32(1)
        writer.text(text)
        self.send(RESULT, number, writer, None)

    def respond(self, uint64_t id, response, names, bint final, uint64_t size, uint64_t handed_over=0):
        """Sends a response of a sender, which the model handed over at that time (0: it does not matter). Raises what a tensor
        that cannot be sent raises."""
        cdef MessageWriter writer = self.checkout()
        cdef list refers = []
        cdef bint large
        writer.u32((FINAL if final else 0) | (NULL_RESPONSE if response is None else 0))
        writer.u64(size)
        writer.u64(handed_over)
        if response is not None:
            self.pack.response(writer, response, names, False, refers, None, None)
        large = writer.total() > OFFER_ABOVE
        self.send(SEND, id, writer, refers or None)
        if large:  # the next one would come before the server and the client had a core for this one
            with nogil:
                sched_yield()

    def report(self, uint64_t place, uint32_t outcome, uint64_t computing_ns, uint64_t output_ns):
        """Sends the durations of a response, for the model's statistics."""
        cdef MessageWriter writer = self.checkout()
        writer.u32(outcome)
        writer.u64(computing_ns)
        writer.u64(output_ns)
        self.send(REPORT, place, writer, None)

    def activity(self, uint64_t id, int64_t ns, str name):
        """Sends a point in time of a request's trace."""
        cdef MessageWriter writer = self.checkout()
        writer.u64(ns)
        writer.text(name)
        self.send(ACTIVITY, id, writer, None)

    def state(self, list requests, list executions):
        """Sends statistics as the model reports them: see Host.stated() and Host.execution_measured()."""
        cdef MessageWriter writer = self.checkout()
        pack_stated(writer, requests, executions)
        self.send(STATED, 0, writer, None)

    def call(self, uint64_t key, request, bint decoupled, bint blocking, parent, uint64_t batch):
        """Sends a request to another model."""
        cdef MessageWriter writer = self.checkout()
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
        priority = request._priority
        if priority:
            flags |= PRIORITY
        if request._timed:
            flags |= TIMED
        version = request._model_version
        if type(version) is str:
            flags |= LABELLED
        writer.u32(flags)
        writer.text(request._model_name)
        if flags & LABELLED:
            writer.text(version)
        else:
            writer.u64(0 if version < 0 else version + 1)
        writer.text(str(request._request_id))
        writer.u64(<uint64_t>int(request._timeout))
        if flags & TEXT_ID:
            writer.text(id)
        else:
            writer.u64(id)
        writer.u64(0 if parent is None else parent)
        writer.u64(batch)
        if priority:
            writer.u64(priority)
        writer.text(_dumps(request._parameters) if request._parameters else "")
        writer.u32(<uint32_t>len(request._requested_output_names))
        for name in request._requested_output_names:
            writer.text(name)
        writer.u32(<uint32_t>len(request._inputs))
        for tensor in request._inputs:
            self.pack.tensor(writer, tensor, False, refers, None)
        self.send(CALL, key, writer, refers or None)

    def empty(self, tuple shape, dtype):
        """An array in this process's half of the shared memory, None when there is no room for it."""
        cdef OutputBytes memory
        cdef uint64_t size = dtype.itemsize
        cdef Block block
        for n in shape:
            size *= n
        if size == 0 or self.left:
            return None
        block = block_of(self.area.slab, size)
        if block is None:
            self.links.catch_up()
            block = block_of(self.area.slab, size)
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
        self.out.close()
        while self.heard is not None:
            self.heard = self.heard.after
        self.heard_last = None

    def statistics(self) -> dict:
        """What is held."""
        return {"lent": len(self.out.lent), "passing": self.out.small_count, "used": self.area.used}


cdef int pack_stated(MessageWriter writer, list requests, list executions) except -1:
    writer.u32(<uint32_t>len(requests))
    for row in requests:
        writer.u64(row[0])
        writer.u32(row[1])
        for number in row[2:]:
            writer.u64(number)
    writer.u32(<uint32_t>len(executions))
    for row in executions:
        for number in row:
            writer.u64(number)
    return 0
