"""What the server says to one session of a model's process: descriptors on its rings, messages in its memory.

Rules:
 1. Everything here runs on the trio thread. The one exception is a MessageCopy's copy, which an instance
    thread does without the GIL.
 2. A message whose bytes are still being copied keeps its place in its ring's line.
 3. Blocks of the process's inputs live as long as the process looks at them and as long as a response
    of ours does (a model that returns its input).
 4. A message never waits for memory: what this side's area has no room for gets a segment of its own.
 5. A tensor that was received into the bodies' area (cext/rings/body_area) is not copied: the message says where
    it lies. The process has been able to change it since it came; that is its own request.
"""
from libc.stdint cimport uint32_t, uint64_t

from neptrio.backends.python.ring_reader cimport AnswerReader
from neptrio.execution.batch cimport Batch
from neptrio.loop.mailbox cimport WorkItem
from neptrio.observe.trace cimport Trace
from neptrio.request.infer_request cimport (
    DT_BYTES,
    QUEUE_START,
    REQUEST_END,
    REQUEST_START,
    InferRequest,
    InferResponse,
    ModelCore,
    RequestedOutput,
    Tensor,
    element_size,
    now_ns,
)
from neptrio.rings.body_area cimport BodyArea, BodyMemory
from neptrio.rings.kinds cimport *
from neptrio.rings.line cimport Line, Queued
from neptrio.rings.message cimport pack_head
from neptrio.rings.packet cimport MessageWriter
from neptrio.rings.ring cimport Entry, Segment, ring_bytes, ring_wake

import json

from triton_python_backend_utils._process.reserved import sealed_memory

cdef enum:
    WORK_ENTRIES = 256
    CONTROL_ENTRIES = 1024
    DONE_ENTRIES = 1024
    COPY_ON_LOOP = 1114112   # bytes: a MiB of tensors and what surrounds it; more is copied by the instance's thread

cdef object _dumps = json.dumps


class Layout:
    """Where things lie in the shared memory: three rings, the server's area, that of received bodies, the process's."""

    def __init__(self, size_t area, size_t bodies=0):
        self.area = area
        self.work = 0
        self.work_entries = WORK_ENTRIES
        self.control = self.work + ring_bytes(WORK_ENTRIES)  # type: int
        self.control_entries = CONTROL_ENTRIES
        self.done = self.control + ring_bytes(CONTROL_ENTRIES)  # type: int
        self.done_entries = DONE_ENTRIES
        self.inputs = (self.done + ring_bytes(DONE_ENTRIES) + 4095) // 4096 * 4096  # type: int
        self.bodies = self.inputs + area  # type: int
        self.outputs = self.bodies + bodies  # type: int
        self.size = self.outputs + area  # type: int


cdef class BatchUnderWay:
    """See ring_sender.pxd."""


cdef class MessageCopy(WorkItem):
    """See ring_sender.pxd."""

    cpdef object execute(self):
        cdef MessageWriter writer = self.writer
        cdef char* target = self.target
        with nogil:
            writer.copy_offering(target)

    cpdef object deliver(self):
        self.writer = self.queued.writer = None
        self.segment = None
        if self.end.look():
            self.end.host.lag()


