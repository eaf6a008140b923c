# The types of cext/transport/http2/connection_core.pyx, which says what everything does.

import socket
from typing import Any

from typing_extensions import Buffer

from neptrio.errors import TritonError
from neptrio.loop.loop_pass_core import LoopPassCore
from neptrio.loop.socket_writer_core import SocketWriterCore
from neptrio.service import Services
from neptrio.transport.http2.session import Http2Session
from neptrio.transport.http2.stream import Totals

class Http2Core:
    @property
    def wire(self) -> Any: ...
    @property
    def sock(self) -> socket.socket: ...
    @property
    def services(self) -> Services: ...
    @property
    def source_of(self) -> Any: ...
    session: Http2Session
    @property
    def writer(self) -> SocketWriterCore: ...
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
    def __init__(self, wire: Any, services: Services) -> None: ...
    def take(self) -> bool: ...
    def feed(self, data: Buffer) -> None: ...
    def want_flush(self) -> None: ...
    @property
    def held_bytes(self) -> int: ...
    @property
    def overfull(self) -> bool: ...
    def unread(self) -> TritonError | None: ...
    def flush(self) -> None: ...
