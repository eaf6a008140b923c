# The types of cext/transport/grpc/fast_path.pyx, which says what everything does.

import socket
from typing import Any

from typing_extensions import Buffer

from neptrio.errors import Code, TritonError
from neptrio.loop.loop_pass_core import LoopPassCore
from neptrio.loop.socket_writer import Writer
from neptrio.loop.timers import Timer
from neptrio.request.infer_request import InferRequest, InferResponse, Responder
from neptrio.service import Services
from neptrio.transport.http2.session import Headers, Http2Session
from neptrio.transport.http2.stream import GrpcStream, Totals

CARDINALITY: Code
UNARY_RESPONDER: Responder

class GrpcFastPath:
    @property
    def sock(self) -> socket.socket: ...
    @property
    def services(self) -> Services: ...
    @property
    def source_of(self) -> Any: ...
    session: Http2Session
    writer: Writer
    forward: Any
    compression: str
    parked: Any
    @property
    def loop_pass(self) -> LoopPassCore: ...
    received_at: int
    totals: Totals
    input_limit: int
    output_limit: int
    draining: bool
    drain_acked: int
    def __init__(self, sock: socket.socket, writer: Writer, services: Services) -> None: ...
    def take(self) -> bool: ...
    def feed(self, data: Buffer) -> None: ...
    def want_flush(self) -> None: ...
    @property
    def held_bytes(self) -> int: ...
    @property
    def overfull(self) -> bool: ...
    def unread(self) -> TritonError | None: ...
    def flush(self) -> None: ...

class UnaryCore(GrpcStream):
    _connection: GrpcFastPath
    _timer: Timer | None
    _message: Any
    _compressed: bool
    _request: InferRequest | None
    _inflated: int
    _kept: int
    _began_ns: int
    def __init__(
        self, session: Http2Session, stream_id: int, headers: Headers, connection: GrpcFastPath
    ) -> None: ...
    def on_message(self, message: Any, compressed: bool) -> None: ...
    def on_half_close(self) -> None: ...
    def start(self) -> None: ...

class UnaryResponder(Responder):
    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None: ...
