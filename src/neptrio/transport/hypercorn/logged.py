"""The access log of requests that hypercorn serves: what its calls of the app receive and send is counted on the way.

A body that was announced counts as it was, because the app may refuse a request without receiving it."""

from __future__ import annotations

from typing import Any

from neptrio.service.access_log import AccessLog
from neptrio.transport.rest.app_call import App
from neptrio.transport.rest.asgi import Receive, Send
from neptrio.transport.rest.times import ACCESS


async def logged(
    app: App, access: AccessLog, client: str, scope: dict[str, Any], receive: Receive, send: Send
) -> None:
    """Calls the app for a request that has a line in the log."""
    version = scope["http_version"]
    record = access.begin(
        f"HTTP/{version}" if "." in version else f"HTTP/{version}.0",
        client,
        scope["method"],
        scope["raw_path"].decode("latin-1"),
    )
    length = b""
    for name, value in scope["headers"]:
        if name.lower() == b"user-agent":
            record.agent = value
        elif name.lower() == b"content-length":
            length = value
    announced = length.isdigit()
    record.bytes_in = int(length) if announced else 0

    async def receiving() -> Any:
        message = await receive()
        if not announced:
            record.bytes_in += len(message.get("body", b""))
        return message

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            record.answers(message["status"])
        else:
            record.bytes_out += len(message.get("body", b""))
        await send(message)

    try:
        await app({**scope, ACCESS: record}, receiving, sending)
    finally:
        record.end()
