"""The server's end of the rings to one life of a model's process.

The trio thread packs a batch into the shared memory and pushes its descriptor; when the bell rings
it takes what the process pushed, checks it, and answers. No thread stands between: a small batch
costs two copies of a few hundred bytes and, where the other side sleeps, one system call each way.

Rules:
 1. Everything here runs on the trio thread. The one exception is a Parcel's copy, which an instance
    thread does without the GIL, and the last reference to a Lease, which may go anywhere.
 2. What the process wrote is believed in nothing: a message is copied before it is read; lengths, offsets,
    counts, datatypes and shapes are compared with what they may be. A message that cannot be is a
    Violation: the process is killed, and its requests fail as for any other end.
 3. A tensor of more than KEEP_ABOVE bytes is looked at where it lies, so its elements may change under
    the reader's eyes. Elements of numbers may; strings, which have a structure, are always copied.
 4. A batch is in `batches` until its result, a request that a sender answers in `open` until its final
    response. Whoever takes it out answers it; end() takes everything out.
 5. Blocks of the process's inputs live as long as the process looks at them and as long as a response
    of ours does (a model that returns its input).
 6. A tensor that was received into the bodies' area (cext/rings/body_area) is not copied: the message says where
    it lies. The process has been able to change it since it came; that is its own request.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

from neptrio.execution.batch cimport Batch, complete
from neptrio.loop.mailbox cimport WorkItem
from neptrio.rings.body_area cimport BodyArea
from neptrio.rings.packet cimport Packer, Reader, read_raw, read_text, read_u32, read_u64
from neptrio.request.infer_request cimport (
    DONE,
    DT_BYTES,
    InferRequest,
    InferResponse,
    RequestedOutput,
    Tensor,
    element_size,
    now_ns,
)
from neptrio.rings.ring cimport (
    LINE,
    Entry,
    RingEnd,
    Segment,
    ring_advance,
    ring_bytes,
    ring_head,
    ring_must_wake,
    ring_peek,
    ring_push,
    ring_sleep,
    ring_wake,
)
from neptrio.rings.kinds cimport *
from neptrio.rings.slab cimport Block, Slab, block_of

import json
from collections import deque

from neptrio.backends.python.convert import known
from neptrio.rings.ring import sealed_memory
from neptrio.errors import Code, Internal, Reason, TritonError

cdef enum:
    WORK_ENTRIES = 256
    CONTROL_ENTRIES = 1024
    DONE_ENTRIES = 1024
    DRAIN_AT_ONCE = 512      # descriptors, before other events have their turn
    MOST_DIMENSIONS = 64
    MOST_OWN_PART = 268435456    # bytes of a message beside its tensors: texts and shapes
    MOST_SEGMENTS = 1088     # that have come for messages still to come: as many as descriptors, and a few threads more
    COPY_ON_LOOP = 1114112   # bytes: a MiB of tensors and what surrounds it; more is copied by the instance's thread

cdef object _loads = json.loads
cdef object _dumps = json.dumps


class Violation(Exception):
    """The model's process has written what no correct one writes."""


class Layout:
    """Where things lie in the shared memory: three rings, the server's area, that of received bodies, the process's."""

    def __init__(self, size_t area, size_t bodies=0):
        self.area = area
        self.work = 0
        self.work_entries = WORK_ENTRIES
        self.control = self.work + ring_bytes(WORK_ENTRIES)
        self.control_entries = CONTROL_ENTRIES
        self.done = self.control + ring_bytes(CONTROL_ENTRIES)
        self.done_entries = DONE_ENTRIES
        self.inputs = (self.done + ring_bytes(DONE_ENTRIES) + 4095) // 4096 * 4096
        self.bodies = self.inputs + area
        self.outputs = self.bodies + bodies
        self.size = self.outputs + area


@cython.no_gc
cdef class Lease:
    """The right to look at a message of the process where it lies."""

    cdef Segment segment     # alive as long as somebody looks
    cdef ServerEnd end
    cdef uint64_t offset

    def __dealloc__(self):
        if self.end is not None:
            self.end.give_back(self.offset)


cdef class Under:
    """A batch that the process has."""

    cdef Batch batch
    cdef Block block         # None: in a segment of its own
    cdef list bodies         # tensors that lie in the bodies' area, None when there are none
    cdef int64_t begun
    cdef uint64_t place      # of its descriptor in the ring, from 1; 0 while it waits in line


