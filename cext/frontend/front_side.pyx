"""The front end's end: sends requests to the engine, and gives its responses to the transport that waits for them.

Transports do here what they do in the engine: find(), received(), submit(), cancel(). Only that the engine decides.

Rules:
 1. find() never refuses: the engine looks the model up when the request comes there, and answers with what is wrong. What
    a transport needs to know of a model beforehand (is it decoupled, what are its inputs) is a copy, which the
    engine renews before it says that anything has changed (frontend.engine).
 2. A request is in `open` until its final response has come. It is answered exactly once, also when the way to the engine
    is closed: then this process ends.
 3. Large bodies of numbers are received into memory that the engine maps, and named to it where they lie. Strings are not
    received there, and what lies badly is copied into its message (lies_well()). Without room they are received elsewhere.
 4. Only what follows from bytes is done here: an input in a region of shared memory, the choice of outputs,
    classification and every check that needs the model are the engine's.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from neptrio.execution.admission cimport Admission
from neptrio.frontend.channel cimport FrontChannel
from neptrio.frontend.kinds cimport *
from neptrio.observe.trace cimport Trace
from neptrio.observe.trace_sampler cimport Sampler
from neptrio.request.infer_request cimport (
    COMPUTE_END,
    COMPUTE_START,
    DONE,
    DT_BYTES,
    GRPC_PROTOCOL,
    QUEUE_START,
    RECV_END,
    RECV_START,
    InferRequest,
    InferResponse,
    InputSpec,
    ModelCore,
    RequestedOutput,
    Tensor,
    now_ns,
)
from neptrio.rings.body_area cimport BodyArea
from neptrio.rings.channel cimport ALIGNED
from neptrio.rings.message cimport pack_head
from neptrio.rings.packet cimport MessageWriter, read_text, read_u32, read_u64
from neptrio.rings.ring cimport Entry

from functools import partial
import json
import logging

from neptrio.errors import CLASSES, Cancelled, Code, Internal, Overloaded, Reason, TritonError
from neptrio.foreign import type_name
from neptrio.rings.message import Violation
from neptrio.request.file_part import LargeFiles

log = logging.getLogger("neptrio.frontend")

cdef enum:
    OF_RESPONSE = 1024       # counted for a response in addition to its outputs, as in the engine

cdef list _CODES = list(Code)
cdef list _REASONS = list(Reason)
cdef object _dumps = json.dumps
cdef object _loads = json.loads


class RegionTensor(Tensor):
    """An input that lies in a region of shared memory, whose bytes only the engine can see."""

    def __init__(self, name, dtype, shape, region, offset, size):
        # type: (str, int, tuple[int, ...], str, int, int) -> None
        super().__init__(name, dtype, shape, b"")
        self.place = (region, offset, size)  # type: tuple[str, int, int]


class RemoteSharedMemory:
    """Registered regions as decoders see them here (codec.shared_memory.SharedMemory): by name only."""

    def __init__(self):
        self.large = LargeFiles()   # none: what lies in regions is not read here  # type: LargeFiles

    def input_tensor(self, str name, int dtype, tuple shape, str region, offset, size):
        # type: (..., ..., tuple[int, ...], ..., int, int) -> Tensor
        """An input that lies in a region; the engine says whether there is one."""
        return RegionTensor(name, dtype, shape, region, offset, size)

    def input_reader(self, *arguments):
        """input_tensor() in two parts."""
        return partial(self.input_tensor, *arguments)

    def output_region(self, str region):
        # type: (...) -> None
        """The engine says whether there is one, too."""

    def write_output(self, Tensor tensor, region, offset, size):
        # type: (..., object, int, int) -> Tensor
        """The engine has put the output there already."""
        return tensor

    def output_writer(self, Tensor tensor, region, offset, size):
        # type: (..., object, int, int) -> Callable[[], None]
        """As write_output()."""
        return _written

    def output_place(self, region, offset, size, needed, output):
        # type: (object, int, int, int, str) -> None
        """None: nothing is executed here."""


def _written():
    """Nothing is left to do."""


class _Scheduler:
    """In place of a model's scheduler."""

    def expect_room(self):
        """The engine decides."""


class _Streams:
    """In place of the scheduler of a sequence: tells the engine when a stream has ended."""

    def __init__(self, end):
        self._end = end

    def disconnected(self, number):
        self._end.stream_ended(number)


