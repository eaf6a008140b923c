"""The server's end of the rings to one session of a model's process.

The trio thread packs a batch into the shared memory and pushes its descriptor; when the bell rings
it takes what the process pushed, checks it, and answers. No thread stands between: a small batch
costs two copies of a few hundred bytes and, where the other side sleeps, one system call each way.

Rules:
 1. What holds for every Channel (cext/rings/channel) holds here.
 2. A message that cannot be (ring_reader, cext/rings/message) is a Violation: the process is killed, and its requests fail as
    for any other end.
 3. A batch is in `batches` until its last result (the process may execute it in parts), a request that a sender answers in `open` until its final
    response. Whoever takes it out answers it; end() takes everything out.
"""
cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from neptrio.backends.python.ring_reports cimport ReportedSide
from neptrio.backends.python.ring_sender cimport BatchUnderWay
from neptrio.execution.batch cimport Batch, complete
from neptrio.request.infer_request cimport (
    DONE,
    InferRequest,
    InferResponse,
    RequestedOutput,
    Tensor,
    now_ns,
)
from neptrio.rings.channel cimport Channel
from neptrio.rings.kinds cimport *
from neptrio.rings.packet cimport MessageWriter, Reader, read_text, read_u32, read_u64
from neptrio.rings.ring cimport Entry, Segment, ring_head

from neptrio.backends.python.output_differences import known, refusal
from neptrio.backends.python.tensors import as_configured
from neptrio.errors import Internal, Reason
from neptrio.foreign import valid
from neptrio.rings.message import Violation
from triton_python_backend_utils._sender import UNTOLD_BYTES

cdef uint64_t UNTOLD = UNTOLD_BYTES

cdef enum:
    TURN_NS = 100_000        # for drain(), as answers on their way to clients take ten times as long as others
    MOST_SEGMENTS = 1088     # that have come for messages still to come: as many as descriptors, and a few threads more


@cython.final
cdef class OnCancel:
    """Tells the process that a request was cancelled."""

    cdef ServerSide end
    cdef uint64_t id

    def __call__(self):
        cdef InferRequest request = self.end.find(self.id)
        self.end.post(self.end.control, CANCEL, self.id, request is not None and request.still_read)


