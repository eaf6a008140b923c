"""One sampled request as it is traced: its points in time, its tensors, its place in the tree.

The problem: a trace must show true times, and tracing every request must cost next to nothing. The
choice: times are read from the request's own timestamp array when it is done; what the array cannot
hold (responses of decoupled models) is noted as it happens; the text of a trace file is written here,
into blocks of memory that the writer's thread takes a few times a second, without an object per trace
beside the trace's own.

Rules:
 1. A root request with all its ensemble steps and BLS calls is one trace, for sampling and for files.
    It is finished when every part has ended.
 2. Ids grow from parent to child.
 3. A part ends with its final response; a root with a front when that response has been sent.
 4. Timestamps of a part are in time order.
 5. A part that is closed does not change any more.
 6. A scope's block is filled and taken without a step in between at which another thread could run.
Source: spec/trace-file.md, spec/observed.md 11, the trace guide.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint32_t, uint64_t
from cpython.buffer cimport Py_buffer, PyBuffer_FillInfo
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, strlen

from neptrio._cext.grpc_stream cimport GrpcStream
from neptrio._cext.request cimport (
    COMPUTE_END,
    COMPUTE_INPUT_END,
    COMPUTE_OUTPUT_START,
    COMPUTE_START,
    QUEUE_START,
    RECV_END,
    RECV_START,
    REQUEST_END,
    REQUEST_START,
    SEND_START,
    STAMPS,
    InferRequest,
    InferResponse,
    ModelCore,
    now_ns,
)

from neptrio.codec.http_json import dump_json
from neptrio.observe.propagation import traceparent
from neptrio._cext.device_memory import readable
from neptrio.observe.trace_record import Copied, parameters_of, tensor_document

cdef enum:
    HTTP = 1
    GRPC = 2

cdef enum Name:
    HTTP_RECV_START
    HTTP_RECV_END
    GRPC_WAITREAD_START
    GRPC_WAITREAD_END
    N_REQUEST_START
    N_QUEUE_START
    N_COMPUTE_START
    N_COMPUTE_INPUT_END
    N_COMPUTE_OUTPUT_START
    N_COMPUTE_END
    N_REQUEST_END
    INFER_RESPONSE_COMPLETE
    HTTP_SEND_START
    HTTP_SEND_END
    GRPC_SEND_START
    GRPC_SEND_END
    NAMES

TEXTS = (
    "HTTP_RECV_START", "HTTP_RECV_END", "GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "REQUEST_START",
    "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END",
    "REQUEST_END", "INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END", "GRPC_SEND_START",
    "GRPC_SEND_END",
)
# each name as it stands in a file, in front of its number
_heads = [b'{"name":"%s","ns":' % text.encode() for text in TEXTS]
cdef const char* HEADS[16]
cdef Py_ssize_t HEAD_SIZES[16]
for _i in range(NAMES):
    HEADS[_i] = PyBytes_AS_STRING(_heads[_i])
    HEAD_SIZES[_i] = PyBytes_GET_SIZE(_heads[_i])

cdef enum:
    POINT_BYTES = 64        # no head with its number and brackets is longer
    PLAIN = 16              # points of a part with one response, at most
    BLOCK_BYTES = 1048576   # a block that holds as much goes to the writer's thread at once

cdef int64_t last_id = 0
cdef char PAIRS[200]        # "00" "01" ... "99"
for _i in range(100):
    PAIRS[2 * _i] = 48 + _i // 10
    PAIRS[2 * _i + 1] = 48 + _i % 10


cdef class TextBlock:
    """The text of finished traces; a buffer for whoever writes it."""

    def __cinit__(self):
        self.most = 1 << 62

    def __dealloc__(self):
        free(self.data)

    def __len__(self):
        return self.size

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.size, True, flags)

    def clear(self):
        """Empties it; its memory is kept."""
        self.size = 0
        self.traces = 0

    cdef int reserve(self, Py_ssize_t n) except -1:
        cdef Py_ssize_t room
        cdef char* data
        if self.size + n > self.room:
            room = max(2 * self.room, self.size + n, 16384)
            data = <char*>realloc(self.data, room)
            if data == NULL:
                raise MemoryError()
            self.data = data
            self.room = room
        return 0

    cdef int add(self, Trace root) except -1:
        cdef Trace part
        cdef char* at
        self.reserve(root.room() + 2)
        at = self.data + self.size
        if self.traces:
            at = chars(at, b",\n")
        self.size = root.write(at) - self.data
        if root.children is not None:
            for part in root.children:
                self.reserve(part.room() + 2)
                at = chars(self.data + self.size, b",\n")
                self.size = part.write(at) - self.data
        self.traces += 1
        return 0


cdef class Sampling:
    """What sampling counts in a scope of settings (observe.trace_settings.Scope)."""

    cpdef bint sample(self):
        """Counts a request; True when it is one to trace (the rate-th, 2 * rate-th, ...)."""
        if not self.left or not self.rate or not self.level:
            return False
        self.seen += 1
        if self.seen < self.rate:
            return False
        self.seen = 0
        if self.left > 0 and not self.tail_us:
            self.left -= 1
        self.open += 1
        return True

    def take_block(self):
        """The block, which the scope then has no more (rule 6)."""
        cdef TextBlock block = self.block
        self.block = None
        return block

    cpdef bint keep(self, bint slow_or_failed):
        """With a tail: whether a finished trace is kept, which counts it."""
        if not self.tail_us:
            return True
        if not slow_or_failed or not self.left:
            return False
        if self.left > 0:
            self.left -= 1
        return True


cdef class Sampler:
    """The part of observe.tracer.Tracer that every traced request passes through."""

    cpdef object begin(self, InferRequest request):
        """A validated request is about to be queued: traces it if it is its turn, or asked for.

        Raises InvalidArgument when the request asks for something that is no trace level.
        """
        cdef Trace above, trace
        cdef Sampling scope
        if request.parent is not None:
            above = request.parent.trace
            if above is not None and above.top().open:
                request.trace = trace = made(self, request)
                trace.root = above.top()
                trace.parent = above.id
                if trace.root.children is None:
                    trace.root.children = []
                trace.root.children.append(trace)
                trace.root.open += 1
                if trace.root.with_tensors:
                    trace.copy("TENSOR_QUEUE_INPUT", request.inputs)
                if self.spans:
                    self.identify_part(trace)
        elif request.stamps[<int>RECV_START]:
            scope = self.default
            if self.models:
                scope = self.models.get((<ModelCore>request.model).name, scope)
            if request.asked is not None or self.may_force:
                level = self.asked_level(request, scope)
                if level:
                    scope.open += 1
                    self.root(request, scope, level, True)
                    return
            if not self.disabled and scope.sample():
                self.root(request, scope, scope.level, False)

    def root(self, InferRequest request, Sampling scope, tuple level, bint asked):
        """Begins a trace."""
        cdef Trace trace = made(self, request)
        request.trace = trace
        trace.scope = scope
        trace.asked = asked
        trace.timestamps = "TIMESTAMPS" in level
        trace.with_tensors = "TENSORS" in level
        trace.open = 1
        trace.front = GRPC if isinstance(request.context, GrpcStream) else HTTP
        self.open += 1
        if trace.with_tensors:
            trace.copy("TENSOR_QUEUE_INPUT", request.inputs)
            trace.parameters = parameters_of(request)
        if self.spans:
            self.identify(trace, request.asked)

    cdef object finish(self, Trace root):
        """Every part of a trace has ended."""
        cdef Sampling scope = root.scope
        cdef TextBlock block
        self.open -= 1
        scope.open -= 1
        if root.asked or not scope.tail_us or scope.keep(root.slow_or_failed()):
            self.recent.append(root)
            if self.spans or root.with_tensors or not scope.file:
                self.kept(root)
            else:
                block = scope.block
                if block is None:
                    block = scope.block = self.writer.block(scope)
                    block.add(root)
                    self.writer.opened(scope)
                else:
                    block.add(root)
                if block.size >= BLOCK_BYTES or block.traces >= block.most:
                    self.writer.full(scope)
        if not scope.open and (scope.retired or not scope.left):
            self.drained(scope)
        if not self.open and (self.disabled or scope.retired or not scope.left):
            self.activate()


cdef Trace made(Sampler sampler, InferRequest request):
    global last_id
    cdef Trace trace = Trace.__new__(Trace)
    last_id += 1
    trace.id = last_id
    trace.sampler = sampler
    trace.request = request
    trace.turn = sampler.turn
    return trace


@cython.freelist(256)
cdef class Trace:
    """One request of a trace; lies in request.trace."""

    def __cinit__(self):
        self.error = ""
        self.headers = ()
        self.span_id = 0
        self.trace_id = 0

    cdef Trace top(self):
        return self if self.root is None else self.root

    @property
    def group(self):
        """The root part, which holds what all parts have in common."""
        return self.top()

    @property
    def parts(self) -> list:
        """A root and the parts below it."""
        return [self, *(self.children or ())]

    def copy(self, str activity, tensors, int response=0):
        """Takes tensors as they are now."""
        if self.tensors is None:
            self.tensors = []
        limit = self.sampler.tensor_bytes
        self.tensors += [Copied(activity, tensor, limit, response) for tensor in readable(tensors or ())]

    cpdef object answering(self, InferResponse response, bint final):
        """The request is being answered; called by complete() before the responder is."""
        cdef InferRequest request = self.request
        if request is None:
            return
        if response.error is not None and not self.error:
            self.error = str(response.error)
        if self.top().with_tensors:
            if final and request.stamps[<int>COMPUTE_START] and not request.composing:
                self.copy("TENSOR_BACKEND_INPUT", request.inputs)
            if response.outputs:
                self.copy("TENSOR_BACKEND_OUTPUT", response.outputs, self.answers)
                self.answers += 1
        if self.front and not request.cancelled and not response.null and not self.told_by_front:
            self.note(now_ns())

    cdef int note(self, int64_t now) except -1:
        if not self.made:
            self.made = now
        elif self.waiting is None:
            self.waiting = [now]
        else:
            self.waiting.append(now)
        return 0

    cpdef object answered(self, bint final):
        """The responder has been called; the rest follows when the turn has sent its output."""
        if final:
            self.ended = True
            if not self.front:
                self.close()
                return
        if not self.deferred and not self.flushing:
            self.flushing = True  # so it is there once
            self.turn.connections.append(self)

    def defer(self):
        """The front sends later than this turn and calls left() when it has, or never will."""
        self.deferred = not self.has_left

    def left(self):
        """A front that deferred has sent its answer, or its client is gone."""
        self.has_left, self.deferred = True, False
        self.sent()

    def flush(self):
        """Called by the turn after the connection that the answer went to."""
        if self.again:
            self.again = False
            self.turn.want_flush(self)
            return
        self.flushing = False
        self.sent()

    cpdef object sent(self):
        """What was answered so far has been handed to the network."""
        cdef InferRequest request = self.request
        cdef int64_t now, start
        if request is None:
            return
        now = now_ns()
        start = request.stamps[<int>SEND_START]
        if self.made and not self.send_end:
            self.send_start = start if self.made <= start <= now else self.made
            self.send_end = now
        if self.waiting is not None:
            if self.more is None:
                self.more = []
            for made in self.waiting:
                self.more.append((made, start if made <= start <= now else made, now))
            self.waiting = None
        if self.ended:
            self.close()

    def refused(self, error):
        """The scheduler did not take the request: its answer is the error, sent when this turn ends."""
        cdef InferRequest request = self.request
        if request is None:
            return
        self.error = str(error)
        request.stamps[<int>REQUEST_END] = now_ns()
        self.ended = True
        if self.front:
            self.told()
        else:
            self.close()

    def told(self):
        """The front itself answers for the request: refused, or its deadline is over while it goes on."""
        if self.request is None or not self.front or self.made:
            return
        self.told_by_front = True
        self.note(now_ns())
        self.again = True  # the connection asks for its flush after this
        if not self.flushing:
            self.flushing = True
            self.turn.want_flush(self)
            self.turn.soon()

    cpdef object close(self):
        """Reads the request's timestamps and lets go of it."""
        cdef InferRequest request = self.request
        cdef Trace root = self.top()
        if request is None:
            return
        self.request = None
        self.turn = None
        self.model = request.model
        self.request_id = request.id
        self.composing = request.composing
        memcpy(self.stamps, request.stamps, sizeof(self.stamps))
        root.open -= 1
        if not root.open:
            self.sampler.finish(root)

    # ------------------------------------------------------------ what is known of a closed part

    @property
    def identity(self):
        """(model name, model version, request id)"""
        return self.model.name, int(self.model.version), self.request_id

    @property
    def protocol(self) -> str:
        """HTTP or GRPC of a request that came over the network, "" of steps and calls."""
        return ("", "HTTP", "GRPC")[self.front]

    @property
    def duration_ns(self) -> int:
        """From the moment the request was complete (or was made) until its last response was sent."""
        cdef int64_t end = max(self.stamps[<int>REQUEST_END], self.send_end)
        cdef int64_t begin = self.stamps[<int>RECV_END] if self.front else self.stamps[<int>REQUEST_START]
        if self.more:
            end = max(end, <int64_t>self.more[len(self.more) - 1][2])
        return end - begin

    def slow_or_failed(self) -> bool:
        """For the scope's trace_tail."""
        cdef Trace part
        if self.error or self.duration_ns >= self.scope.tail_us * 1000:
            return True
        for part in self.children or ():
            if part.error:
                return True
        return False

    cdef int64_t most(self) except -1:
        return PLAIN + (3 * len(self.more) if self.more is not None else 0)

    cdef int collect(self, Point* points) noexcept:
        """The points in time order (stable); there is room for most()."""
        cdef int n = 0, i, j
        cdef int64_t* s = self.stamps
        cdef Point p
        if self.front == HTTP:
            n = put(points, n, s[<int>RECV_START], HTTP_RECV_START)
            n = put(points, n, s[<int>RECV_END], HTTP_RECV_END)
        elif self.front == GRPC:
            n = put(points, n, s[<int>RECV_START], GRPC_WAITREAD_START)
            n = put(points, n, s[<int>RECV_END], GRPC_WAITREAD_END)
        n = put(points, n, s[<int>REQUEST_START], N_REQUEST_START)
        n = put(points, n, s[<int>QUEUE_START], N_QUEUE_START)
        if not self.composing:
            n = put(points, n, s[<int>COMPUTE_START], N_COMPUTE_START)
            n = put(points, n, s[<int>COMPUTE_INPUT_END], N_COMPUTE_INPUT_END)
            n = put(points, n, s[<int>COMPUTE_OUTPUT_START], N_COMPUTE_OUTPUT_START)
            n = put(points, n, s[<int>COMPUTE_END], N_COMPUTE_END)
        n = put(points, n, s[<int>REQUEST_END], N_REQUEST_END)
        if self.send_end:
            n = self.response(points, n, self.made, self.send_start, self.send_end)
        if self.more is not None:
            for made, start, end in self.more:
                n = self.response(points, n, made, start, end)
        for i in range(1, n):  # nearly sorted
            p = points[i]
            j = i
            while j and points[j - 1].ns > p.ns:
                points[j] = points[j - 1]
                j -= 1
            points[j] = p
        return n

    cdef int response(self, Point* points, int n, int64_t made, int64_t start, int64_t end) noexcept:
        if not self.told_by_front:
            n = put(points, n, made, INFER_RESPONSE_COMPLETE)
        n = put(points, n, start, HTTP_SEND_START if self.front == HTTP else GRPC_SEND_START)
        return put(points, n, end, HTTP_SEND_END if self.front == HTTP else GRPC_SEND_END)

    @property
    def times(self) -> list:
        """[(nanoseconds, name)] in time order, [] when timestamps are not traced."""
        cdef Point* points
        cdef int n, i
        if not self.top().timestamps:
            return []
        points = <Point*>malloc(self.most() * sizeof(Point))
        if points == NULL:
            raise MemoryError()
        n = self.collect(points)
        found = [(points[i].ns, TEXTS[points[i].name]) for i in range(n)]
        free(points)
        return found

    def document(self) -> list:
        """The objects of the trace file, tensors included."""
        name, version, request_id = self.identity
        top = {"model_name": name, "model_version": version, "id": self.id}
        if self.parent:
            top["parent_id"] = self.parent
        if request_id:
            top["request_id"] = request_id
        if self.error:
            top["error"] = self.error
        if self.parameters:
            top["parameters"] = self.parameters
        times = self.times
        if times:
            top["timestamps"] = [{"name": what, "ns": ns} for ns, what in times]
        return [top, *self.activities()]

    def activities(self) -> list:
        """The objects of the tensors."""
        name, version, _ = self.identity
        return [
            {"model_name": name, "model_version": version, "id": self.id, "activity": t.activity,
             **({"response": t.response} if t.response else {}), "tensor": tensor_document(t)}
            for t in self.tensors or ()
        ]

    def text(self) -> bytes:
        """The part's own object, as JSON."""
        cdef char* made = <char*>malloc(self.room())
        if made == NULL:
            raise MemoryError()
        try:
            return PyBytes_FromStringAndSize(made, self.write(made) - made)
        finally:
            free(made)

    cdef Py_ssize_t room(self) except -1:
        """Bytes that write() needs at most."""
        cdef ModelCore model = self.model
        if model.trace_head is None:
            model.trace_head = b'{"model_name":%s,"model_version":%s,"id":' % (
                dump_json(model.name), model.version.encode()
            )
        # a character becomes 6 bytes at most
        return (PyBytes_GET_SIZE(model.trace_head) + 160 + self.most() * POINT_BYTES
                + 6 * 4 * (len(self.request_id) + len(self.error))
                + (16 + len(dump_json(self.parameters)) if self.parameters else 0))

    cdef char* write(self, char* at) except NULL:
        cdef Point plain[PLAIN]
        cdef Point* points = plain
        cdef int64_t most
        cdef int n, i
        at = bytes_to(at, (<ModelCore>self.model).trace_head)
        at = number(at, self.id)
        if self.parent:
            at = number(chars(at, b',"parent_id":'), self.parent)
        if self.request_id:
            at = bytes_to(chars(at, b',"request_id":'), dump_json(self.request_id))
        if self.error:
            at = bytes_to(chars(at, b',"error":'), dump_json(self.error))
        if self.parameters:
            at = bytes_to(chars(at, b',"parameters":'), dump_json(self.parameters))
        if self.top().timestamps:
            most = self.most()
            if most > PLAIN:
                points = <Point*>malloc(most * sizeof(Point))
                if points == NULL:
                    raise MemoryError()
            n = self.collect(points)
            if n:
                at = chars(at, b',"timestamps":[')
                for i in range(n):
                    memcpy(at, HEADS[points[i].name], HEAD_SIZES[points[i].name])
                    at = chars(number(at + HEAD_SIZES[points[i].name], points[i].ns), b"},")
                (at - 1)[0] = 93  # ]
            if points != plain:
                free(points)
        at[0] = 125  # }
        return at + 1

    # ------------------------------------------------------------ OpenTelemetry

    def context(self):
        """The trace context for what is done on the request's behalf, as JSON; None in mode triton."""
        if not self.span_id:
            return None
        found = {"traceparent": traceparent(self.top().trace_id, self.span_id)}
        if self.top().remote is not None and self.top().remote.tracestate:
            found["tracestate"] = self.top().remote.tracestate
        return dump_json(found).decode()


