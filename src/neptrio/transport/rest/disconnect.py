"""Ends the work for a request whose client has closed its connection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from neptrio.errors import TritonError, raise_it
from neptrio.request.infer_request import InferRequest, Responder
from neptrio.service import Services
from neptrio.transport.infer_call import InferCall
from neptrio.transport.rest.asgi import Receive
from neptrio.transport.rest.times import CallTimes


class Disconnected(Exception):
    """The client closed the connection, so no answer is sent."""


async def unless_gone(receive: Receive, work: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    """Awaits `work(*args)` and returns its result. If the client disconnects first, cancels it and raises
    Disconnected."""
    result: Any = None
    gone = False
    error: TritonError | None = None
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = True
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        try:
            result = await work(*args)
        except TritonError as found:
            error = found  # raised below, because a nursery would wrap it in an ExceptionGroup
        nursery.cancel_scope.cancel()
    try:
        raise_it(error)
    finally:
        del error  # which refers to this frame
    if gone:
        raise Disconnected
    return result


async def submitted(
    call: InferCall, times: CallTimes, body: Any, receive: Receive, responder: Responder
) -> None:
    """Makes a request of a message and submits it. Raises TritonError if it is refused, else as unless_gone()."""
    if not call.take(body):
        await unless_gone(receive, call.take_later)
    with times.submitting(call.request):
        call.submit(responder)
    call.services.loop.loop_pass.end()


async def when_loaded(
    receive: Receive,
    absent: Callable[[str, str], Callable[[], Awaitable[Any]] | None],
    name: str,
    version: str,
) -> None:
    """Awaits what `absent(name, version)` says is to be awaited before a model is there, until there is nothing. A model that
    was loaded for somebody may be put away for another one before that somebody runs. Raises as unless_gone()."""
    while (waiting := absent(name, version)) is not None:
        await unless_gone(receive, waiting)


async def wait_or_cancel(
    services: Services, request: InferRequest, answered: trio.Event, receive: Receive
) -> None:
    """Waits for the answer. If the client disconnects first, cancels the request and raises Disconnected.

    Cancellation: cancels the request too.
    """
    if answered.is_set():
        return
    try:
        await unless_gone(receive, answered.wait)
    finally:
        if not answered.is_set():
            services.admission.cancel(request)
            services.loop.loop_pass.end()
