"""Decodes large messages, and classifies large outputs, on workers' threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from neptrio.codec.json_reader import Stop
from neptrio.codec.outputs import select
from neptrio.codec.proto_request import decode_request
from neptrio.codec.shared_memory import AskedFromThread
from neptrio.errors import Cancelled
from neptrio.request.infer_request import InferRequest, InferResponse

if TYPE_CHECKING:
    from neptrio.transport.grpc.connection import GrpcConnection

LARGE_MESSAGE = 64 << 10  # whether decoding takes long is asked for larger ones only


async def decode_later(
    connection: GrpcConnection, request: InferRequest, message: bytes, keep: Callable[[int], None]
) -> None:
    """decode_request() by a worker. `keep(bytes)` is called on the loop's thread before so many are allocated.

    Raises what decode_request() and `keep` raise. Cancellation: asks the worker to stop; it does so before it reads
    much more.
    """
    stop = Stop()
    services = connection.services
    memory = AskedFromThread(services.shared_memory)
    awaited = True

    def keep_for_request(size: int) -> None:
        if not awaited:
            raise Cancelled  # nobody would give the bytes back
        keep(size)

    def reserve(size: int) -> None:
        trio.from_thread.run_sync(keep_for_request, size)

    try:
        await services.workers.run(
            lambda: decode_request(request, message, memory, stop, reserve), connection
        )
    except BaseException:
        stop.ask()
        raise
    finally:
        awaited = False


async def select_later(connection: GrpcConnection, request: InferRequest, response: InferResponse) -> None:
    """select() by a worker. Raises what that raises. Cancellation: the worker finishes what it does."""
    services = connection.services
    memory = AskedFromThread(services.shared_memory)
    await services.workers.run(lambda: select(request, response, memory), connection)
