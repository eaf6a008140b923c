"""One HTTP/1.1 request that came through the parser: how its answer becomes bytes.

An exchange may write only while it is the oldest of its connection; until then its output is kept, and above HIGH_WATER
bytes of it the app waits. What happens to the request is transport/rest/exchange.py's.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import trio

from neptrio.service.access_log import AccessLog
from neptrio.transport.http1.fast_path import JOIN_BYTES, ExchangeCore
from neptrio.transport.rest.exchange import HIGH_WATER, HttpExchange
from neptrio.transport.rest.head import RequestHead
from neptrio.transport.rest.infer import Headers

if TYPE_CHECKING:
    from neptrio.transport.http1.connection import Http1Connection

REASONS = {
    **{status.value: status.phrase.encode() for status in HTTPStatus},
    405: b"Not Allowed",
    413: b"Payload Too Large",
}
STATUS = {
    (version, status): b"HTTP/%s %d %s\r\n" % (version.encode(), status, reason)
    for version in ("1.0", "1.1")
    for status, reason in REASONS.items()
}


class Exchange(HttpExchange, ExchangeCore):
    """One request that came through the parser, and its answer."""

    connection: Http1Connection

    def __init__(
        self, connection: Http1Connection, method: str, path: str, version: str, keep_alive: bool
    ) -> None:
        super().__init__(connection, method, path, version)
        self.keep_alive = keep_alive
        self._chunked = False

    def logged(self, access: AccessLog, head: RequestHead, size: int) -> None:
        """Begins the request's line of the access log. `size`: bytes of its body."""
        target = self.path or head.url.decode("latin-1")
        record = access.begin(f"HTTP/{self.version}", self.client, self.method, target, head.receive_start)
        record.bytes_in = size
        record.agent = next((value for name, value in head.headers if name.lower() == b"user-agent"), b"")
        self.access = record

    @property
    def gone(self) -> bool:
        return self.connection.ended

    @property
    def unread(self) -> bool:
        return self.connection.writer.broken

    def hold(self, size: int) -> None:
        self.held += size
        self.connection.held += size

    def reply(self, status: int, headers: Headers, body: list[Any]) -> None:
        if self.extra:
            headers = [*headers, *self.extra]
        if self.access is not None:
            sent = [] if self.method == "HEAD" else body
            self.access.answers(status, sum(memoryview(part).nbytes for part in sent))
        self.output += answer(self.version, status, headers, body, self.keep_alive, self.method == "HEAD")
        self.complete = True
        self.connection.advance(self)

    def start(self, status: int, headers: Headers) -> None:
        if not any(name == b"content-length" for name, _ in headers):
            if self.version == "1.1":
                self._chunked = self.method != "HEAD"
                headers = [*headers, (b"transfer-encoding", b"chunked")]
            else:
                self.keep_alive = False
        if self.access is not None:
            self.access.answers(status)
        self.output.append(head(self.version, status, headers, self.keep_alive))
        self.connection.advance(self)

    def write(self, data: Any) -> None:
        if self.access is not None:
            self.access.bytes_out += memoryview(data).nbytes
        self.output += [b"%x\r\n" % len(data), data, b"\r\n"] if self._chunked else [data]
        self.connection.advance(self)

    def finish(self) -> None:
        if not self.complete:
            if self._chunked:
                self.output.append(b"0\r\n\r\n")
            self.complete = True
            self.connection.advance(self)

    def break_off(self) -> None:
        self._chunked = self.keep_alive = False  # closing the connection tells the peer
        self.finish()

    async def writable(self) -> None:
        writer = self.connection.writer
        while not writer.broken:
            if writer.congested:
                await writer.drained()
            elif self.waits > HIGH_WATER:
                self.turn = trio.Event()
                try:
                    await self.turn.wait()
                finally:
                    self.turn = None
            else:
                return


def head(version: str, status: int, headers: Headers, keep_alive: bool) -> bytes:
    """A status line and headers."""
    lines = [STATUS.get((version, status)) or b"HTTP/1.1 %d Unknown\r\n" % status]
    for name, value in headers:
        lines.append(b"%b: %b\r\n" % (name.title(), value))
    lines.append(b"\r\n" if keep_alive else b"Connection: close\r\n\r\n")
    return b"".join(lines)


def answer(
    version: str, status: int, headers: Headers, body: list[Any], keep_alive: bool, head_only: bool = False
) -> list[Any]:
    """A whole answer as a list of buffers; a small one is a single buffer."""
    length = 0
    for part in body:
        length += len(part) if type(part) is bytes else memoryview(part).nbytes
    start = head(version, status, [*headers, (b"content-length", b"%d" % length)], keep_alive)
    if head_only:
        body = []
    return [b"".join((start, *body))] if length <= JOIN_BYTES else [start, *body]
