# The types of cext/transport/http1/fast_path.pyx, which says what everything does; written by tools/make_stubs.py.
import socket
from collections import deque
from typing import Any

import trio

from neptrio.errors import TritonError
from neptrio.loop.loop_pass_core import LoopPassCore
from neptrio.loop.socket_writer_core import SocketWriterCore
from neptrio.request.infer_request import InferRequest, InferResponse, Responder
from neptrio.service import Services
from neptrio.transport.rest.head import RequestHead

MAX_EXCHANGES: int
JOIN_BYTES: int

class ExchangeCore(Responder):
    connection: Http1FastPath
    output: list[Any]
    complete: bool
    keep_alive: bool
    held: int
    def disconnect(self, services: Services) -> None: ...

class FastPathExchange(ExchangeCore):
    encoding: trio.CancelScope | None
    def disconnect(self, services: Services) -> None: ...
    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None: ...
    def encoded(self, request: InferRequest, encoded: tuple[bytes, list[Any] | None, int]) -> None: ...
    def refuse(self, error: TritonError, request: InferRequest | None = None) -> None: ...

class Http1FastPath(RequestHead):
    @property
    def wire(self) -> Any: ...
    @property
    def sock(self) -> socket.socket: ...
    @property
    def writer(self) -> SocketWriterCore: ...
    @property
    def loop_pass(self) -> LoopPassCore: ...
    @property
    def services(self) -> Services: ...
    known_host: bytes | None
    asks_who: bool
    paused: int
    fast_path: bool
    closing: bool
    draining: bool
    ended: bool
    exchanges: deque[ExchangeCore]
    ready: list[Any]
    held: int
    max_body: int
    since_ns: int
    requests: int
    @property
    def passed(self) -> int: ...
    @property
    def parted(self) -> bytes | None: ...
    body_received: int
    later: bytes | None
    direct: Any
    room: trio.Event | None
    idle: trio.Event | None
    def __init__(self, wire: Any, services: Services) -> None: ...
    def advance(self) -> None: ...
    def flush(self) -> None: ...
    def has_room(self) -> bool: ...
    def take(self) -> bool: ...
    def pass_on(self, data: bytes) -> None: ...