cdef class Sent:
    """See front_side.pxd."""


cdef class FrontSide(FrontChannel):
    """See the module's text."""

    def __init__(self, segment, layout, bell, late):
        # type: (Segment, Layout, Callable[[], None], Callable[[], None]) -> None
        FrontChannel.__init__(self, segment, layout, False, bell, late)
        self.received_into = BodyArea(segment, layout.bodies, layout.area)
        self.open = {}
        self.failed_ones = set()
        self._streams = _Streams(self)

    cdef int send_request(self, InferRequest request) except -1:
        """Raises TritonError for what the way to the engine has no room for; nothing was sent then."""
        cdef MessageWriter writer = self.writer
        cdef Sent sent = <Sent>request.scheduler_data
        cdef RequestedOutput output
        cdef Tensor tensor
        cdef uint32_t flags = 0
        cdef uint64_t number = 0
        cdef object stream = request.stream, found
        if len(self.open) >= MOST_OPEN:
            raise Overloaded(f"{<int>MOST_OPEN} requests of this front end are not answered yet")
        if request.responder.protocol == GRPC_PROTOCOL:
            flags |= GRPC
        if sent.one_response:
            flags |= ONE_RESPONSE
        if request.sequence_start:
            flags |= START
        if request.sequence_end:
            flags |= END
        if type(request.sequence_id) is str:
            flags |= TEXT_ID
        if request.parameters:
            flags |= PARAMETERS
        if request.outputs is not None:
            flags |= OUTPUTS
        if self.tells_clients:
            flags |= CLIENT
        if request.owner is not None:
            flags |= OWNER
        if request.asked is not None:
            flags |= ASKED
        if request.want_empty_final:
            flags |= EMPTY_FINAL
        if request.timing is not None:
            flags |= TIMES if request.timing else NO_TIMES
        if stream is not None and (flags & START or stream.sequences):
            flags |= STREAM
            for number in stream.sequences:
                break
            else:
                self.number += 1
                number = self.number
                stream.sequences[number] = self._streams
        writer.reset()
        self.bodies = None
        writer.u32(flags)
        writer.text(request.model_name)
        writer.text(request.model_version)
        writer.text(request.id)
        writer.u64(<uint64_t>request.timestamps[<int>RECV_START])
        writer.u64(<uint64_t>request.timestamps[<int>RECV_END])
        writer.u64(request.timeout_us)
        writer.u64(request.priority)
        if flags & TEXT_ID:
            writer.text(request.sequence_id)
        else:
            writer.u64(request.sequence_id)
        if flags & PARAMETERS:
            writer.text(_dumps(request.parameters))
        if flags & CLIENT:
            writer.text((request.responder if request.context is None else request.context).client)
            writer.u64(0 if stream is None else <uint64_t>id(stream))
        if flags & OWNER:
            writer.text(request.owner.name)
        if flags & ASKED:
            writer.text(_dumps(request.asked.as_sent()))
        if flags & STREAM:
            writer.u64(number)
        if flags & OUTPUTS:
            writer.u32(<uint32_t>len(request.outputs))
            for output in request.outputs:
                writer.text(output.name)
                writer.u64(<uint64_t>output.class_count)
                writer.u32(output.shm_region is not None)
                if output.shm_region is not None:
                    writer.text(output.shm_region)
                    writer.u64(<uint64_t>output.shm_offset)
                    writer.u64(<uint64_t>output.shm_byte_size)
        writer.u32(<uint32_t>len(request.inputs or ()))
        for tensor in request.inputs or ():
            if type(tensor) is not Tensor:
                self.pack_region(tensor)
            elif self.lies_well(tensor):
                self.pack_received(tensor)
            else:
                self.pack_tensor(tensor)
        sent.bodies = self.bodies
        self.number += 1
        sent.id = self.number
        self.open[sent.id] = request
        try:
            self.send(REQUEST, sent.id, request.inputs or [])
        except BaseException:
            del self.open[sent.id]
            raise
        return 0

    cdef bint lies_well(self, Tensor tensor) noexcept:
        """Whether it lies in the memory for bodies, as the engine reads it there."""
        return (self.received_into.slab.used and self.received_into.holds(tensor.ptr, <uint64_t>tensor.nbytes)
                and tensor.nbytes and tensor.dtype != DT_BYTES and (tensor.ptr - self.segment.base) % ALIGNED == 0)

    def body_memory(self, uint64_t size):
        # type: (...) -> BodyMemory | None
        """Writable memory into which a body can be received; None when there is no room for it."""
        return None if self.closed else self.received_into.take(size)

    def pack_region(self, Tensor tensor not None):
        """Packs an input that lies in a region."""
        cdef MessageWriter writer = self.writer
        region, offset, size = tensor.place
        pack_head(writer, tensor)
        writer.u32(REGION)
        writer.text(region)
        writer.u64(offset)
        writer.u64(size)

    def stream_ended(self, uint64_t number):
        """A stream on which sequences may have begun has ended."""
        self.post(self.out, STREAM_END, number, 0)

    def cancelled(self, InferRequest request not None):
        """A request's client is gone."""
        cdef Sent sent = <Sent>request.scheduler_data
        if sent is not None and sent.id in self.open:
            self.post(self.out, CANCEL, sent.id, 0)

    cdef int take(self, Entry* entry) except -1:
        cdef InferRequest request
        cdef InferResponse response
        cdef uint32_t flags
        cdef uint64_t id = entry.id
        cdef int64_t size = OF_RESPONSE
        cdef Tensor tensor
        cdef Trace trace
        if entry.kind != RESPONSE or not entry.size:
            raise Violation(f"a descriptor of kind {entry.kind}")
        request = self.open.get(id)
        flags = read_u32(&self.reader)
        if request is None:
            if id not in self.failed_ones:
                raise Violation(f"a response to request {id}, which is not open")
            if flags & FINAL:
                self.failed_ones.discard(id)
            return 0
        self.answering, self.is_last = request, flags & FINAL
        response = InferResponse.__new__(InferResponse)
        response.model_name = self.name()
        response.model_version = self.name()
        response.id = read_text(&self.reader)
        response.parameters = self.parameters()
        if flags & HEADERS:  # the trace is the engine's: of this one transports read the headers
            trace = Trace.__new__(Trace)
            trace.headers = self.pairs()
            request.trace = trace
        request.timing = self.parameters() if flags & TOLD else None
        if flags & STAGES:
            request.timestamps[<int>QUEUE_START] = <int64_t>read_u64(&self.reader)
            request.timestamps[<int>COMPUTE_START] = <int64_t>read_u64(&self.reader)
            request.timestamps[<int>COMPUTE_END] = <int64_t>read_u64(&self.reader)
        response.null = flags & NULL_RESPONSE
        if flags & ERROR:
            response.error = self.error()
        elif not response.null:
            self.named = (<Sent>request.scheduler_data).bodies
            response.outputs = [self.tensor() for _ in range(read_u32(&self.reader))]
            self.named = None
            for tensor in response.outputs:
                size += tensor.nbytes
        self.finish()
        self.owner = None
        if flags & FINAL:
            del self.open[id]
            self.answered += 1
            request.state = DONE
        try:
            request.responder.respond(request, response, flags & FINAL)
            if not flags & FINAL and not request.responder.wait_for_room(request, lambda: self.room(id, size)):
                self.room(id, size)
        except Violation:
            raise
        except Exception as error:  # a ValueError here is no message's that cannot be
            log.exception("a response could not be handed to its client's connection")
            self.failed(entry, error)
        self.answering = None
        return 0

    cdef int failed(self, const Entry* entry, error) except -1:
        """The client of the request gets the error, and no more of its responses."""
        cdef InferRequest request = self.answering
        self.answering = None
        if request is None:
            return 0
        self.named = None
        if self.open.pop(entry.id, None) is not None:
            self.answered += 1
            if not self.is_last:
                self.failed_ones.add(entry.id)
                self.post(self.out, CANCEL, entry.id, 0)
        request.state = DONE
        try:
            request.responder.respond(request, InferResponse(None, Internal(f"internal error: {type_name(error)}")), True)
        except Exception:
            log.exception("a client could not be told that its response was lost")
        return 0

    cdef object owner_of_passed(self, const char* data, uint64_t nbytes):
        cdef Tensor given
        for given in self.named or ():
            if given.ptr <= data and nbytes <= <uint64_t>given.nbytes and (
                    <uint64_t>(data - given.ptr) <= <uint64_t>given.nbytes - nbytes):
                return given
        raise Violation("an output that is said to be an input, and is none")

    def room(self, uint64_t id, uint64_t size):
        """The client of a request has room for so many bytes more."""
        if id in self.open:
            self.post(self.out, ROOM, id, size)

    cdef tuple pairs(self):
        text = read_text(&self.reader)
        if not text:
            return ()
        return tuple([(name.encode("latin-1"), value.encode("latin-1")) for name, value in _loads(text)])

    cdef object error(self):
        text = read_text(&self.reader)
        code = _CODES[read_u32(&self.reader)]
        reason = _REASONS[read_u32(&self.reader)]
        headers = self.pairs()
        made = CLASSES.get(code, TritonError)(text)
        made.code = code
        made.reason = reason
        made.headers = headers
        return made

    def statistics(self) -> dict:
        # type: () -> dict[str, int]
        """What is held, in addition the bytes of bodies that somebody uses."""
        return {**FrontChannel.statistics(self), "bodies": self.received_into.used}

    @property
    def under_way(self) -> int:
        """Requests that are not answered."""
        return len(self.open)


