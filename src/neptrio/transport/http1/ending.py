"""The end of a lean HTTP/1.1 connection: its last answers, and a close that does not lose them.

The problem: a connection that reads no more requests may still have to send answers, and if its socket is closed too
early the peer loses them. The choice: the task that has read requests then waits here, first for the answers, then for
the peer to take them, with a limit.

Rules:
 1. Until the last answer is there we keep reading: when the peer closes its side, requests under way are cancelled.
    Answers that are completed nevertheless are sent, in case it has closed only that side.
 2. Output has CLOSE_SECONDS to be sent. Then the socket is closed, whatever is left.
 3. After a refusal, and when the server stops, unread input is thrown away until the peer has ended its
    side: closing before that would reset the connection, and the peer might lose its answer. A server that
    stops waits LINGER_SECONDS for it: most clients look at a connection only when they use it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from neptrio.transport.http1.states import Event

if TYPE_CHECKING:
    from neptrio.transport.http1.connection import Http1Connection

CLOSE_SECONDS = 5.0
LINGER_SECONDS = 0.5


async def last_answers(connection: Http1Connection) -> None:
    """Waits until every exchange is answered, then for the peer to take the answers (rule 1)."""
    while connection.exchanges and not connection.writer.broken:
        if connection.ended:
            connection.idle = trio.Event()
            await connection.idle.wait()
            continue
        await _alone(connection)
        if await connection.wire.receive_some() == 0:
            connection.end_of_input()
            connection.loop_pass.end()


async def close(connection: Http1Connection, linger: bool) -> None:
    """Cancels what is under way, gives pending output some time to be sent, then closes the socket.

    `linger`: there may be input that nobody reads (rule 3). Takes at most CLOSE_SECONDS and cannot be
    cancelled earlier.
    """
    for exchange in list(connection.exchanges):
        exchange.disconnect(connection.services)
    connection.loop_pass.end()
    with trio.move_on_after(CLOSE_SECONDS) as scope:
        scope.shield = True
        await connection.writer.drained()
        await _alone(connection)
        if linger and not connection.ended and not connection.writer.broken:
            await connection.wire.end(LINGER_SECONDS if connection.draining else CLOSE_SECONDS)
    connection.happens(Event.INPUT_ENDED)
    connection.wire.close()


async def _alone(connection: Http1Connection) -> None:
    """Until nobody else waits for the socket to be readable."""
    while connection.watching is not None:
        connection.watching.cancel()
        await trio.lowlevel.checkpoint()
