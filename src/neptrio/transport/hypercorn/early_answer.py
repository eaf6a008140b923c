"""Answers that are made before the request's body has come, on connections that hypercorn serves.

The problem: a refusal (404, 405, 503) is often made before the body is there. When an answer has ended, hypercorn forgets an HTTP/2
stream, and ends the whole connection, with all its other requests, when a part of that request's body comes afterwards. An
HTTP/1.1 connection it closes at once, and a client that still sends then loses the answer with the connection.

The choice: the answer goes out at once, but for its end, which waits until the body has come; what comes is thrown away.

 1. receive() is called by one task at a time: the app may be waiting for the client's leave when the answer ends.
 2. A client that has reset the stream or left is not waited for, nor one that waits for "100 Continue", nor one that has
    sent nothing for SILENT_SECONDS: it may be waiting for the answer's end. Nobody is waited for longer than MOST_SECONDS.
"""

from __future__ import annotations

from typing import Any

import trio

from neptrio.transport.rest.app_call import App
from neptrio.transport.rest.asgi import Receive, Send

SILENT_SECONDS = 5.0
MOST_SECONDS = 30.0


async def end_after_body(app: App, scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """Calls the app; its answer ends when the request's body has come."""
    turn = trio.Lock()
    complete = any(name.lower() == b"expect" for name, _ in scope["headers"])

    async def receiving() -> dict[str, Any]:
        async with turn:
            return await take()

    async def take() -> dict[str, Any]:
        nonlocal complete
        event = await receive()
        complete = complete or event["type"] == "http.disconnect" or not event.get("more_body", False)
        return event

    async def sending(event: dict[str, Any]) -> None:
        if event["type"] == "http.response.body" and not event.get("more_body", False) and not complete:
            if event.get("body"):
                await send({**event, "more_body": True})
                event = {**event, "body": b""}
            end = trio.current_time() + MOST_SECONDS
            while not complete and trio.current_time() < end:
                with trio.move_on_after(SILENT_SECONDS) as silence:
                    async with turn:
                        if not complete:  # who had the turn before may have received the end
                            await take()
                if silence.cancelled_caught:
                    break
        await send(event)

    await app(scope, receiving, sending)
