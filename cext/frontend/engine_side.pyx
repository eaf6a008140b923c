"""The engine's end: makes requests of a front end's messages, passes them to admission, and sends the answers back.

Rules:
 1. A request's inputs are views of the front end's memory (or copies of small ones: cext/rings/channel, rule 3). It is admitted
    like any other; what admission refuses is answered with that error.
 2. A request is in `open` until its final response was sent. gone() cancels all that are there: the front end has ended.
 3. Outputs are chosen, classified and put into shared memory here, where the model and the regions are known; by a
    worker where that takes long, and later responses to the same request wait for it.
 4. While the client of a request with several responses is behind, wait_for_room() holds the model back, exactly as on
    the engine's own ports.
 5. A cancellation is acted on when the requests that came with it have been dispatched: a client that closes its
    sending side behind a request, and reads on, gets what is computed on the loop, as it does without front ends.
 6. A trace ends when its answer was given to the front end, which sends it. What is made for a front end that has ended
    was not sent.
 7. Sequences that end with their stream (scheduling.base.SequenceStream) belong to the stream's number here.
 8. Inputs that take long to take up are left to a worker (cext/frontend/slow_inputs). Their request is in `open` meanwhile; one
    whose client leaves is not admitted any more.
"""
cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from neptrio.execution.batch cimport hand_over
from neptrio.frontend.channel cimport FrontChannel
from neptrio.frontend.kinds cimport *
from neptrio.frontend.slow_inputs cimport LentStrings, SlowInputs, take_up
from neptrio.observe.trace cimport Trace
from neptrio.request.infer_request cimport (
    COMPUTE_END,
    COMPUTE_START,
    DT_BYTES,
    GPU_MEMORY,
    GRPC_PROTOCOL,
    HTTP_PROTOCOL,
    QUEUE_START,
    RECV_END,
    RECV_START,
    SEND_START,
    InferRequest,
    InferResponse,
    ModelCore,
    RequestedOutput,
    Responder,
    Tensor,
    now_ns,
)
from neptrio.rings.channel cimport Channel
from neptrio.rings.packet cimport MessageWriter, read_text, read_u32, read_u64
from neptrio.rings.ring cimport Entry

from collections import deque
import json
import logging

from neptrio.codec.outputs import select, selects_slowly
from neptrio.errors import Cancelled, Code, Internal, Reason, TritonError
from neptrio.foreign import type_name
from neptrio.execution.admission import GRPC_ONE_RESPONSE, HTTP_ONE_RESPONSE
from neptrio.rings.message import Violation
from neptrio.observe.propagation import asked
from neptrio.request.device_memory import on_host
from neptrio.request.back_pressure import let_send

log = logging.getLogger("neptrio.frontend")

cdef enum:
    ROOM_BYTES = 4194304     # of responses to one request that a client has not taken, before its model waits
    OF_RESPONSE = 1024       # counted for a response in addition to its outputs
    FEW_INPUTS = 16          # a list for so many is made at once
    OF_STRINGS = 4           # a byte of strings takes as long as so many of a region: their lengths are walked over

CODES = list(Code)  # type: list[Code]
REASONS = list(Reason)  # type: list[Reason]
cdef dict _CODE_NUMBERS = {code: number for number, code in enumerate(CODES)}
cdef dict _REASON_NUMBERS = {reason: number for number, reason in enumerate(REASONS)}
cdef object _dumps = json.dumps
cdef list _NOTHING = []


@cython.freelist(64)
cdef class Open:
    """See engine_side.pxd."""


cdef class FrontResponder(Responder):
    """Sends responses back through the end that the request came from."""

    def __init__(self, int protocol):
        self.protocol = protocol

    cpdef object respond(self, InferRequest request, InferResponse response, bint final):
        (<Open>request.context).end.respond(request, response, final)

    cpdef bint wait_for_room(self, InferRequest request, object callback) except -1:
        # type: (..., Callable[[], None]) -> bool
        cdef Open open_ = <Open>request.context
        if open_.unread <= ROOM_BYTES or open_.end.closed or request.cancelled:
            return False
        if open_.when_room is None:
            open_.when_room = []
        open_.when_room.append(callback)
        return True