cdef class Parcel(WorkItem):
    """A descriptor that waits for room in its ring, for those before it, or for its bytes."""

    cdef ServerEnd end
    cdef Entry entry
    cdef bint ready
    cdef bint work_ring
    cdef Packer packer
    cdef char* target

    cpdef object execute(self):
        cdef Packer packer = self.packer
        cdef char* target = self.target
        with nogil:
            packer.copy(target)

    cpdef object deliver(self):
        self.ready = True
        self.packer = None
        self.end.flush()


@cython.final
cdef class OnCancel:
    """Tells the process that a request was cancelled."""

    cdef ServerEnd end
    cdef uint64_t id

    def __call__(self):
        cdef InferRequest request = self.end.find(self.id)
        self.end.post(False, CANCEL, self.id, 0, request is not None and request.still_read)


cdef class ServerEnd:
    """See the module's text.

    `host` hears what is not the ring's own business: called(), took(), call_cancelled(), reschedule(),
    send_segment() and violated(); and lag(), from any thread: flush() is to be called again before long.
    """

    cdef Segment segment
    cdef RingEnd work
    cdef RingEnd control
    cdef RingEnd answers
    cdef Slab slab
    cdef Packer packer
    cdef BodyArea bodies
    cdef object host
    cdef readonly dict batches       # number -> Under, in the order in which they began
    cdef readonly dict open          # request id -> InferRequest
    cdef dict blocks                 # offset -> what the process looks at: Block or Segment, with tensors of bodies
    cdef object outbox               # deque of Parcels, in order
    cdef dict segments               # numbers of segments of the process that have come
    cdef uint64_t number
    cdef uint64_t inputs_end
    cdef uint64_t outputs
    cdef uint64_t outputs_end
    cdef char* scratch
    cdef size_t scratch_room
    cdef readonly bint closed
    cdef bint decoupled
    cdef readonly uint64_t wakes     # how often the process had to be woken
    cdef readonly uint64_t received
    cdef readonly uint64_t copied    # bytes of tensors that were copied on their way here or there, once each time
    cdef readonly uint64_t in_place  # bytes of tensors that crossed without a copy

    def __init__(self, Segment segment not None, layout, host, bint decoupled):
        self.segment = segment
        self.work.base = segment.base + <size_t>layout.work
        self.work.entries = layout.work_entries
        self.control.base = segment.base + <size_t>layout.control
        self.control.entries = layout.control_entries
        self.answers.base = segment.base + <size_t>layout.done
        self.answers.entries = layout.done_entries
        self.slab = Slab(layout.inputs, layout.area)
        self.bodies = BodyArea(segment, layout.bodies, layout.outputs - layout.bodies)
        self.inputs_end = layout.inputs + layout.area
        self.outputs = layout.outputs
        self.outputs_end = layout.outputs + layout.area
        self.packer = Packer()
        self.host = host
        self.decoupled = decoupled
        self.batches = {}
        self.open = {}
        self.blocks = {}
        self.segments = {}
        self.outbox = deque()
        self.scratch_room = 4096
        self.scratch = <char*>malloc(self.scratch_room)
        if self.scratch == NULL:
            raise MemoryError
        ring_sleep(&self.answers)  # the first push rings the bell

    def __dealloc__(self):
        free(self.scratch)

    # ------------------------------------------------------------ to the process

    cdef int push(self, bint work_ring, const Entry* entry) except -1:
        """Pushes in order, or puts it in line. Wakes the process where it sleeps."""
        cdef Parcel parcel
        cdef int done = 0
        cdef RingEnd* ring = &self.work if work_ring else &self.control
        if self.closed:
            return 0
        if not self.outbox:
            done = ring_push(ring, entry)
            if done < 0:
                self.broken("its index of a ring cannot be")
                return 0
            if done:
                self.pushed(entry)
        if not done:
            if not self.outbox:
                self.host.lag()  # the ring is full, and a process that sleeps afterwards says nothing
            parcel = Parcel()
            parcel.end = self
            parcel.entry = entry[0]
            parcel.work_ring = work_ring
            parcel.ready = True
            self.outbox.append(parcel)
            return 0
        if entry.kind != RETURN and ring_must_wake(ring):
            self.wakes += 1
            ring_wake(ring)
        return 0

    cdef int pushed(self, const Entry* entry) except -1:
        """Notes where a batch's descriptor lies."""
        cdef Under under
        if entry.kind == BATCH:
            under = self.batches.get(entry.id)
            if under is not None:
                under.place = self.work.own
        return 0

    cdef int post(self, bint work_ring, uint32_t kind, uint64_t id, uint64_t offset, uint64_t length) except -1:
        cdef Entry entry
        entry.kind, entry.size, entry.id, entry.offset, entry.length = kind, 0, id, offset, length
        return self.push(work_ring, &entry)

    def flush(self):
        """Pushes what waits in line, as far as there is room."""
        cdef Parcel parcel
        cdef RingEnd* ring
        while self.outbox and not self.closed:
            parcel = self.outbox[0]
            if not parcel.ready:
                return
            ring = &self.work if parcel.work_ring else &self.control
            done = ring_push(ring, &parcel.entry)
            if done < 0:
                self.broken("its index of a ring cannot be")
                return
            if not done:
                self.host.lag()
                return
            self.outbox.popleft()
            self.pushed(&parcel.entry)
            if ring_must_wake(ring):
                self.wakes += 1
                ring_wake(ring)

    @property
    def lagging(self) -> bool:
        """Something waits in line for room in its ring, or for its bytes."""
        return len(self.outbox) > 0

    def body_memory(self, uint64_t size):
        """Writable memory into which a body to this process can be received; None when there is no room for it."""
        return None if self.closed else self.bodies.take(size)

    def received_here(self, Batch batch not None) -> bool:
        """A tensor of the batch lies in memory that the process could write to."""
        cdef InferRequest request
        cdef Tensor tensor
        for request in batch.requests:
            for tensor in request.inputs:
                if self.bodies.holds(tensor.ptr, <uint64_t>tensor.nbytes):
                    return True
        return False

    cdef int send(self, bint work_ring, uint32_t kind, uint64_t id, Packer packer, Under under, mailbox) except -1:
        """Sends the packed message; what is large is copied by the thread behind `mailbox`."""
        cdef Entry entry
        cdef Parcel parcel
        cdef Segment segment
        cdef Block block
        cdef char* target
        cdef uint64_t total = packer.total()
        entry.kind, entry.size, entry.id, entry.length = kind, <uint32_t>packer.used, id, total
        block = block_of(self.slab, total)
        if block is not None:
            entry.offset = block.offset
            target = self.segment.base + block.offset
            self.blocks[entry.offset] = block
            if under is not None:
                under.block = block
        else:
            self.number += 1
            segment = Segment(sealed_memory("neptrio-message", total), total)
            entry.offset = OWN | self.number
            target = segment.base
            self.blocks[entry.offset] = segment
            self.host.send_segment(segment, self.number)
        if under is not None and under.bodies is not None:
            self.blocks[entry.offset] = (self.blocks[entry.offset], under.bodies)
        if total > COPY_ON_LOOP and mailbox is not None:
            parcel = Parcel()
            parcel.end = self
            parcel.entry = entry
            parcel.work_ring = work_ring
            parcel.packer = packer
            parcel.target = target
            self.packer = Packer()
            self.outbox.append(parcel)
            mailbox.submit(parcel)
            return 0
        packer.copy(target)
        return self.push(work_ring, &entry)

    def begin(self, Batch batch not None):
        """Sends a batch."""
        cdef InferRequest request
        cdef OnCancel on_cancel
        cdef Packer packer = self.packer
        cdef Under under = Under()
        cdef Py_ssize_t i = 0, n = len(batch.requests)
        cdef uint64_t number
        cdef list cancelled = None
        self.number += 1
        number = self.number
        under.batch = batch
        under.begun = batch.compute_start = now_ns()  # a sender may answer before the batch is back
        packer.reset()
        packer.u32(<uint32_t>n)
        for request in batch.requests:
            self.pack_request(packer, request, under)
        self.batches[number] = under
        for request in batch.requests:
            on_cancel = OnCancel.__new__(OnCancel)
            on_cancel.end = self
            on_cancel.id = number << REQUEST_BITS | <uint64_t>i
            request.on_cancel = on_cancel
            if request.cancelled:
                if cancelled is None:
                    cancelled = []
                cancelled.append(on_cancel)
            i += 1
        self.send(True, BATCH, number, packer, under, batch.instance.mailbox)
        if cancelled is not None:
            for on_cancel in cancelled:
                on_cancel()

    cdef int pack_request(self, Packer packer, InferRequest request, Under under) except -1:
        cdef Tensor tensor
        cdef RequestedOutput output
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
        packer.u32(flags)
        packer.u32(<uint32_t>len(request.inputs))
        packer.u64(request.timeout_us)
        if flags & TEXT_ID:
            packer.text(request.sequence_id)
        else:
            packer.u64(request.sequence_id)
        packer.text(request.id)
        if context is not None:
            packer.text(context)
        if flags & PARAMETERS:
            packer.text(_dumps(request.parameters))
        if flags & NAMES:
            state = request.model.state_outputs
            packer.u32(<uint32_t>(len(request.outputs) + len(state)))
            packer.u32(<uint32_t>len(state))
            for output in request.outputs:
                packer.text(output.name)
            for name in state:
                packer.text(name)
        for tensor in request.inputs:
            if self.bodies.holds(tensor.ptr, <uint64_t>tensor.nbytes) and self.fit(tensor):
                pack_tensor(packer, tensor, tensor.ptr - self.segment.base)
                self.in_place += tensor.nbytes
                if under.bodies is None:
                    under.bodies = []
                under.bodies.append(tensor)
            else:
                pack_tensor(packer, tensor, 0)
                self.copied += tensor.nbytes
        return 0

    cdef bint fit(self, Tensor tensor) noexcept:
        """Whether a tensor of the bodies' area can be used where it lies: numbers, aligned as numpy wants them."""
        return (tensor.dtype != DT_BYTES and tensor.nbytes > 0 and tensor.memory_kind == 0
                and (tensor.ptr - self.segment.base) % element_size(tensor.dtype) == 0)

    def sequence_ended(self, sequence_id, str reason):
        """Sends the end of a sequence, in line with the batches."""
        cdef Packer packer = self.packer
        packer.reset()
        packer.u32(1 if isinstance(sequence_id, str) else 0)
        if isinstance(sequence_id, str):
            packer.text(sequence_id)
        else:
            packer.u64(sequence_id)
        packer.text(reason)
        self.send(True, SEQUENCE_END, 0, packer, None, None)

    def look(self):
        """Has the main thread look at what came over the socket."""
        self.post(True, LOOK, 0, 0, 0)

    def respond(self, uint64_t key, InferResponse response, bint final, bint waits, dict numbers):
        """Sends a response of another model. `waits`: the process's main thread does nothing else."""
        cdef Packer packer = self.packer
        cdef Tensor tensor
        if self.closed:
            return
        packer.reset()
        packer.u32((FINAL if final else 0) | (NULL_RESPONSE if response is None else 0))
        if response is not None:
            packer.u32(ERROR if response.error is not None else RESPONSE)
            packer.text(_dumps(response.parameters) if response.parameters else "")
            if response.error is not None:
                packer.text(str(response.error))
                packer.u32(numbers.get(response.error.code, 0))
            else:
                packer.u32(<uint32_t>len(response.outputs or ()))
                for tensor in response.outputs or ():
                    pack_tensor(packer, tensor, 0)
                    self.copied += tensor.nbytes
        self.send(waits, ANSWER if waits else CALL_RESPONSE, key, packer, None, None)

    cdef int give_back(self, uint64_t offset) except -1:
        return self.post(False, RETURN, 0, offset, 0)

    # ------------------------------------------------------------ from the process

    def drain(self):
        """Takes what the process has pushed. True when there is more, and it is to be called again."""
        cdef Entry entry
        cdef int got, count = 0
        if self.closed:
            return False
        while True:
            got = ring_peek(&self.answers, &entry)
            if got < 0:
                self.broken("its index of a ring cannot be")
                return False
            if got == 0:
                if ring_sleep(&self.answers):
                    break
                continue
            if count == DRAIN_AT_ONCE:
                return True
            count += 1
            self.received += 1
            try:
                if not self.take(&entry):
                    return False  # until its segment has come
            except (Violation, UnicodeDecodeError, RecursionError, ValueError, OverflowError) as error:
                self.broken(str(error))
                return False
            if self.closed:
                return False
            ring_advance(&self.answers)
        if self.outbox:
            self.flush()
        return False

    cdef int broken(self, str text) except -1:
        if not self.closed:
            self.closed = True
            self.host.violated(text)
        return 0

    cdef bint take(self, Entry* entry) except -1:
        """One descriptor. False when what it speaks of is still on its way."""
        cdef uint32_t kind = entry.kind
        cdef InferRequest request
        if kind == RELEASE:
            self.blocks.pop(entry.offset, None)
            return True
        if kind == TOOK:
            self.host.took(entry.id)
            return True
        if kind == CALL_CANCEL:
            self.host.call_cancelled(entry.id, entry.length != 0)
            return True
        if kind == DROPPED:
            request = self.find(entry.id)
            self.open.pop(entry.id, None)
            if request is not None and request.state != DONE:
                complete(request, InferResponse(None, self.host.dropped(request)), True)
            return True
        if kind != RESULT and kind != SEND and kind != CALL:
            raise Violation(f"a descriptor of kind {kind}")
        return self.take_message(entry)

    cdef bint take_message(self, Entry* entry) except -1:
        cdef Message message = Message.__new__(Message)
        cdef uint64_t length = entry.length & ~KEEP
        cdef Lease lease
        cdef Segment segment
        cdef const char* base
        message.end = self
        if entry.offset & OWN:
            number = entry.offset & ~OWN
            segment = self.segments.get(number)
            if segment is None:
                if number not in self.segments:
                    return False
                raise Violation("a segment that is not sealed or too small")
            if length > segment.size:
                raise Violation(f"a message of {length} bytes in a segment of {segment.size}")
            del self.segments[number]
            base = segment.base
            message.limit = segment.size
            message.owner = segment
        else:
            if (entry.offset < self.outputs or entry.offset > self.outputs_end
                    or length > self.outputs_end - entry.offset):
                raise Violation(f"a message of {length} bytes at {entry.offset}")
            base = self.segment.base + entry.offset
            if entry.length & KEEP:
                lease = Lease.__new__(Lease)
                lease.segment = self.segment
                lease.end = self
                lease.offset = entry.offset
                message.owner = lease
        if entry.size > length:
            raise Violation(f"{entry.size} bytes of a message of {length}")
        if entry.size > MOST_OWN_PART:
            raise Violation(f"a message with {entry.size} bytes beside its tensors")
        if entry.size > self.scratch_room:
            grown = <char*>realloc(self.scratch, entry.size)
            if grown == NULL:
                raise Violation(f"a message of {entry.size} bytes, for which there is no memory")
            self.scratch = grown
            self.scratch_room = entry.size
        memcpy(self.scratch, base, entry.size)
        message.data = base + (entry.size + 63) // 64 * 64
        message.size = length - min(length, <uint64_t>((entry.size + 63) // 64 * 64))
        message.reader.at = self.scratch
        message.reader.end = self.scratch + entry.size
        message.reader.bad = False
        if entry.kind == RESULT:
            self.result(entry.id, message)
        elif entry.kind == SEND:
            self.sent(entry.id, message)
        else:
            self.called(entry.id, message)
        return True

    cdef InferRequest find(self, uint64_t id):
        """A request that the process may still answer, or None."""
        cdef Under under
        cdef uint64_t place = id & ((1 << REQUEST_BITS) - 1)
        request = self.open.get(id)
        if request is None:
            under = self.batches.get(id >> REQUEST_BITS)
            if under is not None and place < <uint64_t>len(under.batch.requests):
                request = under.batch.requests[place]
        return request

    cdef int result(self, uint64_t number, Message message) except -1:
        cdef Under under = self.batches.get(number)
        cdef Batch batch
        cdef InferRequest request
        cdef InferResponse response
        cdef list requests, responses, again
        cdef int64_t times[4]
        cdef int64_t floor, now = now_ns()
        cdef int i
        cdef uint32_t count, how
        cdef uint64_t place = 0
        if under is None:
            raise Violation(f"a result of batch {number}, which is not under way")
        batch = under.batch
        message.block = under.block
        message.bodies = under.bodies
        floor = under.begun
        for i in range(4):
            times[i] = <int64_t>read_u64(&message.reader)
            times[i] = min(max(times[i], floor), now)
            floor = times[i]
        again = None
        if read_u32(&message.reader):
            text = read_text(&message.reader)
            message.finish()
            batch.error = Internal(text, reason=Reason.BACKEND)
        else:
            count = read_u32(&message.reader)
            if count != <uint32_t>len(batch.requests):
                raise Violation(f"{count} answers to {len(batch.requests)} requests")
            requests, responses = [], []
            for request in batch.requests:
                how = read_u32(&message.reader)
                place += 1
                if how == OPEN:
                    if request.state != DONE:
                        self.open[number << REQUEST_BITS | (place - 1)] = request
                    if self.decoupled:
                        requests.append(request)
                        responses.append(None)
                    continue
                if how == RESCHEDULED:
                    if again is None:
                        again = []
                    again.append(request)
                    continue
                response = message.response(how)
                leave_out(request, response)
                responses.append(response)
                requests.append(request)
            message.finish()
            if len(requests) != len(batch.requests):
                batch.requests = requests
            batch.responses = responses
        del self.batches[number]
        batch.compute_start, batch.input_end, batch.output_start, batch.compute_end = (
            times[0], times[1], times[2], times[3])
        if again is not None:
            for request in again:
                self.host.reschedule(request)
        batch.deliver()
        return 0

    cdef int sent(self, uint64_t id, Message message) except -1:
        cdef InferRequest request = self.find(id)
        cdef uint32_t flags = read_u32(&message.reader)
        cdef uint64_t size = read_u64(&message.reader)
        cdef InferResponse response
        cdef bint final = flags & FINAL
        if flags & NULL_RESPONSE:
            response = InferResponse()
            response.null = True
        else:
            response = message.response(read_u32(&message.reader))
        message.finish()
        if final:
            self.open.pop(id, None)
        if request is None or request.state == DONE:
            self.post(False, ACKNOWLEDGE, id, 0, size)
            return 0
        leave_out(request, response)
        response.produced_ns = now_ns()
        complete(request, response, final)
        if final or not request.responder.wait_for_room(request, lambda: self.acknowledge(id, size)):
            self.post(False, ACKNOWLEDGE, id, 0, size)
        return 0

    def acknowledge(self, uint64_t id, uint64_t size):
        """A response was passed on: there is room for more."""
        self.post(False, ACKNOWLEDGE, id, 0, size)

    cdef int called(self, uint64_t key, Message message) except -1:
        cdef InferRequest made = InferRequest.__new__(InferRequest)
        cdef InferRequest parent = None
        cdef Under under = None
        cdef Reader* reader = &message.reader
        cdef uint32_t flags = read_u32(reader)
        cdef uint32_t i, count
        cdef uint64_t number
        made.model_name = read_text(reader)
        number = read_u64(reader)
        made.model_version = "" if number == 0 else str(<int64_t>(number - 1))
        made.id = read_text(reader)
        made.timeout_us = read_u64(reader)
        made.sequence_id = read_text(reader) if flags & TEXT_ID else read_u64(reader)
        made.sequence_start = flags & START
        made.sequence_end = flags & END
        number = read_u64(reader)
        if flags & PARENT:
            parent = self.find(number)
        number = read_u64(reader)
        if number:
            under = self.batches.get(number)
        if parent is None and not flags & PARENT and under is not None and len(under.batch.requests) == 1:
            parent = under.batch.requests[0]
        made.parent = parent
        if parent is not None:
            made.owner = parent.owner
        made.parameters = message.parameters()
        count = read_u32(reader)
        if count:
            made.outputs = []
            for i in range(count):
                if reader.bad:
                    break
                made.outputs.append(RequestedOutput(read_text(reader)))
        made.inputs = message.tensors()
        message.finish()
        self.host.called(key, made, bool(flags & DECOUPLED), bool(flags & BLOCKING),
                         None if under is None else under.batch)
        return 0

    # ------------------------------------------------------------ segments and the end

    def segment_came(self, uint64_t number, segment):
        """A segment of the process, None for one that cannot be used. drain() may go on."""
        if len(self.segments) >= MOST_SEGMENTS:
            self.broken(f"more than {MOST_SEGMENTS} segments without their messages")
        elif not self.closed:
            self.segments[number] = segment

    def untouched(self, bint one_by_one) -> list:
        """The batches under way that the process, which is gone, had not begun, in order.

        Those whose descriptor it has not taken, and with `one_by_one` (it executes one batch after the other) all but
        the first: what it took while that one waited for another model lay aside. Call it after drain().
        """
        cdef Under under
        cdef uint64_t head = ring_head(&self.work)
        cdef list found = []
        cdef bint first = True
        for under in self.batches.values():
            if (one_by_one and not first) or under.place == 0 or head < under.place:
                found.append(under.batch)
            first = False
        return found

    def end(self):
        """The process is gone: what it had under way, as (batches, requests that senders had)."""
        cdef Under under
        self.closed = True
        batches = [under.batch for under in self.batches.values()]
        requests = list(self.open.values())
        self.batches, self.open, self.blocks, self.segments = {}, {}, {}, {}
        self.outbox.clear()
        self.host = None  # which holds this end: neither waits for the collector
        return batches, requests

    @property
    def oldest(self):
        """(batch, when it was sent in ns) of the batch that has been under way for longest, or None."""
        cdef Under under
        for under in self.batches.values():
            return under.batch, under.begun
        return None

    @property
    def occupancy(self) -> int:
        """Descriptors that the process has not taken yet."""
        return <int64_t>min(self.work.own - ring_head(&self.work), self.work.entries)

    def statistics(self) -> dict:
        """What is held, for tests and for looking at it."""
        return {
            "batches": len(self.batches), "open": len(self.open), "blocks": len(self.blocks),
            "waiting": len(self.outbox), "used": self.slab.used, "peak": self.slab.peak,
            "wakes": self.wakes, "received": self.received, "bodies": self.bodies.used,
            "copied": self.copied, "in_place": self.in_place,
        }


cdef int pack_tensor(Packer packer, Tensor tensor, uint64_t placed) except -1:
    """`placed`: where in the shared memory its bytes lie already, 0 where they are to be copied behind the message."""
    cdef int64_t dimension
    if tensor.memory_kind == 2:
        raise Internal(f"tensor '{tensor.name}' lies in GPU memory")
    packer.text(tensor.name)
    packer.u32(<uint32_t>tensor.dtype)
    packer.u32(<uint32_t>len(tensor.shape))
    for dimension in tensor.shape:
        packer.u64(<uint64_t>dimension)
    packer.u32(GIVEN if placed else HERE)
    packer.u64(placed if placed else packer.piece(tensor.ptr, <uint64_t>tensor.nbytes))
    packer.u64(<uint64_t>tensor.nbytes)
    if not placed:
        packer.held.append(tensor)
    return 0


cdef class Message:
    """A message of the process while it is read."""

    cdef ServerEnd end
    cdef Reader reader
    cdef const char* data    # where its tensors begin, in the shared memory
    cdef uint64_t size       # how many bytes of them there are
    cdef uint64_t limit      # of a segment of its own
    cdef object owner        # keeps `data` alive, None: it may not be looked at later
    cdef Block block         # the batch that is answered, for a result
    cdef list bodies         # tensors of that batch that lie in the bodies' area

    cdef int finish(self) except -1:
        if self.reader.bad:
            raise Violation("a message that ends too early")
        return 0

    cdef dict parameters(self):
        text = read_text(&self.reader)
        if not text:
            return None
        found = _loads(text)
        if type(found) is not dict:
            raise Violation("parameters that are no object")
        for value in found.values():
            if not isinstance(value, (bool, int, float, str)):
                raise Violation(f"a parameter of type {type(value).__name__}")
        return found

    cdef InferResponse response(self, uint32_t how):
        cdef InferResponse made = InferResponse.__new__(InferResponse)
        made.parameters = self.parameters()
        if how == RESPONSE:
            made.outputs = self.tensors()
        elif how == ERROR:
            text = read_text(&self.reader)
            made.error = TritonError(text, code_of(read_u32(&self.reader)), Reason.BACKEND)
        else:
            raise Violation(f"an answer of kind {how}")
        return made

    cdef list tensors(self):
        cdef uint32_t i, count = read_u32(&self.reader)
        cdef list made = []
        for i in range(count):
            if self.reader.bad:
                break
            made.append(self.tensor())
        return made

    cdef Tensor tensor(self):
        """A tensor, checked: rules 2 and 3."""
        cdef Reader* reader = &self.reader
        cdef Tensor made = Tensor.__new__(Tensor)
        cdef uint32_t i, dtype, dimensions, place
        cdef uint64_t offset, nbytes, n, elements = 1
        cdef const char* data
        cdef object owner = self.owner
        cdef ServerEnd end = self.end
        name = read_text(reader)
        dtype = read_u32(reader)
        dimensions = read_u32(reader)
        if dimensions > MOST_DIMENSIONS:
            raise Violation(f"a tensor of {dimensions} dimensions")
        shape = []
        for i in range(dimensions):
            n = read_u64(reader)
            elements = times_checked(elements, n)
            shape.append(n)
        place = read_u32(reader)
        offset = read_u64(reader)
        nbytes = read_u64(reader)
        if reader.bad:
            raise Violation("a message that ends too early")
        if dtype == 0 or dtype > 14:
            raise Violation(f"a tensor of datatype {dtype}")
        if dtype != DT_BYTES and nbytes != elements * <uint64_t>element_size(dtype):
            raise Violation(f"a tensor of {elements} elements of datatype {dtype} in {nbytes} bytes")
        if place == HERE:
            if offset > self.size or nbytes > self.size - offset:
                raise Violation("a tensor outside of its message")
            data = self.data + offset
        elif place == GIVEN:
            owner = self.given(offset, nbytes)
            data = end.segment.base + offset
        elif place == LENT:
            if offset < end.outputs or nbytes > end.outputs_end - end.outputs or (
                    offset - end.outputs > end.outputs_end - end.outputs - nbytes):
                raise Violation("a tensor outside of the process's memory")
            data = end.segment.base + offset
        else:
            raise Violation(f"a tensor at place {place}")
        made.name = name
        made.dtype = dtype
        made.shape = tuple(shape)
        if place == HERE:
            end.copied += nbytes
        else:
            end.in_place += nbytes
        if dtype == DT_BYTES or nbytes <= KEEP_ABOVE or owner is None:
            owner = PyBytes_FromStringAndSize(data, nbytes)
            end.copied += nbytes
            made.owner = owner
            made.ptr = PyBytes_AS_STRING(owner)
            if dtype == DT_BYTES:
                check_strings(made.ptr, nbytes, elements)
        else:
            made.owner = owner
            made.ptr = data
        made.nbytes = nbytes
        return made

    cdef object given(self, uint64_t offset, uint64_t nbytes):
        """What keeps an input's memory that is an output now."""
        cdef GivenBlock made
        cdef Tensor tensor
        cdef uint64_t at
        if (self.block is not None and offset >= self.block.offset and nbytes <= self.block.size
                and offset - self.block.offset <= self.block.size - nbytes):
            made = GivenBlock.__new__(GivenBlock)
            made.segment = self.end.segment
            made.block = self.block
            return made
        for tensor in self.bodies or ():
            at = tensor.ptr - self.end.segment.base
            if offset >= at and nbytes <= <uint64_t>tensor.nbytes and offset - at <= <uint64_t>tensor.nbytes - nbytes:
                return tensor
        raise Violation("a tensor outside of the batch that is answered")


@cython.no_gc
cdef class GivenBlock:
    """A batch's memory that a response looks at, and the mapping it lies in."""

    cdef Segment segment
    cdef Block block


cdef int leave_out(InferRequest request, InferResponse response) except -1:
    """Outputs that the configuration does not have are not sent, unless they were asked for by name."""
    cdef Tensor tensor
    if request.outputs is not None or not response.outputs:
        return 0
    names = getattr(request.model, "known_outputs", None)
    if names is not None:
        for tensor in response.outputs:
            if tensor.name not in names:
                response.outputs = known(request, response.outputs)
                break
    return 0


def check_tensor(Tensor tensor not None):
    """Raises Violation where a tensor that came over the socket does not have the bytes that its datatype and shape
    say. Strings must lie in memory that the process cannot write to."""
    cdef uint64_t elements = 1, n
    cdef uint64_t nbytes = <uint64_t>tensor.nbytes
    if tensor.dtype <= 0 or tensor.dtype > 14:
        raise Violation(f"a tensor of datatype {tensor.dtype}")
    if len(tensor.shape) > MOST_DIMENSIONS:
        raise Violation(f"a tensor of {len(tensor.shape)} dimensions")
    for dimension in tensor.shape:
        if type(dimension) is not int or dimension < 0:
            raise Violation("a tensor of a shape that cannot be")
        n = min(dimension, 1 << 62)
        elements = times_checked(elements, n)
    if tensor.dtype == DT_BYTES:
        check_strings(tensor.ptr, nbytes, elements)
    elif nbytes != elements * <uint64_t>element_size(tensor.dtype):
        raise Violation(f"a tensor of {elements} elements of datatype {tensor.dtype} in {nbytes} bytes")


cdef uint64_t times_checked(uint64_t elements, uint64_t n) except? 0xFFFFFFFFFFFFFFFF:
    """Their product, as far as a tensor may have so many."""
    if n > <uint64_t>1 << 40 or (elements and n > (<uint64_t>1 << 48) // elements):
        raise Violation("a tensor with more elements than there can be")
    return elements * n


cdef int check_strings(const char* data, uint64_t nbytes, uint64_t elements) except -1:
    """Strings behind their lengths: as many as the shape says, and nothing left over."""
    cdef uint64_t at = 0, found = 0
    cdef uint32_t n
    while at < nbytes:
        if nbytes - at < 4:
            raise Violation("strings that end too early")
        memcpy(&n, data + at, 4)
        at += 4
        if nbytes - at < n:
            raise Violation("strings that end too early")
        at += n
        found += 1
    if found != elements:
        raise Violation(f"{found} strings in a tensor of {elements}")
    return 0


cdef list _CODES = [
    Code.UNKNOWN, Code.INTERNAL, Code.NOT_FOUND, Code.INVALID_ARG, Code.UNAVAILABLE, Code.UNSUPPORTED,
    Code.ALREADY_EXISTS, Code.CANCELLED,
]


cdef object code_of(uint32_t number):
    if number >= 8:
        raise Violation(f"an error of code {number}")
    return _CODES[number]