cdef inline int put(Point* points, int n, int64_t ns, int name) noexcept:
    if not ns:
        return n
    points[n].ns = ns
    points[n].name = name
    return n + 1


cdef inline char* chars(char* at, const char* text) noexcept:
    cdef size_t n = strlen(text)
    memcpy(at, text, n)
    return at + n


cdef inline char* bytes_to(char* at, bytes text):
    memcpy(at, PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))
    return at + PyBytes_GET_SIZE(text)


cdef inline char* number(char* at, int64_t value) noexcept:
    """Decimal digits, two at a time."""
    cdef char digits[20]
    cdef int i = 20
    cdef uint64_t left = <uint64_t>value
    cdef uint32_t low
    while left >= 100000000:  # eight digits in 32-bit arithmetic
        low = <uint32_t>(left % 100000000)
        left //= 100000000
        i -= 8
        memcpy(&digits[i + 6], &PAIRS[2 * (low % 100)], 2)
        low //= 100
        memcpy(&digits[i + 4], &PAIRS[2 * (low % 100)], 2)
        low //= 100
        memcpy(&digits[i + 2], &PAIRS[2 * (low % 100)], 2)
        memcpy(&digits[i], &PAIRS[2 * (low // 100)], 2)
    low = <uint32_t>left
    while low >= 100:
        i -= 2
        memcpy(&digits[i], &PAIRS[2 * (low % 100)], 2)
        low //= 100
    if low >= 10:
        i -= 2
        memcpy(&digits[i], &PAIRS[2 * low], 2)
    else:
        i -= 1
        digits[i] = <char>(48 + low)
    memcpy(at, &digits[i], 20 - i)
    return at + 20 - i