cdef class RemoteAdmission(Admission):
    """In place of execution.admission in a front end (rule 1)."""

    def __init__(self, FrontSide end not None):
        self.end = end
        self.tracer = Sampler.__new__(Sampler)
        self.models = {}
        self.versions = {}
        self.latest = {}
        self.unknown = ModelCore("", "")
        self.unknown.scheduler = _Scheduler()
        self.unknown.ready = True
        self.forwards = True

    def renew(self, dict models, bint whole, bint tracing, bint trace_headers):
        # type: (dict[str, list[dict[str, Any]]], ..., ..., ...) -> None
        """What the engine says of models that serve (frontend.model_table): model -> its versions, dicts with version, labels,
        latest, decoupled, max_batch_size and inputs (name, datatype, dims, optional, ragged). `whole`: there are no others."""
        cdef ModelCore core
        if whole:
            self.models = {}
            self.versions = {}
        for model, versions in models.items():
            for version in self.versions.pop(model, ()):
                del self.models[model, version]
            known = []
            for told in versions:
                core = ModelCore(model, told["version"])
                core.decoupled = told["decoupled"]
                core.max_batch_size = told["max_batch_size"]
                core.set_inputs([InputSpec(name, dtype, tuple(dims), optional, ragged)
                                 for name, dtype, dims, optional, ragged in told["inputs"]])
                core.scheduler = self.unknown.scheduler
                core.ready = True
                for version in (core.version, *told["labels"], *([""] if told["latest"] else ())):
                    self.models[model, version] = core
                    known.append(version)
            if known:
                self.versions[model] = known
        self.tracer.tracing = self.tracer.unread = tracing
        self.tracer.trace_headers = trace_headers

    def reads(self, str name, str version):
        # type: (..., ...) -> bool
        """Not of a model that there is not, and of none that is decoupled: its error comes before those of the body, so
        the engine reads the request."""
        cdef ModelCore model = self.models.get((name, version))
        return model is not None and not model.decoupled

    def body_source(self, str name, str version):
        # type: (..., ...) -> Callable[[int], BodyMemory | None] | None
        """As in the engine. Without strings: no one but this process may write what it reads the structure of."""
        cdef InputSpec spec
        cdef ModelCore model = self.models.get((name, version))
        if model is None:
            return None
        for spec in model.input_specs:
            if spec.dtype == DT_BYTES:
                return None
        return self.end.body_memory

    cpdef ModelCore lookup(self, str name, str version):
        return self.models.get((name, version), self.unknown)

    cpdef ModelCore find(self, InferRequest request, str one_response):
        # type: (..., str | None) -> ModelCore
        cdef Sent sent = Sent.__new__(Sent)
        cdef ModelCore model = self.models.get((request.model_name, request.model_version))
        sent.one_response = one_response is not None
        request.scheduler_data = sent
        request.model = model = self.unknown if model is None else model
        return model

    cpdef submit(self, InferRequest request):
        cdef RequestedOutput output
        if self.end.closed:
            raise Cancelled("the server is ending")
        self.end.send_request(request)
        if request.outputs is not None:
            for output in request.outputs:
                output.class_count = 0   # the engine classifies
        return None

    def cancel(self, InferRequest request not None):
        if not request.cancelled:
            request.cancelled = True
            request.cancelled_ns = now_ns()
            self.end.cancelled(request)

    def inflight(self) -> int:
        return len(self.end.open)