cdef class ServerSide(ReportedSide):
    """See the module's text.

    `host` hears what is not the ring's own business: called(), took(), call_cancelled(), reschedule(), response_measured(),
    send_segment() and violated(); and lag(), from any thread: flush() is to be called again before long.
    """

    cdef dict segments               # numbers of segments of the process that have come
    cdef readonly bint answers       # the process has answered something
    cdef bint decoupled
    cdef dict passed                 # request id -> bytes of its responses that were passed on since its sender was told

    def __init__(self, Segment segment not None, layout, host, bint decoupled):
        ReportedSide.__init__(self, segment, layout, host)
        self.turn_ns = TURN_NS
        self.decoupled = decoupled
        self.passed = {}
        self.segments = {}

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
        cdef MessageWriter writer = self.writer
        cdef BatchUnderWay under_way = BatchUnderWay()
        cdef Py_ssize_t i = 0, n = len(batch.requests)
        cdef uint64_t number
        cdef list cancelled = None
        self.number += 1
        number = self.number
        self.counters = batch.model.counters
        under_way.batch = batch
        under_way.begun = batch.compute_start = now_ns()  # a sender may answer before the batch is back
        writer.reset()
        writer.u32(<uint32_t>n)
        for request in batch.requests:
            self.pack_request(writer, request, under_way)
        self.batches[number] = under_way
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
            self.send(self.work, BATCH, number, writer, under_way, batch.instance.mailbox)
        except BaseException:
            del self.batches[number]
            writer.reset()
            raise
        if cancelled is not None:
            for on_cancel in cancelled:
                on_cancel()
        return 0

    # ------------------------------------------------------------ from the process

    cdef int take(self, Entry* entry) except -1:
        """One descriptor."""
        cdef uint32_t kind = entry.kind
        cdef InferRequest request
        try:
            if kind == RESULT:
                self.result(entry.id)
            elif kind == SEND:
                self.sent(entry.id)
            elif kind == CALL:
                self.called(entry.id)
            elif kind == TOOK:
                self.host.took(entry.id)
            elif kind == CALL_CANCEL:
                self.host.call_cancelled(entry.id, entry.length != 0)
            elif kind == REPORT:
                self.reported(entry.id)
            elif kind == ACTIVITY:
                self.activity(entry.id)
            elif kind == STATED:
                self.stated(0)
                self.finish()
            elif kind == DROPPED:
                request = self.find(entry.id)
                self.open.pop(entry.id, None)
                self.passed.pop(entry.id, None)
                if request is not None and request.state != DONE:
                    complete(request, InferResponse(None, self.host.dropped(request)), True)
            else:
                raise Violation(f"a descriptor of kind {kind}")
        finally:
            self.block = self.bodies = None
        return 0

    cdef Segment own_segment(self, const Entry* entry):
        cdef Segment segment
        number = entry.offset & ~OWN
        if number not in self.segments:
            return None
        segment = self.segments.pop(number)
        if segment is None:
            raise Violation("a segment that is not sealed or too small")
        if entry.length > segment.size:
            raise Violation(f"a message of {entry.length} bytes in a segment of {segment.size}")
        return segment

    cdef int result(self, uint64_t number) except -1:
        cdef BatchUnderWay under_way = self.batches.get(number)
        cdef Batch batch
        cdef InferRequest request
        cdef InferResponse response
        cdef list requests, responses, again, executions
        cdef bint left_open
        cdef int64_t times[4]
        cdef int64_t floor, now = now_ns()
        cdef int i
        cdef uint32_t whole, count, how, stated = 0
        cdef uint64_t place, senders, left, first
        if under_way is None:
            raise Violation(f"a result of batch {number}, which is not under way")
        batch = under_way.batch
        senders = len(batch.requests)
        place = first = under_way.answered
        left = senders - place
        self.block = under_way.block
        self.bodies = under_way.bodies
        floor = under_way.begun
        for i in range(4):
            times[i] = <int64_t>read_u64(&self.reader)
            times[i] = min(max(times[i], floor), now)
            floor = times[i]
        again = None
        left_open = False
        executions = None
        whole = read_u32(&self.reader)
        if whole == 1:
            text = read_text(&self.reader)
            self.finish()
            batch.error = Internal(valid(text), reason=Reason.BACKEND)
        else:
            count = read_u32(&self.reader)
            stated, whole = whole & STATED_TOO, whole & ~STATED_TOO
            if whole == 2 and 0 < count < left:
                batch = part_of(under_way, count)
                left = count
            elif count != left or whole:
                raise Violation(f"{count} answers to {left} requests")
            requests, responses = [], []
            for request in under_way.batch.requests[place:place + left]:
                how = read_u32(&self.reader)
                place += 1
                if how == OPEN:
                    left_open = True
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
                response = self.response(how)
                check(request, response)
                responses.append(response)
                requests.append(request)
            if stated:
                executions = self.stated(number)
            self.finish()
            if under_way.reported is not None:
                executions, under_way.reported = under_way.reported + (executions or []), None
            batch.executions = executions
            under_way.begun = times[3]
            times[3] = now_ns()  # the process says when it began to copy the outputs to where they are found here
            if len(requests) != len(batch.requests):
                batch.requests = requests
            batch.responses = responses
        self.answers = True
        if not batch.part:
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
        if batch.executions is None and (left_open or stated) and batch.count_execution:
            self.measured_here(number, batch)
        if stated:
            for place in range(first, first + left):
                self.await_report(number << REQUEST_BITS | place, under_way.batch.submitted[place])
        return 0

    cdef int sent(self, uint64_t id) except -1:
        cdef InferRequest request = self.find(id)
        cdef uint32_t flags = read_u32(&self.reader)
        cdef uint64_t size = read_u64(&self.reader)
        cdef uint64_t handed_over = read_u64(&self.reader)  # whatever it says, the statistics keep it within the request
        cdef InferResponse response
        cdef bint final = flags & FINAL
        if flags & NULL_RESPONSE:
            response = InferResponse()
            response.null = True
        else:
            response = self.response(read_u32(&self.reader))
        self.finish()
        if final:
            self.open.pop(id, None)
            self.passed.pop(id, None)
        if request is None or request.state == DONE:
            if not final:
                self.acknowledge(id, size)
            return 0
        self.answers = True
        check(request, response)
        response.produced_ns = <int64_t>min(handed_over, <uint64_t>now_ns())
        complete(request, response, final)
        if final:
            self.await_report(id, request)
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
        self.post(self.control, ACKNOWLEDGE, id, size)

    cdef int called(self, uint64_t key) except -1:
        cdef InferRequest made = InferRequest.__new__(InferRequest)
        cdef InferRequest parent = None
        cdef BatchUnderWay under_way = None
        cdef Reader* reader = &self.reader
        cdef uint32_t flags = read_u32(reader)
        cdef uint32_t i, count
        cdef uint64_t number
        made.model_name = read_text(reader)
        if flags & LABELLED:
            made.model_version = read_text(reader)
        else:
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
            under_way = self.batches.get(number)
        if parent is None and not flags & PARENT and under_way is not None and len(under_way.batch.requests) == 1:
            parent = under_way.batch.requests[0]
        made.parent = parent
        if parent is not None:
            made.owner = parent.owner
        if flags & PRIORITY:
            made.priority = read_u64(reader)
        made.parameters = self.parameters()
        count = read_u32(reader)
        if count:
            made.outputs = []
            for i in range(count):
                if reader.bad:
                    break
                made.outputs.append(RequestedOutput(read_text(reader)))
        made.inputs = self.tensors()
        self.finish()
        self.host.called(key, made, bool(flags & DECOUPLED), bool(flags & BLOCKING), bool(flags & TIMED),
                         None if under_way is None else under_way.batch)
        return 0

    # ------------------------------------------------------------ segments and the end

    def segment_came(self, uint64_t number, segment):
        """A segment of the process, None for one that cannot be used. drain() may go on."""
        if len(self.segments) >= MOST_SEGMENTS:
            self.give_up(f"more than {MOST_SEGMENTS} segments without their messages")
        elif not self.closed:
            self.segments[number] = segment

    def untouched(self, bint one_by_one) -> list:
        """The batches under way that the process, which is gone, had not begun, in order.

        Those whose descriptor it has not taken, and with `one_by_one` (it executes one batch after the other) all but
        the first: what it took while that one waited for another model lay aside. Call it after drain().
        """
        cdef BatchUnderWay under_way
        cdef uint64_t head = ring_head(&self.work.ring)
        cdef list found = []
        cdef bint first = True
        for under_way in self.batches.values():
            if (one_by_one and not first) or under_way.place == 0 or head < under_way.place:
                found.append(under_way.batch)
            first = False
        return found

    def end(self):
        """The process is gone: what it had under way, as (batches, requests that senders had)."""
        cdef BatchUnderWay under_way
        self.close()
        self.count_the_rest()
        batches = [under_way.batch for under_way in self.batches.values()]
        requests = list(self.open.values())
        self.batches, self.open, self.segments, self.passed = {}, {}, {}, {}
        self.host = None  # which holds this end: neither waits for the collector
        return batches, requests

    @property
    def oldest(self):
        # type: () -> tuple[Batch, int] | None
        """(batch, when it was sent in ns) of the batch that has been under way for longest, or None."""
        cdef BatchUnderWay under_way
        for under_way in self.batches.values():
            return under_way.batch, under_way.begun
        return None

    @property
    def occupancy(self) -> int:
        """Descriptors that the process has not taken yet."""
        return <int64_t>min(self.work.ring.own - ring_head(&self.work.ring), self.work.ring.entries)

    def statistics(self) -> dict:
        """What is held, for tests and for looking at it."""
        return {
            **Channel.statistics(self), "batches": len(self.batches), "open": len(self.open), "untold": len(self.passed),
            "peak": self.area.slab.peak, "bodies": self.received_into.used,
            "copied": self.copied, "in_place": self.in_place,
        }


cdef Batch part_of(BatchUnderWay under_way, uint64_t count):
    """The batch of the first requests that have no answer yet: it was executed by itself, and its instance goes on."""
    cdef Batch whole = under_way.batch
    cdef InferRequest request
    cdef list requests = whole.requests[under_way.answered:under_way.answered + count]
    cdef Batch made = Batch(whole.model, requests, whole.close_reason, whole.oldest_wait_ns)
    made.part = True
    made.instance = whole.instance
    for request in requests:
        request.batch = made
    under_way.answered += count
    whole.size -= made.size
    return made


cdef int check(InferRequest request, InferResponse response) except -1:
    """Outputs that the configuration does not have are not sent; what is not as it says is logged, and is an error where the
    model wants that (backends/python/output_differences)."""
    cdef Tensor tensor
    if response.outputs is None or response.error is not None or as_configured(request, response.outputs):
        return 0
    refused = refusal(request.model, [(tensor.name, tensor.dtype, len(tensor.shape)) for tensor in response.outputs],
                      None if request.outputs is None else [o.name for o in request.outputs])
    if refused is None:
        response.outputs = known(request, response.outputs)
    else:
        response.outputs, response.error = None, refused
    return 0
