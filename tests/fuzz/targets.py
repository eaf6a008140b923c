"""What the fuzzers call: one function per reader of what a stranger may send.

Each takes any bytes. It raises AssertionError, or anything else that its reader must not raise, where the
reader did wrong; reading outside of a block is the sanitizer's to notice, so what is read is put into a
block of exactly its size. Where there is a second opinion (another parser, the other way
through our own code) both are asked.
"""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from neptrio.backends.kernel.expressions import LIMIT, Scope, Values, parse
from neptrio.codec import generate
from neptrio.codec.json_reader import load
from neptrio.codec.json_request import decode_request as decode_json
from neptrio.codec.proto_request import decode_request as decode_protobuf
from neptrio.codec.protobuf import well_formed
from neptrio.datatypes import NUMBER
from neptrio.errors import InvalidArgument, NotFound, TritonError
from neptrio.execution.admission import Admission
from neptrio.execution.batch import complete
from neptrio.flags import compile_pattern
from neptrio.loop.loop_pass_core import LoopPassCore
from neptrio.observe.counters import ModelCounters
from neptrio.observe.trace_sampler import Sampler
from neptrio.request.file_part import LargeFiles
from neptrio.request.infer_request import InferRequest, InferResponse, InputSpec, ModelCore
from neptrio.request.validate import validate
from neptrio.service.held_bytes import HeldBytes
from neptrio.service.request_limits import RequestLimits
from neptrio.transport.header_policy import HeaderForward
from neptrio.transport.http1.connection import Http1Connection
from neptrio.transport.rest.port import Port
from neptrio.transport.wire import Wire
from tests.fuzz.printing import printing

try:
    import rapidjson
except ImportError:  # it comes with tritonclient[http]
    rapidjson = None

BODY = 1 << 20
JSON_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)


def exact(data: bytes) -> memoryview:
    """The bytes in a block that ends where they end, as a request's body does in a server."""
    block = np.empty(len(data), np.uint8)
    block[:] = np.frombuffer(data, np.uint8)
    return block.data


class Scheduler:
    """Keeps what comes; answer() gives every request its own inputs back."""

    def __init__(self) -> None:
        self.waiting: list[InferRequest] = []
        self.seen: list[Any] = []

    def expect_room(self) -> None:
        pass

    def enqueue(self, request: InferRequest) -> None:
        inputs = [(tensor.name, tensor.dtype, tensor.shape, bytes(tensor)) for tensor in request.inputs]
        self.seen.append((request.id, request.parameters, inputs))
        self.waiting.append(request)

    def cancel(self, request: InferRequest) -> None:
        pass

    def answer(self) -> None:
        waiting, self.waiting = self.waiting, []
        for request in waiting:
            complete(request, InferResponse(list(request.inputs)), True)


class Directory:
    """Two models: `identity` of INT32 and `text` of BYTES, both of any length."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.latest: dict[str, ModelCore] = {}
        for name, datatype in (("identity", "INT32"), ("text", "BYTES")):
            model = ModelCore(name, "1")
            model.max_batch_size = 8
            model.set_inputs([InputSpec("INPUT0", NUMBER[datatype], (-1,))])
            model.output_names = {"INPUT0"}
            model.counters = ModelCounters()
            model.scheduler = self.scheduler
            model.ready = True
            self.latest[name] = model

    def lookup(self, name: str, version: str) -> ModelCore:
        if name not in self.latest or version not in ("", "1"):
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        return self.latest[name]

    def ready_models(self) -> list[ModelCore]:
        return list(self.latest.values())


def look_at(request: InferRequest, model: ModelCore) -> None:
    """Reads all that was decoded, and validates it as admission would."""
    for tensor in request.inputs:
        bytes(tensor)
    try:
        validate(request, model)
    except TritonError:
        pass


# ---------------------------------------------------------------- HTTP/1.1


class LoopPass(LoopPassCore):
    """A pass that ends when it is told to."""

    def soon(self) -> None:
        pass


class Tasks:
    """A nursery that starts nothing and remembers what it was asked for."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def start_soon(self, *_: Any, name: Any) -> None:
        self.started.append(name.__name__)


class NoRegions:
    """The shared memory service where nobody has registered a region."""

    large = LargeFiles()

    def input_tensor(self, name: str, dtype: int, shape: tuple[int, ...], region: str, *_place: int) -> Any:
        raise NotFound(f"Unable to find shared memory region: '{region}'")

    def output_region(self, region: str) -> Any:
        raise NotFound(f"Unable to find shared memory region: '{region}'")


NO_LIMITS = RequestLimits(0, 0)
HELD = HeldBytes()