class Stream:
    """A stream of a front end, as far as sequences need it (scheduling.base.SequenceStream)."""

    __slots__ = ("sequences",)

    def __init__(self):
        self.sequences = {}

    def end(self):
        """Ends the sequences that began on it, for models that ask for that."""
        while self.sequences:
            sequence, scheduler = self.sequences.popitem()
            scheduler.disconnected(sequence)


cdef class EngineSide(FrontChannel):
    """See the module's text. `host` has select_later(end, request, response, final), which calls selected(), and
    take_up_later(end, request), which has a worker call take_up() and then calls taken_up()."""

    def __init__(self, segment, layout, bell, late, services, host):
        # type: (Segment, Layout, Callable[[], None], Callable[[], None], ..., ...) -> None
        FrontChannel.__init__(self, segment, layout, True, bell, late)
        self.services = services
        self.admission = services.admission
        self.host = host
        self.open = {}
        self.streams = {}
        self.slow = SlowInputs()
        self.leaving = []
        self.begun = now_ns()
        self.loop_pass = services.loop.loop_pass
        self.clients_shapes = True
        self.http = FrontResponder(HTTP_PROTOCOL)
        self.grpc = FrontResponder(GRPC_PROTOCOL)

    def violated(self, why):
        # type: (str) -> None
        """Has the front end's process ended (rule 6 of cext/rings/channel); gone() follows."""
        if self.host is not None:
            self.host.violated(why)

    # ------------------------------------------------------------ in

    cdef int take(self, Entry* entry) except -1:
        cdef InferRequest request
        cdef Open open_
        if entry.kind == REQUEST:
            if not entry.size:
                raise Violation("a request without a message")
            self.received_request(entry.id)
        elif entry.kind == ROOM:
            request = self.open.get(entry.id)
            if request is not None:
                open_ = <Open>request.context
                open_.unread = max(0, open_.unread - <int64_t>min(entry.length, <uint64_t>1 << 62))
                if open_.when_room is not None and open_.unread <= ROOM_BYTES:
                    self.let_send(open_)
        elif entry.kind == CANCEL:
            request = self.open.get(entry.id)
            if request is not None:
                self.leaving.append(request)
                self.loop_pass.mark(self)
        elif entry.kind == STREAM_END:
            stream = self.streams.pop(entry.id, None)
            if stream is not None:
                stream.end()
        else:
            raise Violation(f"a descriptor of kind {entry.kind}")
        return 0

    def dispatch(self, now_ns):
        # type: (int) -> None
        """Cancels the requests of clients that have left (rule 5), behind the schedulers that were marked before."""
        cdef InferRequest request
        leaving, self.leaving = self.leaving, []
        for request in leaving:
            if self.open.get((<Open>request.context).key) is request:
                self.cancel(request)

    def cancel(self, InferRequest request not None):
        """The request's client is gone."""
        cdef Open open_ = <Open>request.context
        self.admission.cancel(request)
        self.let_send(open_)

    cdef int let_send(self, Open open_) except -1:
        """Calls whoever waits for room: each response that came meanwhile has a callback."""
        waiting, open_.when_room = open_.when_room, None
        if waiting is not None:
            let_send(waiting)
        return 0

    cdef int received_request(self, uint64_t id) except -1:
        cdef InferRequest request
        cdef Open open_
        cdef uint32_t flags = read_u32(&self.reader)
        cdef object key = id
        if key in self.open or len(self.open) >= MOST_OPEN:
            raise Violation(f"a request with the number {id}, which is taken, or one too many")
        open_ = Open.__new__(Open)
        open_.end = self
        open_.id = id
        open_.key = key
        error = None
        request = InferRequest.__new__(InferRequest)
        request.context = open_
        request.responder = self.grpc if flags & GRPC else self.http
        open_.flags = flags
        try:
            self.read_into(request, flags, open_)
            self.finish()
        except TritonError as found:
            error = found
        except Violation:
            raise
        except Exception as found:
            log.exception("a request of model '%s' failed", request.model_name)
            error = Internal(f"internal error: {type_name(found)}")
        left, self.slow.left = self.slow.left, None
        if error is not None:
            return self.refuse(open_, request, error)
        if left is None and not self.slow.lines:
            return self.admit(request, open_)
        open_.left = left
        if self.slow.waits(request):
            self.open[key] = request
        elif left is None:
            self.admit(request, open_)
        else:
            self.open[key] = request
            self.slow.started(request)
            self.host.take_up_later(self, request)
        return 0

    cdef int admit(self, InferRequest request, Open open_) except -1:
        """Admits a request that has been read, or refuses it."""
        error = None
        try:
            if open_.flags & GRPC:  # whose own port reads the message before it looks the model up, too
                self.admission.find(request, GRPC_ONE_RESPONSE if open_.flags & ONE_RESPONSE else None)
            if not self.admission.tracer.tracing:
                request.timestamps[<int>RECV_START] = request.timestamps[<int>RECV_END] = 0
            self.open[open_.key] = request
            self.admission.submit(request)
            return 0
        except TritonError as found:
            error = found
        except Exception as found:
            log.exception("a request of model '%s' failed", request.model_name)
            error = Internal(f"internal error: {type_name(found)}")
        return self.refuse(open_, request, error)

    def take_up(self, InferRequest request not None):
        """Takes up what received_request() has left of a request. Any thread may call it. Raises TritonError."""
        take_up(request, (<Open>request.context).left)

    def taken_up(self, InferRequest request not None, error):
        # type: (..., Exception | None) -> InferRequest | None
        """A worker has called take_up(), which failed with `error`, or there was nothing for it to do. Admits the request, or refuses
        it; returns the one whose turn it is then, None: no one has waited."""
        cdef Open open_ = <Open>request.context
        open_.left = None
        if self.closed:
            return None
        if error is None and request.cancelled:
            error = Cancelled()
        if error is None:
            self.admit(request, open_)
        else:
            self.refuse(open_, request, error)
        return self.slow.next(request)

    def is_slow(self, InferRequest request not None) -> bool:
        """Whether there is something to do for take_up()."""
        return (<Open>request.context).left is not None

    cdef int refuse(self, Open open_, InferRequest request, error) except -1:
        response = InferResponse(None, error.with_traceback(None))
        response.id = request.id
        response.model_name = response.model_version = ""
        return self.answer(open_, request, response, True)

    cdef int failed(self, const Entry* entry, error) except -1:
        """A request that came is answered, if it was not admitted: what executes answers it otherwise."""
        cdef InferRequest request
        cdef Open open_
        if entry.kind != REQUEST or entry.id in self.open or self.closed:
            return 0
        open_ = Open.__new__(Open)
        open_.end = self
        open_.id = entry.id
        open_.key = open_.id
        request = InferRequest.__new__(InferRequest)
        request.id = ""
        return self.refuse(open_, request, Internal(f"internal error: {type_name(error)}"))

    cdef int read_into(self, InferRequest request, uint32_t flags, Open open_) except -1:
        """Reads a request's message. Raises TritonError where it names what the engine does not have, Violation."""
        cdef uint32_t i, count
        cdef list inputs
        cdef int64_t began, ended, now
        cdef RequestedOutput output
        cdef uint64_t number
        request.model_name = self.name()
        request.model_version = self.name()
        request.id = read_text(&self.reader)
        began = <int64_t>read_u64(&self.reader)
        ended = <int64_t>read_u64(&self.reader)
        if began:
            now = now_ns()
            request.timestamps[<int>RECV_END] = min(max(ended, self.begun), now)
            request.timestamps[<int>RECV_START] = min(max(began, self.begun), request.timestamps[<int>RECV_END])
        request.timeout_us = read_u64(&self.reader)
        request.priority = read_u64(&self.reader)
        request.sequence_id = read_text(&self.reader) if flags & TEXT_ID else read_u64(&self.reader)
        request.sequence_start = flags & START
        request.sequence_end = flags & END
        request.want_empty_final = flags & EMPTY_FINAL
        if flags & (TIMES | NO_TIMES):
            request.timing = bool(flags & TIMES)
        if flags & PARAMETERS:
            request.parameters = self.parameters()
        if flags & CLIENT:
            client = read_text(&self.reader), read_u64(&self.reader)
            self.host.enter(client)
            open_.client = client
        if flags & OWNER:
            request.owner = self.host.owner(read_text(&self.reader))
        if flags & ASKED:
            request.asked = asked(
                [(name.encode("latin-1", "replace"), str(value).encode("latin-1", "replace"))
                 for name, value in (self.parameters() or {}).items()])
        if flags & STREAM:
            number = read_u64(&self.reader)
            stream = self.streams.get(number)
            if stream is None:
                stream = self.streams[number] = Stream()
            request.stream = stream
        if flags & OUTPUTS:
            count = read_u32(&self.reader)
            request.outputs = []
            for i in range(count):
                if self.reader.bad:
                    break
                output = RequestedOutput(self.name())
                output.class_count = <int64_t>read_u64(&self.reader)
                if read_u32(&self.reader):
                    output.shm_region = read_text(&self.reader)
                    output.shm_offset = <int64_t>read_u64(&self.reader)
                    output.shm_byte_size = <int64_t>read_u64(&self.reader)
                request.outputs.append(output)
        if not flags & GRPC and not self.reader.bad:
            self.admission.find(request, HTTP_ONE_RESPONSE if flags & ONE_RESPONSE else None)
        self.slow.begin()
        count = read_u32(&self.reader)
        inputs = [None] * count if count <= FEW_INPUTS else []  # as it says, which need not be so
        for i in range(count):
            if self.reader.bad:
                break
            if count <= FEW_INPUTS:
                inputs[i] = self.tensor()
            else:
                inputs.append(self.tensor())
        request.inputs = inputs
        if not self.private:
            open_.given = list(inputs)
        if request.outputs is not None and not self.reader.bad:
            for output in request.outputs:
                if output.shm_region is not None:
                    output.shm_place = self.services.shared_memory.output_region(output.shm_region)
        return 0

    cdef Tensor tensor_in(self, str name, int dtype, tuple shape):
        cdef str region = read_text(&self.reader)
        cdef uint64_t offset = read_u64(&self.reader)
        cdef uint64_t size = read_u64(&self.reader)
        cdef Tensor made
        self.finish()
        memory = self.services.shared_memory
        if not memory.system.has(region) or not self.slow.too_slow(size):  # the host sees no bytes of other regions
            return memory.input_tensor(name, dtype, shape, region, offset, size)
        made = Tensor.__new__(Tensor)
        self.slow.leave(made, memory.input_reader(name, dtype, shape, region, offset, size))
        return made

    cdef int place(self, Tensor tensor, const char* data, uint64_t nbytes) except -1:
        cdef LentStrings lent
        if tensor.dtype != DT_BYTES or self.private or not self.slow.too_slow(OF_STRINGS * nbytes):
            return Channel.place(self, tensor, data, nbytes)
        lent = LentStrings.__new__(LentStrings)
        lent.tensor, lent.owner, lent.data, lent.nbytes = tensor, self.owner, data, nbytes
        return self.slow.leave(tensor, lent)

    # ------------------------------------------------------------ out

    cdef int respond(self, InferRequest request, InferResponse response, bint final) except -1:
        cdef Open open_ = <Open>request.context
        request.timestamps[<int>SEND_START] = now_ns()
        if self.closed or self.given_up:
            self.open.pop(open_.id, None)
            if request.trace is not None:
                (<Trace>request.trace).abandon()
            return 0
        if open_.line is not None:
            open_.line.append((response, final))
            return 0
        if request.outputs is not None and response.error is None and not response.null and not open_.selected:
            if selects_slowly(request, response):
                open_.line = deque()
                if request.trace is not None:
                    (<Trace>request.trace).hold()
                self.host.select_later(self, request, response, final)
                return 0
            try:
                select(request, response, self.services)
            except TritonError as error:
                response.outputs = None
                response.error = error.with_traceback(None)
        return self.answer(open_, request, response, final)

    def selected(self, InferRequest request not None, InferResponse response not None, bint final, error):
        # type: (..., ..., ..., Exception | None) -> None
        """A worker has done what select() does, or failed with `error`. Sends this response and those behind it."""
        cdef Open open_ = <Open>request.context
        if error is not None:
            response.outputs = None
            response.error = error.with_traceback(None)
        line, open_.line = open_.line, None
        if not self.closed:
            open_.selected = True
            hand_over(request.responder, request, response, final)
            open_.selected = False
        for response, final in line:
            hand_over(request.responder, request, response, final)
        if request.trace is not None:
            (<Trace>request.trace).release()

    cdef bint passes(self, Open open_, Tensor tensor) except -1:
        """Whether an output is an input that the front end has received and named, or a part of one. What a scheduler has put
        beside those, as a state that was an earlier input, the front end may have forgotten."""
        cdef Tensor given
        if open_.given is None or tensor.dtype == DT_BYTES or tensor.ptr >= self.segment.base + self.received_end:
            return False
        for given in open_.given:
            if given.ptr <= tensor.ptr and tensor.nbytes <= given.nbytes - (tensor.ptr - given.ptr):
                return True
        return False

    cdef int answer(self, Open open_, InferRequest request, InferResponse response, bint final) except -1:
        cdef MessageWriter writer = self.writer
        cdef Tensor tensor
        cdef uint32_t flags = FINAL if final else 0
        cdef Py_ssize_t size = OF_RESPONSE
        cdef tuple headers = ()
        cdef list outputs = response.outputs if response.outputs is not None else _NOTHING
        cdef const char* received = self.segment.base + self.received_first
        error = response.error
        if error is None:
            for tensor in outputs:
                size += tensor.nbytes
                if tensor.memory_kind == GPU_MEMORY:
                    outputs = response.outputs = [on_host(each) for each in outputs]
                    break
        if request.trace is not None:
            headers = (<Trace>request.trace).headers
            if headers:
                flags |= HEADERS
        if type(request.timing) is dict:
            flags |= TOLD
        if self.tells_stages and request.timestamps[<int>COMPUTE_START]:
            flags |= STAGES
        if response.null:
            flags |= NULL_RESPONSE
        if error is not None:
            flags |= ERROR
        writer.reset()
        writer.u32(flags)
        writer.text(response.model_name if response.model_name is not None else "")
        writer.text(response.model_version if response.model_version is not None else "")
        writer.text(response.id if response.id is not None else "")
        if response.parameters:
            writer.text(_dumps(response.parameters))
        else:
            writer.u32(0)
        if flags & HEADERS:
            writer.text(_dumps([(a.decode("latin-1"), b.decode("latin-1")) for a, b in headers]))
        if flags & TOLD:
            writer.text(_dumps(request.timing))
        if flags & STAGES:
            writer.u64(<uint64_t>request.timestamps[<int>QUEUE_START])
            writer.u64(<uint64_t>request.timestamps[<int>COMPUTE_START])
            writer.u64(<uint64_t>request.timestamps[<int>COMPUTE_END])
        if error is not None:
            writer.text(str(error))
            writer.u32(_CODE_NUMBERS[error.code])
            writer.u32(_REASON_NUMBERS.get(error.reason, 0))
            writer.text(
                _dumps([(a.decode("latin-1"), b.decode("latin-1")) for a, b in error.headers])
                if error.headers else "")
        else:
            writer.u32(<uint32_t>len(outputs))
            for tensor in outputs:
                if tensor.ptr >= received and self.passes(open_, tensor):
                    self.pack_place(tensor, PASSED)
                else:
                    self.pack_tensor(tensor)
        if final:
            self.open.pop(open_.key, None)
            open_.given = None
            if open_.client is not None:
                self.host.leave(open_.client)
                open_.client = None
        else:
            open_.unread += size
        try:
            self.send(RESPONSE, open_.id, outputs)
        except TritonError as refused:
            if response.error is None:
                made = InferResponse(None, refused)
                made.model_name, made.model_version, made.id = (
                    response.model_name, response.model_version, response.id)
                self.answer(open_, request, made, final)
            return 0
        return 0

    # ------------------------------------------------------------ the end

    def gone(self):
        """The front end has ended: cancels its requests and ends its streams' sequences."""
        self.close()
        for request in list(self.open.values()):
            if request.trace is not None:
                (<Trace>request.trace).abandon()
            try:
                self.cancel(request)
            except Exception:
                log.exception("a request of a front end that has ended could not be cancelled")
        self.open = {}
        self.slow = SlowInputs()
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            try:
                stream.end()
            except Exception:
                log.exception("a sequence of a front end that has ended could not be ended")
        self.host = None

    @property
    def under_way(self) -> int:
        """Requests that are not answered."""
        return len(self.open)
