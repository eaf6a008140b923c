# The types of cext/transport/rest/http2_stream.pyx, which says what everything does.

from typing import Any

import trio

from neptrio.errors import TritonError
from neptrio.request.infer_request import InferRequest, InferResponse, Responder
from neptrio.transport.http2.body_stream import BodyStream
from neptrio.transport.http2.connection_core import Http2Core
from neptrio.transport.http2.session import Headers, Http2Session

class PlainResponder(Responder):
    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None: ...

class RestHttp2Core(Http2Core):
    fast_path: bool
    budget: Any
    max_body: int
    def open_stream(
        self, session: Http2Session, stream_id: int, path: bytes, headers: Headers
    ) -> RestStream: ...

class RestStream(BodyStream):
    @property
    def connection(self) -> Any: ...
    @property
    def began_ns(self) -> int: ...
    exchange: Any
    encoding: trio.CancelScope | None
    def requests(self) -> tuple[InferRequest, ...]: ...
    def on_drain(self) -> None: ...
    def encoded(self, request: InferRequest, encoded: tuple[bytes, list[Any] | None, int]) -> None: ...
    def refuse(self, error: TritonError, request: InferRequest | None = None) -> None: ...
