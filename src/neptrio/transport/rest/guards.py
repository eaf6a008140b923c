"""Stand before the app on connections that hypercorn serves: limits on connections, requests and bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from neptrio.errors import TritonError
from neptrio.request.infer_request import monotonic_ns
from neptrio.service import Services
from neptrio.service.connections import TurnedAway
from neptrio.transport.header_policy import CERTIFICATE, HeaderPolicy
from neptrio.transport.rest import routes
from neptrio.transport.rest.app_call import App
from neptrio.transport.rest.asgi import Receive, Send, respond
from neptrio.transport.rest.infer import JSON, error_body

FREE_BYTES = 32 << 10  # of each body that the server's budget of bytes is not asked for
BODY_STEP = 256 << 10  # larger bodies ask the budget for this much at a time


def always_answered(scope: dict[str, Any], policy: HeaderPolicy | None) -> bool:
    """routes.always_answered() for a request as ASGI gives it."""
    method, headers = scope["method"], scope["headers"]
    route = routes.match(method, scope["raw_path"].decode("latin-1"))
    return routes.always_answered(route, method, headers, policy, scope.get(CERTIFICATE))


async def turn_away(
    app: App, why: str, policy: HeaderPolicy | None, scope: dict[str, Any], receive: Receive, send: Send
) -> None:
    """Stands in for the app on a connection beyond the limit: answers health probes, and control verbs of those who may
    use them, and 503 to everything else."""
    if always_answered(scope, policy):
        await app(scope, receive, send)
    else:
        await refuse(TurnedAway(why), send)


class Bounded:
    """Wraps the app wherever our own HTTP/1.1 connection does not call it: applies the client's request limits, and counts
    in the server's budget the bytes of bodies until they are answered, and those of answers until send() has taken them.

    Our own HTTP/1.1 connection does both itself.
    """

    def __init__(
        self,
        app: App,
        services: Services,
        address: str,
        count: Callable[[int], None],
        policy: HeaderPolicy | None = None,
    ) -> None:
        """`count` is called with the number of bytes that are held from now on, and negative when they are freed."""
        self._app = app
        self._limits = services.request_limits
        self._budget = services.held
        self._address = address
        self._count = count
        self._policy = policy
        self._open = 0

    def open_requests(self) -> int:
        """How many requests are not answered yet."""
        return self._open

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held = received = 0
        let_in = FREE_BYTES

        async def bounded() -> dict[str, Any]:
            nonlocal held, received, let_in
            event = await receive()
            size = len(event.get("body", b""))
            received += size
            while received > let_in:
                self._budget.take(BODY_STEP)
                let_in += BODY_STEP
            # while it comes, what is let in is counted, or others would be given the same room
            coming = let_in > FREE_BYTES and event.get("more_body", False)
            counted = let_in if coming else received
            self._count(counted - held)
            held = counted
            return event

        answer = 0  # bytes of the answer that the client has not taken
        answered = False

        def over() -> None:
            nonlocal answered
            if not answered:
                answered = True
                self._open -= 1

        async def sending(event: dict[str, Any]) -> None:
            nonlocal answer
            size = 0
            if event["type"] == "http.response.start":
                answer = _announced(event["headers"])
                self._count(answer)
                self._budget.made(answer)
            elif event["type"] == "http.response.body":
                if not event.get("more_body", False):
                    over()  # before sending: a client that has read the answer may send its next request at once
                size = len(event.get("body", b""))
                if size > answer:  # more than was announced
                    self._count(size - answer)
                    self._budget.made(size - answer)
                    answer = size
            await send(event)
            answer -= size
            self._count(-size)

        self._open += 1
        try:
            if self._budget.full and not always_answered(scope, self._policy):
                problem: TritonError | None = self._budget.problem(0)
                if problem is not None:
                    await refuse(problem, send)
                    return
            if self._limits.on and not always_answered(scope, self._policy):
                problem = self._limits.problem(self._address, monotonic_ns())
                if problem is not None:
                    await refuse(problem, sending)
                    return
            await self._app(scope, bounded, sending)
        finally:
            over()
            self._count(-held - answer)


def _announced(headers: Any) -> int:
    """The bytes of a body, as its headers announce it; 0 if they do not."""
    return next((int(value) for name, value in headers if name == b"content-length"), 0)


async def refuse(error: TritonError, send: Send, method: str = "") -> None:
    """Sends an error as the whole answer."""
    await respond(send, error.code.http, [*JSON, *error.headers], error_body(error), method)
