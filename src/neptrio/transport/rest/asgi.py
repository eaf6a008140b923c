"""The types of ASGI's calls, and what every app does with them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


def client_of(scope: dict[str, Any]) -> str:
    """The client's address, "" if it is not known."""
    client = scope.get("client")
    return str(client[0]) if client else ""


async def respond(
    send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: Iterable[bytes], method: str = ""
) -> None:
    """Sends a whole answer; that to HEAD only says how long its body would be."""
    whole = b"".join(body)
    start = [*headers, (b"content-length", b"%d" % len(whole))]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": b"" if method == "HEAD" else whole})
