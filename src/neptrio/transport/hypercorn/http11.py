"""hypercorn's HTTP/1.1 protocol with our answers to what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import h11
from hypercorn.events import Closed, Updated
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H2ProtocolAssumedError, H11Protocol

from neptrio.errors import TritonError
from neptrio.transport.host import host_problem
from neptrio.transport.http1.connection import SHUTTING_DOWN
from neptrio.transport.http1.input import MAX_HEAD_BYTES
from neptrio.transport.rest.infer import JSON, error_body

REFUSALS = {
    408: "the request did not arrive in time",
    503: SHUTTING_DOWN,
    431: f"request headers exceed the limit of {MAX_HEAD_BYTES} bytes",
}


class _Parser(h11.Connection):
    """h11's connection, which also keeps the reason why it refused a request."""

    problem = ""

    def next_event(self) -> Any:
        try:
            return super().next_event()
        except h11.RemoteProtocolError as error:
            self.problem = f": {error}"
            raise error.with_traceback(None)  # noqa: B904  # h11's frames refer to it


class Http11(H11Protocol):
    """hypercorn's HTTP/1.1, but the requests that it refuses itself are answered in JSON, like all others."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.last_call = False  # the server stops, and the grace is over
        self._two_lengths = False  # of the request: what follows it may be meant as a part of it
        self.connection: _Parser = _Parser(
            h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size
        )

    async def _maybe_recycle(self) -> None:
        """Called when an answer is complete: goes on with the next request or ends the connection. An answer that began
        before the drain did not announce the end, so its client may send one more request."""
        await self._close_stream()
        await self.can_read.set()
        both = (self.connection.our_state, self.connection.their_state)
        if both == (h11.DONE, h11.DONE) and not self.last_call and not self._two_lengths:
            self.connection.start_next_cycle()
            await self.send(Updated(idle=True))
        else:
            await self.send(Closed())

    async def _check_protocol(self, request: h11.Request) -> None:
        if (request.method, request.target, request.http_version) == (b"PRI", b"*", b"2.0"):
            raise H2ProtocolAssumedError(b"PRI * HTTP/2.0\r\n\r\n" + self.connection.trailing_data[0])

    async def _create_stream(self, request: h11.Request) -> None:
        hosts = [value for name, value in request.headers if name == b"host"]
        problem = host_problem(hosts[-1] if hosts else None, len(hosts), request.http_version.decode())
        if problem is not None:
            await self._refuse(problem.code.http, str(problem))
            await self.send(Closed())
            return
        names = {name for name, _ in request.headers}
        # as on our own HTTP/1.1 connection (transport.http1.input, rule 2)
        self._two_lengths = b"transfer-encoding" in names and b"content-length" in names
        # upgrades (to WebSocket or h2c) are ignored: hypercorn does not see the header
        kept = [(name, value) for name, value in request.headers.raw_items() if name.lower() != b"upgrade"]
        await super()._create_stream(
            h11.Request(
                method=request.method,
                target=request.target,
                headers=kept,
                http_version=request.http_version,
            )
        )

    async def stream_send(self, event: Any) -> None:
        if self._two_lengths and isinstance(event, Response):
            event = replace(event, headers=[*event.headers, (b"connection", b"close")])
        await super().stream_send(event)

    async def _send_error_response(self, status_code: int) -> None:
        if status_code == 501:
            status_code = 400  # another Transfer-Encoding than chunked
        text = REFUSALS.get(status_code) or f"malformed HTTP request{self.connection.problem}"
        await self._refuse(status_code, text)

    async def _refuse(self, status_code: int, text: str) -> None:
        body = b"".join(error_body(TritonError(text)))
        headers = [*JSON, (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        await self._send_h11_event(h11.Response(headers=headers, status_code=status_code))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())
