"""The server's end of the rings to one life of a model's process.

The trio thread packs a batch into the shared memory and pushes its descriptor; when the bell rings
it takes what the process pushed, checks it, and answers. No thread stands between: a small batch
costs two copies of a few hundred bytes and, where the other side sleeps, one system call each way.

Rules:
 1. Everything here runs on the trio thread. The one exception is the last reference to a Lease, which may go anywhere.
 2. What the process wrote is believed in nothing (ring_reader, cext/rings/message). A message that cannot be is a
    Violation: the process is killed, and its requests fail as for any other end.
 3. A batch is in `batches` until its result, a request that a sender answers in `open` until its final
    response. Whoever takes it out answers it; end() takes everything out.
"""
cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from neptrio.backends.python.ring_reader cimport AnswerReader
from neptrio.backends.python.ring_sender cimport RingSender, Under
from neptrio.execution.batch cimport Batch, complete
from neptrio.request.infer_request cimport (
    DONE,
    InferRequest,
    InferResponse,
    RequestedOutput,
    Tensor,
    now_ns,
)
from neptrio.rings.kinds cimport *
from neptrio.rings.packet cimport Packer, Reader, read_text, read_u32, read_u64
from neptrio.rings.ring cimport (
    Entry,
    RingEnd,
    Segment,
    ring_advance,
    ring_head,
    ring_peek,
    ring_sleep,
)

from neptrio.backends.python.convert import known
from neptrio.errors import Internal, Reason
from neptrio.foreign import valid
from neptrio.rings.message import Violation
from triton_python_backend_utils._sender import UNTOLD_BYTES

cdef uint64_t UNTOLD = UNTOLD_BYTES

cdef enum:
    DRAIN_AT_ONCE = 512      # descriptors, before other events have their turn
    DRAIN_NS = 100_000       # or so long, as answers on their way to clients take ten times as long as others
    CLOCK_AFTER = 4          # descriptors between two looks at the clock
    MOST_SEGMENTS = 1088     # that have come for messages still to come: as many as descriptors, and a few threads more


@cython.no_gc
cdef class Lease:
    """The right to look at a message of the process where it lies."""

    cdef Segment segment     # alive as long as somebody looks
    cdef ServerEnd end
    cdef uint64_t offset

    def __dealloc__(self):
        if self.end is not None:
            self.end.give_back(self.offset)


@cython.final
cdef class OnCancel:
    """Tells the process that a request was cancelled."""

    cdef ServerEnd end
    cdef uint64_t id

    def __call__(self):
        cdef InferRequest request = self.end.find(self.id)
        self.end.post(False, CANCEL, self.id, 0, request is not None and request.still_read)


