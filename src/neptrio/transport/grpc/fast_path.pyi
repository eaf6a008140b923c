# The types of cext/transport/grpc/fast_path.pyx, which says what everything does; written by tools/make_stubs.py.
from typing import Any

from neptrio.errors import Code, TritonError
from neptrio.loop.timers import Timer
from neptrio.request.infer_request import InferRequest, InferResponse, Responder
from neptrio.transport.grpc.message_stream import GrpcStream
from neptrio.transport.http2.connection_core import Http2Core
from neptrio.transport.http2.session import Headers, Http2Session

CARDINALITY: Code
UNARY_RESPONDER: Responder

class UnaryResponder(Responder):
    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None: ...

class UnaryCore(GrpcStream):
    _connection: Http2Core
    _timer: Timer | None
    _message: Any
    _compressed: bool
    _request: InferRequest | None
    _inflated: int
    _kept: int
    _began_ns: int
    def __init__(
        self, session: Http2Session, stream_id: int, headers: Headers, connection: Http2Core
    ) -> None: ...
    def start_generally(self) -> None: ...
    def answer_generally(self, request: InferRequest, response: InferResponse) -> None: ...
    def answer_later(self, request: InferRequest, response: InferResponse) -> None: ...
    def give_back(self) -> None: ...
    def stop_clock(self) -> None: ...
    def _fail(self, error: TritonError) -> None: ...
    def on_message(self, message: Any, compressed: bool) -> None: ...
    def on_half_close(self) -> None: ...
    def start(self) -> None: ...
