"""One sampled request as it is traced: its points in time, its tensors, its place in the tree.

The problem: a trace must show true times, and tracing every request must cost next to nothing. The
choice: times are read from the request's own timestamp array when it is done; what the array cannot
hold (responses of decoupled models) is noted as it happens; the text of a trace file is written here,
number by number, without an object per timestamp.

Rules:
 1. A Group is one trace for sampling and for files: a root request with all its ensemble steps and
    BLS calls. It is finished when every part has ended.
 2. Ids grow from parent to child.
 3. A part ends with its final response; a root with a front when that response has been sent.
 4. Timestamps of a part are in time order.
 5. A part that is closed does not change any more.
Source: spec/trace-file.md, spec/observed.md 11, the trace guide.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc
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
    now_ns,
)

from neptrio.codec.json_infer import dump_json
from neptrio.observe.propagation import traceparent
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

cdef int64_t last_id = 0
cdef dict models = {}       # model name -> the beginning of its objects


cdef class Sampling:
    """What sampling counts in a scope of settings (observe.trace_settings.Scope)."""

    cpdef bint sample(self):
        """Counts a request; True when it is one to trace (the rate-th, 2 * rate-th, ...)."""
        if self.level is None or not len(self.level) or not self.left or not self.rate:
            return False
        self.seen += 1
        if self.seen < self.rate:
            return False
        self.seen = 0
        if self.left > 0 and not self.tail_us:
            self.left -= 1
        self.open += 1
        return True

    def keep(self, bint slow_or_failed) -> bool:
        """With a tail: whether a finished trace is kept, which counts it."""
        if not self.tail_us:
            return True
        if not slow_or_failed or not self.left:
            return False
        if self.left > 0:
            self.left -= 1
        return True


cdef class Group:
    """A root request's trace with those of its children."""

    def __init__(self, tracer, Sampling scope, tuple level, bint asked=False):
        self.tracer = tracer
        self.scope = scope
        self.timestamps = "TIMESTAMPS" in level
        self.tensors = "TENSORS" in level
        self.asked = asked
        self.parts = []
        self.trace_id = 0


cdef class Trace:
    """One request of a group; lies in request.trace."""

    def __init__(self, Group group, InferRequest request, int64_t parent):
        global last_id
        last_id += 1
        self.id = last_id
        self.parent = parent
        self.group = group
        self.request = request
        self.turn = group.tracer.turn
        self.error = ""
        self.headers = ()
        self.span_id = 0
        if not parent and request.stamps[<int>RECV_START]:
            self.front = GRPC if isinstance(request.context, GrpcStream) else HTTP
        group.parts.append(self)
        group.open += 1
        if group.tensors:
            self.copy("TENSOR_QUEUE_INPUT", request.inputs)
            if not parent:
                self.parameters = parameters_of(request)

    def copy(self, str activity, tensors, int response=0):
        """Takes tensors as they are now."""
        limit = self.group.tracer.tensor_bytes
        if self.tensors is None:
            self.tensors = []
        self.tensors += [Copied(activity, tensor, limit, response) for tensor in tensors or ()]

    cpdef object answering(self, InferResponse response, bint final):
        """The request is being answered; called by complete() before the responder is."""
        cdef InferRequest request = self.request
        if request is None:
            return
        if response.error is not None and not self.error:
            self.error = str(response.error)
        if self.group.tensors:
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
            self.flushing = True
            self.turn.want_flush(self)

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
        cdef Group group = self.group
        if request is None:
            return
        self.request = None
        self.name = request.model.name
        self.version = int(request.model.version)
        self.request_id = request.id
        self.composing = request.composing
        memcpy(self.stamps, request.stamps, sizeof(self.stamps))
        group.open -= 1
        if not group.open:
            group.tracer.finished(group)

    # ------------------------------------------------------------ what is known of a closed part

    @property
    def identity(self):
        """(model name, model version, request id)"""
        return self.name, self.version, self.request_id

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

    cdef int64_t most(self):
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
        if not self.group.timestamps:
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
        top = {"model_name": self.name, "model_version": self.version, "id": self.id}
        if self.parent:
            top["parent_id"] = self.parent
        if self.request_id:
            top["request_id"] = self.request_id
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
        return [
            {"model_name": self.name, "model_version": self.version, "id": self.id, "activity": t.activity,
             **({"response": t.response} if t.response else {}), "tensor": tensor_document(t)} for t in self.tensors or ()
        ]

    def text(self) -> bytes:
        """The part's own object, as JSON."""
        cdef bytes head = models.get(self.name)
        cdef bytes request_id = None, error = None, parameters = None
        cdef int64_t most = self.most()
        cdef int64_t size
        cdef Point* points
        cdef char* made
        cdef char* at
        cdef int n = 0, i
        if head is None:
            head = models[self.name] = b'{"model_name":%s,"model_version":' % dump_json(self.name)
        size = PyBytes_GET_SIZE(head) + 160 + most * POINT_BYTES
        if self.request_id:
            request_id = dump_json(self.request_id)
            size += PyBytes_GET_SIZE(request_id)
        if self.error:
            error = dump_json(self.error)
            size += PyBytes_GET_SIZE(error)
        if self.parameters:
            parameters = dump_json(self.parameters)
            size += 16 + PyBytes_GET_SIZE(parameters)
        made = <char*>malloc(size + most * sizeof(Point))
        if made == NULL:
            raise MemoryError()
        points = <Point*>made  # first, for their alignment
        at = made = made + most * sizeof(Point)
        at = bytes_to(at, head)
        at = number(at, self.version)
        at = chars(at, b',"id":')
        at = number(at, self.id)
        if self.parent:
            at = chars(at, b',"parent_id":')
            at = number(at, self.parent)
        if request_id is not None:
            at = bytes_to(chars(at, b',"request_id":'), request_id)
        if error is not None:
            at = bytes_to(chars(at, b',"error":'), error)
        if parameters is not None:
            at = bytes_to(chars(at, b',"parameters":'), parameters)
        if self.group.timestamps:
            n = self.collect(points)
        if n:
            at = chars(at, b',"timestamps":[')
            for i in range(n):
                memcpy(at, HEADS[points[i].name], HEAD_SIZES[points[i].name])
                at = number(at + HEAD_SIZES[points[i].name], points[i].ns)
                at = chars(at, b"},")
            (at - 1)[0] = 93  # ]
        at[0] = 125
        text = PyBytes_FromStringAndSize(made, at + 1 - made)
        free(points)
        return text

    # ------------------------------------------------------------ OpenTelemetry

    def context(self):
        """The trace context for what is done on the request's behalf, as JSON; None in mode triton."""
        if not self.span_id:
            return None
        found = {"traceparent": traceparent(self.group.trace_id, self.span_id)}
        if self.group.remote is not None and self.group.remote.tracestate:
            found["tracestate"] = self.group.remote.tracestate
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
    cdef char digits[20]
    cdef int n = 0
    cdef uint64_t left = <uint64_t>(value if value >= 0 else -value)
    if value < 0:
        at[0] = 45
        at += 1
    while True:
        digits[n] = <char>(48 + left % 10)
        left //= 10
        n += 1
        if not left:
            break
    while n:
        n -= 1
        at[0] = digits[n]
        at += 1
    return at