cdef class ServerEnd(RingSender):
    """See the module's text.

    `host` hears what is not the ring's own business: called(), took(), call_cancelled(), reschedule(),
    send_segment() and violated(); and lag(), from any thread: flush() is to be called again before long.
    """

    cdef RingEnd answers
    cdef AnswerReader reader
    cdef readonly dict open          # request id -> InferRequest  # type: dict[int, InferRequest]
    cdef dict segments               # numbers of segments of the process that have come
    cdef bint decoupled
    cdef readonly uint64_t received
    cdef dict passed                 # request id -> bytes of its responses that were passed on since its sender was told

    def __init__(self, Segment segment not None, layout, host, bint decoupled):
        RingSender.__init__(self, segment, layout, host)
        self.answers.base = segment.base + <size_t>layout.done
        self.answers.entries = layout.done_entries
        self.reader = AnswerReader(segment, layout.outputs, layout.outputs + layout.area)
        self.decoupled = decoupled
        self.open = {}
        self.passed = {}
        self.segments = {}
        ring_sleep(&self.answers)  # the first push rings the bell

    def begin(self, Batch batch not None):
        """Sends a batch. Raises what packing or sending it has raised, and has forgotten it then."""
        cdef InferRequest request
        try:
            self.send_batch(batch)
        except BaseException:
            for request in batch.requests:
                request.on_cancel = None
            raise

    cdef int send_batch(self, Batch batch) except -1:
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
        try:
            self.send(True, BATCH, number, packer, under, batch.instance.mailbox)
        except BaseException:
            del self.batches[number]
            packer.reset()
            if under.block is not None:
                self.blocks.pop(under.block.offset, None)
            raise
        if cancelled is not None:
            for on_cancel in cancelled:
                on_cancel()
        return 0

    # ------------------------------------------------------------ from the process

    def drain(self):
        """Takes what the process has pushed. True when there is more, and it is to be called again."""
        cdef Entry entry
        cdef int got, count = 0
        cdef int64_t until = 0
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
            if count % CLOCK_AFTER == CLOCK_AFTER - 1:
                if until == 0:
                    until = now_ns() + DRAIN_NS
                elif now_ns() >= until or count >= DRAIN_AT_ONCE:
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
        if self.work_line or self.control_line:
            self.flush()
        return False

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
            self.passed.pop(entry.id, None)
            if request is not None and request.state != DONE:
                complete(request, InferResponse(None, self.host.dropped(request)), True)
            return True
        if kind != RESULT and kind != SEND and kind != CALL:
            raise Violation(f"a descriptor of kind {kind}")
        return self.take_message(entry)

    cdef bint take_message(self, Entry* entry) except -1:
        cdef AnswerReader message = self.reader
        cdef uint64_t length = entry.length & ~KEEP
        cdef Lease lease
        cdef Segment segment
        cdef const char* base
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
            message.owner = segment
        else:
            if (entry.offset < message.outputs or entry.offset > message.outputs_end
                    or length > message.outputs_end - entry.offset):
                raise Violation(f"a message of {length} bytes at {entry.offset}")
            base = self.segment.base + entry.offset
            if entry.length & KEEP:
                lease = Lease.__new__(Lease)
                lease.segment = self.segment
                lease.end = self
                lease.offset = entry.offset
                message.owner = lease
        try:
            if entry.size > length:
                raise Violation(f"{entry.size} bytes of a message of {length}")
            message.copied_own(base, entry.size)
            message.data = base + (entry.size + 63) // 64 * 64
            message.data_size = length - min(length, <uint64_t>((entry.size + 63) // 64 * 64))
            if entry.kind == RESULT:
                self.result(entry.id, message)
            elif entry.kind == SEND:
                self.sent(entry.id, message)
            else:
                self.called(entry.id, message)
        finally:
            message.forget()
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

    cdef int result(self, uint64_t number, AnswerReader message) except -1:
        cdef Under under = self.batches.get(number)
        cdef Batch batch
        cdef InferRequest request
        cdef InferResponse response
        cdef list requests, responses, again
        cdef int64_t times[4]
        cdef int64_t floor, now = now_ns()
        cdef int i
        cdef uint32_t count, how
        cdef uint64_t place = 0, senders
        if under is None:
            raise Violation(f"a result of batch {number}, which is not under way")
        batch = under.batch
        senders = len(batch.requests)
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
            batch.error = Internal(valid(text), reason=Reason.BACKEND)
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
            times[3] = now_ns()  # the process says when it began to copy the outputs to where they are found here
        del self.batches[number]
        if self.passed:
            for place in range(senders):
                if number << REQUEST_BITS | place not in self.open:
                    self.passed.pop(number << REQUEST_BITS | place, None)
        batch.compute_start, batch.input_end, batch.output_start, batch.compute_end = (
            times[0], times[1], times[2], times[3])
        if again is not None:
            for request in again:
                self.host.reschedule(request)
        batch.deliver()
        return 0

    cdef int sent(self, uint64_t id, AnswerReader message) except -1:
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
            self.passed.pop(id, None)
        if request is None or request.state == DONE:
            if not final:
                self.acknowledge(id, size)
            return 0
        leave_out(request, response)
        response.produced_ns = now_ns()
        complete(request, response, final)
        if not final and not request.responder.wait_for_room(request, lambda: self.acknowledge(id, size)):
            self.acknowledge(id, size)
        return 0

    def acknowledge(self, uint64_t id, uint64_t size):
        """A response was passed on, or dropped. Its sender is told when it may be short of room, as each message may wake the
        process; at once when the request has ended, so that `passed` is as short as the requests under way."""
        cdef InferRequest request = self.find(id)
        if request is not None and request.state != DONE:
            size += <uint64_t>self.passed.pop(id, 0)
            if size < UNTOLD:
                self.passed[id] = size
                return
        self.post(False, ACKNOWLEDGE, id, 0, size)

    cdef int called(self, uint64_t key, AnswerReader message) except -1:
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
        self.batches, self.open, self.blocks, self.segments, self.passed = {}, {}, {}, {}, {}
        self.work_line.clear()
        self.control_line.clear()
        self.host = None  # which holds this end: neither waits for the collector
        return batches, requests

    @property
    def oldest(self):
        # type: () -> tuple[Batch, int] | None
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
            "waiting": self.waiting, "untold": len(self.passed), "used": self.slab.used, "peak": self.slab.peak,
            "wakes": self.wakes, "received": self.received, "bodies": self.bodies.used,
            "copied": self.copied, "in_place": self.in_place,
        }

    @property
    def copied(self) -> int:
        """Bytes of tensors that were copied on their way here or there, once each time."""
        return self.copied_out + self.reader.copied

    @property
    def in_place(self) -> int:
        """Bytes of tensors that crossed without a copy."""
        return self.in_place_out + self.reader.in_place


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
