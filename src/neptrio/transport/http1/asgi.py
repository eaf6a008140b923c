"""Calls the ASGI app for an HTTP/1.1 connection, which answers only the infer route itself.

An exchange (a request and its answer) is one call of the app, in a task of its own. Clients may send several requests
at once (pipelining), so an exchange holds its answer until all earlier ones of its connection are sent.
Source: ASGI 3.0, HTTP & WebSocket message format 2.3.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from neptrio.errors import Internal
from neptrio.transport.header_policy import RAW_HEADERS
from neptrio.transport.http1.exchange import Exchange
from neptrio.transport.rest.times import RECEIVED

log = logging.getLogger("neptrio.http1")


class App(Protocol):
    """The ASGI app behind every route but infer."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...


async def run_app(
    app: App,
    exchange: Exchange,
    raw_headers: list[tuple[bytes, bytes]],
    body: Any,
    keep_raw: bool,
    received: tuple[int, int],
) -> None:
    """Lets the app answer `exchange`.

    `body` is the whole request body, `received` when the request's first byte came and when it was whole. With `keep_raw`
    the scope also has the headers with their names as they were written, under header_policy.RAW_HEADERS. If the app
    raises before its answer began, the answer is a 500; after that, closing the connection is the only way to tell the
    client. send() waits while the client does not read.
    """
    writer, loop_pass = exchange.connection.writer, exchange.connection.loop_pass
    headers = [(name.lower(), value) for name, value in raw_headers]
    path, _, query = exchange.path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": exchange.version,
        "method": exchange.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "headers": headers,
        "client": (exchange.connection.client, 0),
        RECEIVED: received,
    }
    if keep_raw:
        scope[RAW_HEADERS] = raw_headers
    sent_body = started = chunked = False

    async def receive() -> dict[str, Any]:
        nonlocal sent_body
        if not sent_body:
            sent_body = True
            return {"type": "http.request", "body": body, "more_body": False}
        await exchange.disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(event: dict[str, Any]) -> None:
        nonlocal chunked, started
        if event["type"] == "http.response.start":
            started = True
            headers = list(event["headers"])
            if not any(name == b"content-length" for name, _ in headers):
                chunked = exchange.version == "1.1"
                if chunked:
                    headers.append((b"transfer-encoding", b"chunked"))
                else:
                    exchange.keep_alive = False
            exchange.write([exchange.head(event["status"], headers)])
            return
        data = event.get("body", b"")
        if data:
            exchange.write([b"%x\r\n" % len(data), data, b"\r\n"] if chunked else [data])
        if not event.get("more_body", False):
            if chunked:
                exchange.write([b"0\r\n\r\n"])
            exchange.finish()
        loop_pass.end()
        while writer.congested and not writer.broken:
            await writer.drained()

    try:
        await app(scope, receive, send)
    except Exception as error:
        log.exception("%s %s failed", exchange.method, exchange.path)
        if not started:
            exchange.refuse(Internal(f"internal error: {type(error).__name__}"))
    if not exchange.complete:
        # the answer broke off: closing the connection tells the client
        exchange.keep_alive = False
        exchange.finish()
    loop_pass.end()
