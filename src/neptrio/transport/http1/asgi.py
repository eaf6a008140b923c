"""The ASGI side of a lean HTTP/1.1 connection: every route but infer is answered by the app.

One exchange is one call of the app, in a task of its own. What the app sends is held by the exchange
until it is the oldest of its connection.
Source: ASGI 3.0, HTTP & WebSocket message format 2.3.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from neptrio.errors import Internal
from neptrio.transport.header_policy import RAW_HEADERS
from neptrio.transport.http1.exchange import Exchange

log = logging.getLogger("neptrio.http1")


class App(Protocol):
    """The ASGI app behind every route but infer."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...


async def run_app(
    app: App, exchange: Exchange, raw_headers: list[tuple[bytes, bytes]], body: Any, keep_raw: bool
) -> None:
    """Answers `exchange` by the app, in a task of its own.

    `body` is the whole request body. With `keep_raw` the scope carries the headers as they were written,
    under header_policy.RAW_HEADERS. An app that raises before its answer began gets a 500 written for it;
    afterwards only the end of the connection can tell. A peer that does not read makes send() wait.
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
        # an answer that broke off can only be told by the end of the connection
        exchange.keep_alive = False
        exchange.finish()
    loop_pass.end()