def exchange(pieces: list[bytes], fast_path: bool) -> tuple[Any, ...]:
    """What a connection answers, what it starts, whether it closes, and what its model was given."""
    directory = Directory()
    loop_pass = LoopPass()
    tasks = Tasks()
    services = SimpleNamespace(
        loop=SimpleNamespace(loop_pass=loop_pass, poller=None),
        admission=Admission(directory, Sampler()),
        settings=SimpleNamespace(http_max_input_size=BODY),
        shared_memory=NoRegions(),
        request_limits=NO_LIMITS,
        held=HELD,
        audit=None,
        access=None,
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setblocking(False)
        wire = Wire(ours, tasks, services.loop)  # type: ignore[arg-type]
        connection = Http1Connection(wire, Port(services, None))  # type: ignore[arg-type]
        connection.fast_path = fast_path
        for piece in pieces:
            try:
                theirs.send(piece)
            except BlockingIOError:
                break  # it reads no more, and what waits fills the socket
            more = True
            while more and not connection.closing and not connection.ended:
                more = connection.take()
                loop_pass.end()
                directory.scheduler.answer()
                loop_pass.end()
                if connection.later is not None and connection.has_room():
                    data, connection.later = connection.later, None
                    connection.pass_on(data)
                else:
                    break
        loop_pass.end()
        directory.scheduler.answer()
        loop_pass.end()
        try:
            answer = theirs.recv(1 << 16)
        except BlockingIOError:
            answer = b""
        closing = connection.closing
        connection.end_of_input()
        connection._parser = None  # which refers to the connection
        return answer, tasks.started, closing, directory.scheduler.seen


def http1(data: bytes) -> None:
    """The fast path and the parser come to the same, wherever the bytes are cut."""
    size = data[0] if data else 0
    body = data[1:]
    pieces = [body[at : at + size] for at in range(0, len(body), size)] if size else [body]
    pieces = [piece for piece in pieces if piece]
    fast, parsed = exchange(pieces, True), exchange(pieces, False)
    assert fast == parsed, (fast, parsed)


# ---------------------------------------------------------------- bodies


def json_request(data: bytes) -> None:
    """An infer request: 1 byte says how much of the rest is JSON (255: no such header)."""
    size, body = (data[0], data[1:]) if data else (255, b"")
    for model in Directory().ready_models():
        request = InferRequest()
        request.model_name, request.model = model.name, model
        try:
            decode_json(request, exact(body), None if size == 255 else len(body) * size // 254)
        except TritonError:
            continue
        look_at(request, model)


def json_document(data: bytes) -> None:
    """Any document: rapidjson takes and refuses the same, for the same reason at the same place."""
    ours: Any = None
    error = ""
    try:
        ours = load(exact(data))
    except InvalidArgument as refused:
        # rapidjson does not say behind what, or in what, it stood
        error = str(refused).partition(": ")[2].partition(" (")[0]
    if error.startswith("Nesting"):  # rapidjson knows no such limit
        return
    if rapidjson is None or b"\0" in data or data.startswith(b"\xef\xbb\xbf") or b"\\u" in data:
        return
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError:
        return
    if error.startswith("Number too big"):  # rapidjson takes 11e308, but not 1e309
        number = JSON_NUMBER.match(text, int(error.rpartition(" ")[2]))
        assert number is not None, error
        assert math.isinf(float(number[0])) or set(number[0].lower().partition("e")[0]) <= set("-.0"), error
        return
    try:
        theirs = rapidjson.loads(text)
    except rapidjson.JSONDecodeError as refused:
        at, _, reason = str(refused).removeprefix("Parse error at offset ").partition(": ")
        assert error == f"{reason} at {at}", (error, str(refused))
        return
    except RecursionError:
        return
    assert not error, error
    if text.count('"') <= 2 and "N" not in text:  # of equal keys ours takes the first; NaN != NaN
        assert ours == theirs, (ours, theirs)


def generate_request(data: bytes) -> None:
    """A body of generate: the loop and a worker make the same of it."""
    for model in Directory().ready_models():
        made: list[Any] = []
        for large in (False, True):
            request = InferRequest()
            request.model_name, request.model = model.name, model
            try:
                generate.decode(request, exact(data), large, (lambda size: None) if large else None)
            except TritonError as error:
                made.append(str(error))
                continue
            look_at(request, model)
            inputs = [(tensor.name, tensor.shape, bytes(tensor)) for tensor in request.inputs]
            made.append((request.id, repr(request.parameters), inputs))  # as text: NaN is not equal to itself
        assert made[0] == made[1], made


def protobuf_request(data: bytes) -> None:
    """A ModelInferRequest: what is decoded is what protobuf reads, what protobuf refuses is refused."""
    body = exact(data)
    request = InferRequest()
    refused: TritonError | None = None
    try:
        decode_protobuf(request, body)
    except TritonError as error:
        refused = error
    else:
        look_at(request, Directory().latest["identity"])
    try:
        well_formed(body)
    except TritonError as error:
        assert str(error).startswith("malformed message"), error
    try:
        theirs = service_pb2.ModelInferRequest.FromString(data)
    except DecodeError:
        assert refused is not None, "protobuf refuses it"
        return
    if refused is None:
        ours = (request.model_name, request.model_version, request.id)
        assert ours == (theirs.model_name, theirs.model_version, theirs.id)
    else:
        text = str(refused)
        assert not text.startswith("malformed message") or "wire type" in text, text


# ---------------------------------------------------------------- HTTP/2


def http2(data: bytes) -> None:
    """Any frames behind a preface, cut anywhere: one end per stream, and nothing held at the end."""
    from neptrio.codec.split_message import SplitMessage
    from neptrio.transport.grpc.message_stream import GrpcStream
    from neptrio.transport.http2.limits import FloodBudget, PingPolicy
    from neptrio.transport.http2.nghttp2_session import Session
    from tests.support.raw_http2 import PREFACE, frame, message

    def memory(size: int) -> bytearray | None:
        return bytearray(size) if size < 1 << 16 else None

    class Echo(GrpcStream):
        """Answers each message with itself."""

        def __init__(self, session: Any, stream_id: int, path: bytes, headers: Any) -> None:
            super().__init__(session, stream_id, headers)
            self.ends = 0
            if stream_id % 4 == 1:  # large messages are split
                self.source_of = lambda model, version: memory
            headers(), headers.get(b"grpc-timeout"), headers.problem, headers.has_timeout, headers.has_custom

        def on_message(self, body: bytes, compressed: bool) -> None:
            self.send_segments([message(body.head if isinstance(body, SplitMessage) else body)])

        def on_refused(self) -> None:
            pass

        def on_half_close(self) -> None:
            self.finish([(b"grpc-status", b"0")])

        def on_reset(self, code: int) -> None:
            self.ends += 1

    streams: list[Echo] = []

    def opened(*given: Any) -> Echo:
        streams.append(Echo(*given))
        return streams[-1]

    size = data[0] if data else 0
    whole = PREFACE + frame(4, 0, 0) + data[1:]
    session = Session(opened, FloodBudget(PingPolicy(0, 0)))
    now = 10**9
    for at in range(0, len(whole), size or len(whole)):
        session.receive(exact(whole[at : at + (size or len(whole))]), now)
        now += 1000
        while session.wants_output:
            for part in session.data_to_send():
                bytes(memoryview(part))
    session.connection_lost()
    assert session.dead and not session.streams
    assert session.account.out_bytes == session.account.in_bytes == 0
    assert all(stream.ended and stream.ends <= 1 for stream in streams)


# ---------------------------------------------------------------- what operators and models write

SCOPE = Scope({"X": 3, "Y": 1}, {"X": 4, "Y": 2}, {"eps": "1e-5", "width": "0x10", "word": "abc"})
SHAPES = (
    Values(5, {"X": (5, 7, 9), "Y": (5,)}, {"X": 4, "Y": 2}),
    Values(0, {"X": (), "Y": ()}, {"X": 4, "Y": 2}),
)


def expressions(data: bytes) -> None:
    """A kernel's expression: a number of 64 bits, or InvalidArgument."""
    try:
        parsed = parse(data.decode("utf-8", "replace"), SCOPE, "here")
    except InvalidArgument:
        return
    for values in SHAPES:
        try:
            value = parsed.evaluate(values)
        except InvalidArgument:
            continue
        assert isinstance(value, float) or -LIMIT <= value < LIMIT, value


def patterns(data: bytes) -> None:
    """A pattern on the first line, headers on the others: parameters, or InvalidArgument."""
    pattern, *lines = data.split(b"\n")
    try:
        text = pattern.decode()
        compile_pattern(text)
    except ValueError:  # it is no text, or no expression
        return
    headers = [(name, value) for name, _, value in (line.partition(b":") for line in lines)]
    forward = HeaderForward(text)
    for read in (forward.headers, forward.metadata):
        try:
            for name, value in read(headers).items():
                assert isinstance(name, str) and isinstance(value, str)
        except InvalidArgument:
            pass


def rings(data: bytes) -> None:
    """What a model's process answers with: 1 byte its kind, 1 the size of its own part, then the message."""
    import struct

    from tests.support.rings import Pair
    from triton_python_backend_utils._process.kinds import KEEP_ABOVE

    if len(data) < 2:
        return
    body = data[2:]
    pair = Pair(1 << 16)
    batch = pair.begin(pair.request(IN=np.zeros(3, np.float32)))
    try:
        size = min(len(body), data[1] * 8)
        pair.shared.write(pair.layout.outputs, body[: 1 << 16])
        kind = 16 + data[0] % 9  # RETURN is the last
        more = KEEP_ABOVE if data[0] & 64 else 0  # so it is lent
        number = 1 if kind == 16 else 1 << 20
        entry = struct.pack("<IIQQQ", kind, size, number, pair.layout.outputs, len(body) + more)
        pair.shared.write(pair.layout.done + 256, entry)
        pair.shared.write(pair.layout.done, struct.pack("<Q", 1))
        pair.server.drain()
        for _, response, _ in pair.answers.got:
            for tensor in response.outputs or ():
                bytes(tensor)
        left, _ = pair.server.end()
        assert len(pair.violations) <= 1
        assert pair.finished_batches + left == [batch]
    finally:
        pair.close()


TARGETS: dict[str, Callable[[bytes], None]] = {
    "http1": http1,
    "json_request": json_request,
    "json_document": json_document,
    "generate": generate_request,
    "protobuf": protobuf_request,
    "http2": http2,
    "expressions": expressions,
    "patterns": patterns,
    "rings": rings,
    "printing": printing,
}
