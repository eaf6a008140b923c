# The types of cext/transport/connection.pyx, which says what everything does; written by tools/make_stubs.py.
import socket
from typing import Any

from neptrio.loop.loop_pass_core import LoopPassCore
from neptrio.loop.socket_writer_core import SocketWriterCore
from neptrio.service import Services
from neptrio.service.access_log import AccessLog

class Connection:
    @property
    def wire(self) -> Any: ...
    @property
    def sock(self) -> socket.socket: ...
    @property
    def services(self) -> Services: ...
    @property
    def writer(self) -> SocketWriterCore: ...
    @property
    def loop_pass(self) -> LoopPassCore: ...
    access: AccessLog | None
    def __init__(self, wire: Any, services: Services) -> None: ...
