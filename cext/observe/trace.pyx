"""The trace of one request: its points in time, its tensors, its place in the tree of parts.

The problem: a trace must show true times, and tracing every request must cost next to nothing. The choice: times are
copied from the request's own timestamps when it is done. What these do not contain (times of the responses of decoupled
models) is noted when it happens. A finished trace becomes a record of some hundred bytes (cext/observe/trace_block),
which the writer's thread fetches a few times a second, and the trace object is free for another request.
cext/observe/trace_sampler decides which requests are traced and where records go.

Rules:
 1. A trace is finished when all its parts have ended: the root, and all its ensemble steps and BLS calls.
 2. A child's id is greater than its parent's.
 3. A part ends with its final response; a root that came over the network ends when that response was sent: when the kernel
    has taken all of it, or this process has given it to a front end, or when a transport that sends later says so.
 4. A part that is closed no longer changes, and refers to no model.
 5. A root knows its parts until the trace is finished: afterwards they refer to it alone, as both would live until the collector
    finds them. So who keeps a finished trace keeps the list of its parts.

A part's state says who tells that the answers made so far were sent:

    PASS       the loop pass, when it has flushed the connection that they went to and the kernel has taken them. So a part begins
    TRANSPORT  the transport, which sends later: it owes abandon() in the end
    WORKER     the transport, once a worker has prepared a response: release() is owed for each hold()
    CLOSED     nobody: the part has ended

What happens (the rows), and what a state (the columns) becomes:

    event               PASS              TRANSPORT         WORKER
    -----------------------------------------------------------------------
    answered            PASS              TRANSPORT         WORKER
    flushed             PASS, CLOSED      TRANSPORT         WORKER
    answered_by_front   PASS              TRANSPORT         WORKER
    refused             PASS              TRANSPORT         WORKER
    defer               TRANSPORT, PASS   TRANSPORT         WORKER
    sent_one            PASS              TRANSPORT         WORKER
    hold                WORKER            WORKER            WORKER
    release             PASS              -                 WORKER, PASS
    abandon             PASS, CLOSED      PASS, CLOSED      PASS, CLOSED

Where a cell has several, CLOSED is for a part whose final answer was made; another release() may be owed; and a part that was
abandoned is not deferred again. `-` is a caller's mistake. A part without a transport (a step, a call) is CLOSED by its final
answer.
Source: docs/protocol/trace-file.md, docs/protocol/observed.md 11, docs/protocol/trace-extension.md.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset


from neptrio.request.infer_request cimport (
    COMPUTE_START,
    NO_PROTOCOL,
    RECV_END,
    REQUEST_END,
    REQUEST_START,
    SEND_START,
    InferRequest,
    InferResponse,
    ModelCore,
    Responder,
    now_ns,
)
from neptrio.observe.activities cimport Activities
from neptrio.observe.counters cimport ModelCounters
from neptrio.observe.trace_block cimport (
    PLAIN,
    Point,
    Record,
    TraceBlock,
    collect,
    record_size,
)
from neptrio.observe.traced_tensors cimport TracedTensors

from neptrio.observe.trace_block import TEXTS
from neptrio.codec.http_json import dump_json
from neptrio.limits import LONGEST_NAME, shown
from neptrio.observe.propagation import traceparent
from neptrio.request.device_memory import readable

cdef int64_t last_id = 0
cdef Py_ssize_t _longest = LONGEST_NAME


cdef class Tracing:
    """What a trace uses of the sampler that made it (cext/observe/trace_sampler)."""

    def attach(self, LoopPassCore loop_pass):
        """Sets the loop pass, which tells traces when their answers were sent."""
        self.loop_pass = loop_pass
        loop_pass.follower = Trace
        loop_pass.follow = follow

    cdef object finish(self, Trace root):
        raise NotImplementedError


cdef int follow(object trace) except -1:
    (<Trace>trace).follow()
    return 0


cdef Trace made(Tracing sampler, InferRequest request):
    global last_id
    cdef Trace trace = Trace.__new__(Trace)
    last_id += 1
    trace.record.id = last_id
    trace.sampler = sampler
    trace.request = request
    trace.model = request.model  # a request that is refused may go back to whom it waited with (repository.waiting)
    return trace


@cython.freelist(256)
cdef class Trace:
    """One part of a trace: a request with its times. request.trace refers to it."""

    def __cinit__(self):
        self.error = ""
        self.headers = ()
        self.span_id = 0
        self.trace_id = 0
        memset(&self.record, 0, sizeof(Record))

    @property
    def id(self) -> int:
        """The part's id, greater than its parent's."""
        return self.record.id

    @property
    def parent(self) -> int:
        """The parent's id, 0 for a root."""
        return self.record.parent

    cdef Trace top(self):
        return self if self.root is None else self.root

    @property
    def state(self) -> str:
        """Who tells that the answers made so far were sent: a state of the table above."""
        if self.request is None:
            return "CLOSED"
        if not self.deferred:
            return "PASS"
        return "WORKER" if self.held else "TRANSPORT"

    @property
    def group(self):
        # type: () -> Trace
        """The root, which holds what all parts have in common."""
        return self.top()

    @property
    def parts(self) -> list:
        # type: () -> list[Trace]
        """All parts: the root and those below it, until it is finished (rule 5)."""
        return [self, *(self.children or ())]

    def copy(self, str activity, tensors, int response=0):
        # type: (..., Iterable[Tensor] | None, ...) -> None
        """Copies tensors as they are at this moment: small ones at once, large ones soon."""
        cdef Trace top = self.top()
        cdef int64_t last
        if self.tensors is None:
            self.tensors = TracedTensors()
        last = self.tensors.add(activity, readable(tensors or ()), response, self.sampler.tensor_bytes, self.sampler.copier)
        top.last_copy = max(top.last_copy, last)

    cdef bint copying(self):
        """Whether there are tensors of this trace to which nobody must write, because they are not copied yet."""
        cdef int64_t last = self.top().last_copy
        return last > 0 and last > <int64_t>self.sampler.copier.done

    def when_copied(self, call):
        # type: (Callable[[], None]) -> None
        """Has `call` called, on the copier's thread, when they are."""
        self.sampler.copier.behind(call)

    def drop_tensors(self):
        """Nobody will read them."""
        if self.tensors is not None:
            self.tensors.drop()

    cdef int activity(self, str name, int64_t ns) except -1:
        """The model reports a point in time of its own."""
        if self.request is None or not self.record.timed:  # rule 4
            return 0
        if self.own_points is None:
            self.own_points = Activities.__new__(Activities)
        return self.own_points.add(name, ns)

    @property
    def reported(self) -> list:
        # type: () -> list[tuple[int, str]]
        """[(nanoseconds, name)] of what the model has reported, in that order."""
        return [] if self.own_points is None else [row[:2] for row in self.own_points.rows]

    cdef object answering(self, InferResponse response, bint final, int64_t now):
        """The request is about to be answered. Called by complete() before it calls the responder.

        `now` is the current time, 0 when it was not read.
        """
        cdef InferRequest request = self.request
        if request is None:
            return
        if response.error is not None and not self.error:
            self.error = str(response.error)
        if self.top().with_tensors:
            if final and request.timestamps[<int>COMPUTE_START] and not request.composing:
                self.copy("TENSOR_BACKEND_INPUT", request.inputs)
            if response.outputs:
                self.copy("TENSOR_BACKEND_OUTPUT", response.outputs, self.answers)
                self.answers += 1
        if (self.record.front != NO_PROTOCOL and not request.cancelled and not response.null
                and not self.record.answered_by_front):
            self.note(now if now else now_ns())

    cdef int note(self, int64_t now) except -1:
        if not self.record.made:
            self.record.made = now
        elif self.waiting is None:
            self.waiting = [now]
        else:
            self.waiting.append(now)
        return 0

    cdef object answered(self, bint final):
        """The responder was called. The answer counts as sent when the loop pass has flushed its connection."""
        if final:
            self.ended = True
            if self.record.front == NO_PROTOCOL:
                self.close()
                return
        if not self.deferred and not self.flushing:
            self.flushing = True  # set once, so that the trace is in the pass's list once
            self.sampler.loop_pass.connections.append(self)

    def defer(self):
        """The transport sends after this loop pass: it will call abandon() at the end."""
        if not self.abandoned:
            self.deferred = True

    cdef object settle(self):
        """What was answered so far was sent, or never will be."""
        self.deferred = False
        self.stage = 0
        self.sent(self.unsent())

    def abandon(self):
        """Called by a transport: nothing more will be sent, the client is gone or has all it wanted."""
        self.abandoned = True
        self.settle()

    cpdef hold(self):
        """A worker has to do something before a response can be sent; release() is owed."""
        self.held += 1
        self.deferred = True

    cpdef release(self):
        """It is done, and the transport has called want_flush(): the answer counts as sent when this pass has flushed its
        connection."""
        self.held -= 1
        if self.held or self.request is None:
            return
        self.deferred = False
        if not self.flushing:
            self.flushing = True
            self.sampler.loop_pass.connections.append(self)

    def send_one(self):
        """Called by a transport after defer(): it begins to send the oldest unsent response."""
        self.sending = now_ns()

    def sent_one(self, Py_ssize_t count=1):
        """Called by a transport after defer(): the response for which it called send_one() was sent; or the `count` oldest
        ones, where it sends so many together."""
        cdef int64_t now = now_ns()
        if self.request is None or not self.sending:
            return
        for _ in range(count):
            if self.record.made and not self.record.send_end:
                self.mark_sent(self.record.made, self.sending, now)
            elif self.waiting:
                self.mark_sent(self.waiting.pop(0), self.sending, now)
        self.sending = 0

    cdef object follow(self):
        """Called by the loop pass after it has flushed the connection that the answer went to."""
        cdef Responder responder
        if self.again:
            self.again = False
            self.sampler.loop_pass.connections.append(self)
            return
        self.flushing = False
        if self.deferred or self.request is None:
            self.stage = 0
            return
        if not self.stage:
            self.followed = self.unsent()
        responder = self.request.responder
        if not self.abandoned and responder is not None:
            while self.stage < 2:
                self.stage += 1
                if responder.waits_for_kernel(self.request, self, self.stage - 1):
                    self.flushing = True
                    return
        self.stage = 0
        self.sent(self.followed)
        if self.request is not None and not self.abandoned and self.unsent():  # they were made while others went
            self.flushing = True
            self()

    def __call__(self):
        """Called by the transport, which was given the trace itself as the callback: the kernel has taken more of what was answered, or nobody waits for that any more."""
        self.sampler.loop_pass.connections.append(self)
        self.sampler.loop_pass.soon()

    cdef Py_ssize_t unsent(self) except -1:
        """How many of the responses made so far were not handed to the network."""
        cdef Py_ssize_t first = self.record.made and not self.record.send_end
        return first + (len(self.waiting) if self.waiting is not None else 0)

    cdef object sent(self, Py_ssize_t most):
        """The `most` oldest of the unsent responses were handed to the network, or never will be."""
        cdef InferRequest request = self.request
        cdef int64_t now, start
        if request is None:
            return
        if not self.abandoned:
            now = now_ns()
            start = request.timestamps[<int>SEND_START]
            if most and self.record.made and not self.record.send_end:
                self.mark_sent(self.record.made, start, now)
                most -= 1
            if most and self.waiting is not None:
                for made in self.waiting[:most]:
                    self.mark_sent(made, start, now)
                self.waiting = self.waiting[most:] or None
        elif self.waiting is not None:
            self.more = (self.more or []) + [(made, 0, 0) for made in self.waiting]
            self.waiting = None
        if self.ended and (self.abandoned or not self.unsent()):
            self.close()

    cdef object mark_sent(self, int64_t made, int64_t start, int64_t end):
        """Notes a response that was handed to the network."""
        if not made <= start <= end:
            start = made
        if not self.record.send_end:
            self.record.send_start, self.record.send_end = start, end
        else:
            if self.more is None:
                self.more = []
            self.more.append((made, start, end))

    def refused(self, error):
        # type: (TritonError) -> None
        """The scheduler refused the request: its answer is the error, sent when this pass ends."""
        cdef InferRequest request = self.request
        if request is None:
            return
        self.error = str(error)
        request.timestamps[<int>REQUEST_END] = now_ns()
        self.ended = True
        if self.record.front != NO_PROTOCOL:
            self.answered_by_front()
        else:
            self.close()

    def answered_by_front(self):
        """The transport itself answers: it refuses the request, or its deadline passed while it still executes."""
        if self.request is None or self.record.front == NO_PROTOCOL or self.record.made:
            return
        self.record.answered_by_front = True
        self.note(now_ns())
        self.again = True  # the connection will ask for its flush only after this
        if not self.flushing:
            self.flushing = True
            self.sampler.loop_pass.connections.append(self)
            self.sampler.loop_pass.soon()

    cdef object close(self):
        """Copies the request's timestamps and drops the reference to the request."""
        cdef InferRequest request = self.request
        cdef Trace root = self if self.root is None else self.root
        cdef ModelCore model = self.model
        cdef ModelCounters counters
        if request is None:
            return
        self.request = self.model = None
        counters = model.counters
        if counters.trace_head is None:
            counters.trace_head = b'{"model_name":%s,"model_version":%s,"id":' % (
                dump_json(model.name), model.version.encode()
            )
        self.head = counters.trace_head
        self.model_name = model.name
        self.model_version = model.version
        self.request_id = request.id if len(request.id) <= _longest else shown(request.id, LONGEST_NAME)
        self.record.composing = request.composing
        memcpy(self.record.timestamps, request.timestamps, sizeof(self.record.timestamps))
        root.open -= 1
        if not root.open:
            self.sampler.finish(root)

    # ------------------------------------------------------------ reading a closed part

    @property
    def identity(self):
        # type: () -> tuple[str, int, str]
        """(model name, model version, request id)"""
        return self.model_name, int(self.model_version), self.request_id

    @property
    def protocol(self) -> str:
        """"HTTP" or "GRPC" for a request that came over the network, "" for steps and calls."""
        return ("", "HTTP", "GRPC")[<int>self.record.front]

    @property
    def duration_ns(self) -> int:
        """Nanoseconds from the request's arrival (or creation) until its last response was sent."""
        cdef int64_t* timestamps = self.record.timestamps
        cdef int64_t end = max(timestamps[<int>REQUEST_END], self.record.send_end)
        cdef int64_t begin = timestamps[<int>REQUEST_START if self.record.front == NO_PROTOCOL else <int>RECV_END]
        if self.more:
            end = max(end, <int64_t>self.more[len(self.more) - 1][2])
        return end - begin

    def slow_or_failed(self) -> bool:
        """True when the trace is to be kept under the scope's trace_tail."""
        cdef Trace part
        if self.error or self.duration_ns >= self.scope.tail_us * 1000:
            return True
        for part in self.children or ():
            if part.error:
                return True
        return False

    cdef Py_ssize_t size(self) except -1:
        """The bytes of the part's record with everything that follows it."""
        if self.rest is None:
            self.rest = b""
            if self.request_id:
                self.rest = b',"request_id":' + dump_json(self.request_id)
            if self.error:
                self.rest += b',"error":' + dump_json(self.error)
            if self.parameters:
                self.rest += b',"parameters":' + dump_json(self.parameters)
        self.record.more = len(self.more) if self.more is not None else 0
        self.record.head = PyBytes_GET_SIZE(self.head)
        self.record.rest = PyBytes_GET_SIZE(self.rest)
        if self.own_points is not None:
            self.record.reported, self.record.names = len(self.own_points.rows), self.own_points.bytes
        return record_size(&self.record)

    cdef char* pack(self, char* at, char* end) except NULL:
        """Copies the record to `at`; returns its end. Raises AssertionError where there is no room for size() bytes."""
        cdef char* behind = at + record_size(&self.record)
        cdef int64_t* more
        if record_size(&self.record) > end - at:
            raise AssertionError("a trace's record is longer than the room that was made for it")
        memcpy(at, &self.record, sizeof(Record))
        at += sizeof(Record)
        if self.more is not None:
            more = <int64_t*>at
            for one in self.more:
                more[0], more[1], more[2] = one
                more += 3
            at = <char*>more
        if self.own_points is not None:
            more = <int64_t*>at
            at = <char*>(more + 2 * self.record.reported)
            self.own_points.pack(more, at + self.record.head + self.record.rest, behind)
        memcpy(at, PyBytes_AS_STRING(self.head), self.record.head)
        memcpy(at + self.record.head, PyBytes_AS_STRING(self.rest), self.record.rest)
        return behind

    cdef Py_ssize_t pack_into(self, TraceBlock block) except -1:
        """Adds the records of a root and its parts to a block; returns their size. Adds all of them, or none."""
        cdef Py_ssize_t size = self.size()
        cdef Trace part
        cdef char* at
        cdef char* end
        if self.children is None:
            at = block.reserve(size)
            self.pack(at, at + size)
        else:
            for part in self.children:
                size += part.size()
            at = block.reserve(size)
            end = at + size
            at = self.pack(at, end)
            for part in self.children:
                at = part.pack(at, end)
        block.records.size += size
        block.traces += 1
        return size

    @property
    def times(self) -> list:
        # type: () -> list[tuple[int, str]]
        """[(nanoseconds, name)] in time order, without what the model has reported; [] when timestamps are not traced."""
        cdef Py_ssize_t n, i
        cdef Point* points
        cdef char* copy
        if not self.record.timed:
            return []
        copy = <char*>malloc(self.size())
        points = <Point*>malloc((PLAIN + 1 + 3 * self.record.more + self.record.reported) * sizeof(Point))
        try:
            if copy == NULL or points == NULL:
                raise MemoryError()
            self.pack(copy, copy + self.size())
            n = collect(<Record*>copy, <int64_t*>(copy + sizeof(Record)), points)
            return [(points[i].ns, TEXTS[points[i].name]) for i in range(n) if points[i].name < <int>len(TEXTS)]
        finally:
            free(points)
            free(copy)

    def activities(self) -> list:
        # type: () -> list[tuple[bytes, ...]]
        """The trace file's objects for the tensors, each as parts of its text."""
        if self.tensors is None:
            return []
        return self.tensors.objects({"model_name": self.model_name, "model_version": int(self.model_version), "id": self.id})

    def text(self) -> bytes:
        """The part's own object, as JSON."""
        cdef TraceBlock block = TraceBlock()
        cdef Py_ssize_t size = self.size()
        cdef char* at = block.reserve(size)
        self.pack(at, at + size)
        block.records.size = size
        return block.text()

    # ------------------------------------------------------------ OpenTelemetry

    def context(self):
        # type: () -> str | None
        """The trace context to pass on with requests made on this request's behalf, as JSON; None in mode triton."""
        if not self.span_id:
            return None
        found = {"traceparent": traceparent(self.top().trace_id, self.span_id)}
        if self.top().remote is not None and self.top().remote.tracestate:
            found["tracestate"] = self.top().remote.tracestate
        return dump_json(found).decode()
