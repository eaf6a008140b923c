"""What Ray's HTTP proxy answers by itself, in the protocol's form: a middleware for that proxy.

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=neptrio.ray.proxy.middlewares

The problem: when a replica is killed, the proxy gives what the replica had no answer at all, which its HTTP server makes a
plain 500 of: clients of the protocol cannot read that and do not try again. Texts about a path or a deployment that there
is not are for Ray's users, too. The choice: the proxy's answers have no `neptrio-replica`, which is on every answer of a
replica; they get the protocol's form.

Rules:
 1. An answer of a replica is passed on as it is.
 2. A request that gets no answer at all had a replica that was lost: 503 with Retry-After, since another one takes its
    place. Statuses that the proxy has chosen stay.
 3. Ray's own paths (/-/) stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from neptrio.ray.replica import REPLICA_HEADER

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

LONGEST = 4096  # bytes of a text of Ray's that a client is told
LOST = b"the replica that had this request has ended; send the request again"


class OwnAnswers:
    """The middleware, around Ray's app."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """An ASGI call."""
        if scope["type"] != "http" or scope["path"].startswith("/-/"):
            await self._app(scope, receive, send)
            return
        begun = False
        held: Message | None = None  # the beginning of an answer of the proxy's own
        text = bytearray()

        async def passed(message: Message) -> None:
            nonlocal begun, held
            begun = True
            if message["type"] == "http.response.start" and message["status"] >= 400:
                if REPLICA_HEADER not in (name.lower() for name, _ in message.get("headers", ())):
                    held = message
                    return
            elif held is not None and message["type"] == "http.response.body":
                text.extend(message.get("body", b"")[: LONGEST - len(text)])
                return
            await send(message)

        await self._app(scope, receive, passed)
        if not begun:
            held, text = {"status": 503, "headers": [(b"retry-after", b"1")]}, bytearray(LOST)
        if held is not None:
            for part in answer(held, bytes(text)):
                await send(part)


def answer(start: Message, text: bytes) -> tuple[Message, Message]:
    """The messages of an answer in the protocol's form, of one that begins with `start` and says `text`."""
    error = text.decode(errors="replace").strip() or "Ray's proxy could not answer"
    dropped = (b"content-type", b"content-length")
    headers = [(name, value) for name, value in start.get("headers", ()) if name.lower() not in dropped]
    status = start["status"]
    body = json.dumps({"error": error}).encode()
    headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    return (
        {"type": "http.response.start", "status": status, "headers": headers},
        {"type": "http.response.body", "body": body},
    )


def middlewares() -> list[Any]:
    """What Ray's proxy asks for."""
    from starlette.middleware import Middleware

    return [Middleware(OwnAnswers)]