cdef class RingSender(AnswerReader):
    """The server's half of what is said; ServerSide (ring_server) is the whole end."""

    def __init__(self, Segment segment not None, layout, host):
        AnswerReader.__init__(
            self, segment, layout.done, layout.done_entries, layout.inputs, layout.outputs, layout.area)
        self.work = self.line(layout.work, layout.work_entries, host.lag, host.lag)
        self.control = self.out = self.line(layout.control, layout.control_entries, host.lag, host.lag)
        self.received_into = BodyArea(segment, layout.bodies, layout.outputs - layout.bodies)
        self.host = host
        self.writer = MessageWriter()
        self.batches = {}

    def violated(self, why):
        # type: (str) -> None
        """The process has written what no correct one writes."""
        self.host.violated(why)

    cdef int wake(self, Line line) except -1:
        ring_wake(&line.ring)
        return 0

    cdef int pushed(self, Line line, const Entry* entry) except -1:
        """Notes where a batch's descriptor lies, and when it had been copied."""
        cdef BatchUnderWay under_way
        if entry.kind == BATCH:
            under_way = self.batches.get(entry.id)
            if under_way is not None:
                under_way.place = line.ring.own
                # for requests that are answered before the process has said when it had its inputs
                under_way.batch.input_end = now_ns()
        return 0

    cdef bint placed(self, Line line, Queued queued) except -1:
        return False  # a thread copies it still

    def body_memory(self, uint64_t size):
        """Writable memory into which a body to this process can be received; None when there is no room for it."""
        return None if self.closed or self.given_up else self.received_into.take(size)

    @property
    def body_bytes(self) -> int:
        """Bytes of what body_memory() has given and somebody uses."""
        return self.received_into.used

    def holds_body(self, Tensor tensor not None) -> bool:
        """The tensor lies in what body_memory() has given."""
        return self.received_into.holds(tensor.ptr, <uint64_t>tensor.nbytes)

    def received_here(self, Batch batch not None) -> bool:
        """A tensor of the batch lies in memory that the process could write to."""
        cdef InferRequest request
        cdef Tensor tensor
        for request in batch.requests:
            for tensor in request.inputs:
                if self.received_into.holds(tensor.ptr, <uint64_t>tensor.nbytes):
                    return True
        return False

    cdef int send(self, Line line, uint32_t kind, uint64_t id, MessageWriter writer, BatchUnderWay under_way, mailbox) except -1:
        """Sends the packed message; what is large is copied by the thread behind `mailbox`."""
        cdef Entry entry
        cdef MessageCopy copy
        cdef Segment segment = self.segment
        cdef char* target
        cdef uint64_t total = writer.total()
        cdef list bodies = None if under_way is None else under_way.bodies
        entry.kind, entry.size, entry.id, entry.length = kind, <uint32_t>writer.used, id, total
        held = line.reserve(&entry, bodies)
        if held is not None:
            target = segment.base + entry.offset
            if under_way is not None and held is not True:
                under_way.block = (<BodyMemory>held).block
        else:
            self.number += 1
            segment = Segment(sealed_memory("neptrio-message", entry.length), entry.length)
            entry.offset = OWN | self.number
            target = segment.base
            self.lent[entry.offset] = segment, bodies
            self.host.send_segment(segment, self.number)
        if total > COPY_ON_LOOP and mailbox is not None:
            line.wait(&entry, writer, None)
            copy = MessageCopy()
            copy.end = self
            copy.queued = line.waiting[len(line.waiting) - 1]
            copy.writer = writer
            copy.segment = segment
            copy.target = target
            self.writer = MessageWriter()
            try:
                mailbox.submit(copy)
            except BaseException:
                line.waiting.remove(copy.queued)  # nobody would ever copy it, and what comes behind it waits
                self.lent.pop(entry.offset, None)
                raise
            return 0
        writer.copy(target)
        writer.reset()  # not only before the next message, which may come late: it holds the tensors
        return self.push(line, &entry)

    cdef int pack_request(self, MessageWriter writer, InferRequest request, BatchUnderWay under_way) except -1:
        cdef Tensor tensor
        cdef RequestedOutput output
        cdef Trace trace
        cdef uint32_t flags = 0
        cdef object context = None, state
        if request.sequence_start:
            flags |= START
        if request.sequence_end:
            flags |= END
        if type(request.sequence_id) is str:
            flags |= TEXT_ID
        if request.parameters:
            flags |= PARAMETERS
        if request.outputs is not None:
            flags |= NAMES
        if request.trace is not None:
            flags |= TRACED
            context = request.trace.context()
            if context is not None:
                flags |= CONTEXT
        writer.u32(flags)
        writer.u32(<uint32_t>len(request.inputs))
        writer.u64(request.timeout_us)
        if flags & TEXT_ID:
            writer.text(request.sequence_id)
        else:
            writer.u64(request.sequence_id)
        writer.text(request.id)
        if flags & TRACED:
            trace = request.trace
            writer.u64(<uint64_t>trace.record.id)
            writer.u64(<uint64_t>trace.record.parent)
        if context is not None:
            writer.text(context)
        if flags & PARAMETERS:
            writer.text(_dumps(request.parameters))
        if flags & NAMES:
            state = request.model.state_outputs
            writer.u32(<uint32_t>(len(request.outputs) + len(state)))
            writer.u32(<uint32_t>len(state))
            for output in request.outputs:
                writer.text(output.name)
            for name in state:
                writer.text(name)
        for tensor in request.inputs:
            if self.received_into.holds(tensor.ptr, <uint64_t>tensor.nbytes) and self.fit(tensor):
                pack_tensor(writer, tensor, tensor.ptr - self.segment.base)
                self.in_place += tensor.nbytes
                if under_way.bodies is None:
                    under_way.bodies = []
                under_way.bodies.append(tensor)
            else:
                pack_tensor(writer, tensor, 0)
                self.copied += tensor.nbytes
        return 0

    cdef bint fit(self, Tensor tensor) noexcept:
        """Whether a tensor of the bodies' area can be used where it lies: numbers, aligned as numpy wants them."""
        return (tensor.dtype != DT_BYTES and tensor.nbytes > 0 and tensor.memory_kind == 0
                and (tensor.ptr - self.segment.base) % element_size(tensor.dtype) == 0)

    def sequence_ended(self, sequence_id, str reason):
        """Sends the end of a sequence, in line with the batches."""
        cdef MessageWriter writer = self.writer
        writer.reset()
        writer.u32(1 if isinstance(sequence_id, str) else 0)
        if isinstance(sequence_id, str):
            writer.text(sequence_id)
        else:
            writer.u64(sequence_id)
        writer.text(reason)
        self.send(self.work, SEQUENCE_END, 0, writer, None, None)

    def look_at_socket(self):
        """Has the main thread look at what came over the socket."""
        self.post(self.work, LOOK, 0, 0)

    def respond(self, uint64_t key, InferResponse response, bint final, bint waits, dict numbers, InferRequest timed=None):
        # type: (..., InferResponse | None, ..., ..., ..., InferRequest | None) -> None
        """Sends a response of another model. `waits`: the process's main thread does nothing else. `timed`: the request, where the
        process wants to know when it was where."""
        cdef MessageWriter writer = self.writer
        cdef Tensor tensor
        if self.closed or self.given_up:
            return
        writer.reset()
        writer.u32((FINAL if final else 0) | (NULL_RESPONSE if response is None else 0) | (TIMES_TOO if timed is not None else 0))
        if timed is not None:
            pack_times(writer, timed)
        if response is not None:
            writer.u32(ERROR if response.error is not None else RESPONSE)
            writer.text(_dumps(response.parameters) if response.parameters else "")
            if response.error is not None:
                writer.text(str(response.error))
                writer.u32(numbers.get(response.error.code, 0))
            else:
                writer.u32(<uint32_t>len(response.outputs or ()))
                for tensor in response.outputs or ():
                    pack_tensor(writer, tensor, 0)
                    self.copied += tensor.nbytes
        self.send(self.work if waits else self.control, ANSWER if waits else CALL_RESPONSE, key, writer, None, None)

    def return_memory(self, uint64_t offset):
        """Returns a message's memory, for tests."""
        self.control.give_back(offset)


cdef int pack_times(MessageWriter writer, InferRequest request) except -1:
    """When it was where; a request that was refused has a beginning and an end all the same."""
    cdef int64_t* times = request.timestamps
    cdef int64_t end = times[<int>REQUEST_END] or now_ns()
    cdef ModelCore model = request.model
    cdef int stage
    writer.u64(<uint64_t>(times[<int>REQUEST_START] or end))
    for stage in range(<int>QUEUE_START, <int>REQUEST_END):
        writer.u64(0 if request.composing and stage > <int>QUEUE_START else <uint64_t>times[stage])
    writer.u64(<uint64_t>end)
    writer.u64(<uint64_t>int(model.version) + 1 if model is not None and model.version else 0)
    return 0


cdef int pack_tensor(MessageWriter writer, Tensor tensor, uint64_t placed) except -1:
    """`placed`: where in the shared memory its bytes lie already, 0 where they are to be copied behind the message."""
    pack_head(writer, tensor)
    writer.u32(GIVEN if placed else HERE)
    writer.u64(placed if placed else writer.piece(tensor.ptr, <uint64_t>tensor.nbytes))
    writer.u64(<uint64_t>tensor.nbytes)
    if not placed:
        writer.held.append(tensor)
    return 0
