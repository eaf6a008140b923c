"""Which protocol a hypercorn connection speaks."""

from __future__ import annotations

from typing import Any

import h11
import trio
from hypercorn.events import Event, RawData
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h11 import H2ProtocolAssumedError

from neptrio.transport.http2.h2_session import let_go
from neptrio.transport.hypercorn.http2 import Http2
from neptrio.transport.hypercorn.http11 import Http11


class Protocols(ProtocolWrapper):
    """Chooses between hypercorn's HTTP/1.1 and our HTTP/2: by ALPN, or by HTTP/2's preface."""

    def __init__(self, alpn: str, unread_s: float, *args: Any) -> None:
        """`unread_s`: see Http2, rule 7."""
        super().__init__(*args)
        self._unread_s = unread_s
        self._is_http2 = trio.Event()
        self.protocol: Any = self._http2() if alpn == "h2" else self._make(Http11)

    def _http2(self) -> Http2:
        made: Http2 = self._make(Http2)
        made.unread_s = self._unread_s
        self._is_http2.set()
        return made

    def _make(self, protocol: Any) -> Any:
        return protocol(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.state,
            self.ssl,
            self.client,
            self.server,
            self.send,
        )

    async def handle(self, event: Event) -> None:
        try:
            await self.protocol.handle(event)
            return
        except H2ProtocolAssumedError as error:
            data = error.data
        self.protocol = self._http2()
        await self.protocol.initiate()
        if data:
            await self.protocol.handle(RawData(data=data))

    def let_go(self) -> None:
        """The connection has ended: drops what refers back to it, which would otherwise live until the collector finds it."""
        if isinstance(self.protocol, Http2):
            let_go(self.protocol.connection)

    def partial_input(self) -> int | None:
        """A number that identifies the head or frame that is incomplete now; None if there is none."""
        protocol = self.protocol
        if isinstance(protocol, Http2):
            return protocol.partial_input
        waiting = protocol.connection.their_state is h11.IDLE and protocol.connection.trailing_data[0]
        return protocol.keep_alive_requests if waiting else None

    async def too_late(self) -> None:
        """Tells the client that its head or frame came too late: 408, or GOAWAY."""
        protocol = self.protocol
        if isinstance(protocol, Http2):
            await protocol.goodbye()
        elif protocol.connection.our_state is h11.IDLE:
            await protocol._send_error_response(408)

    async def goodbye(self) -> None:
        """Tells an HTTP/2 client that the server ends its idle connection."""
        if isinstance(self.protocol, Http2):
            await self.protocol.goodbye()

    async def drain(self, grace_s: float) -> bool:
        """Tells the client that the server stops. Returns when the client knows or after `grace_s` seconds.

        Returns True if no request waits for its answer then.
        """
        with trio.move_on_after(grace_s):
            await self._is_http2.wait()  # a connection counts as HTTP/1.1 until the preface comes
        if isinstance(self.protocol, Http2):
            await self.protocol.drain(grace_s)
            return self.protocol.idle
        self.protocol.last_call = True
        if self.protocol.stream is not None:
            return False
        if self.protocol.connection.trailing_data[0]:
            await self.protocol._send_error_response(503)
        return True
