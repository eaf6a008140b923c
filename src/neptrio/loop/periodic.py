"""Tasks that do a piece of work again and again, as long as the server runs.

The problem: such a task stands in a nursery of the server, so whatever its work raises ends the server with everything in it:
an error of a network file system that nobody had thought of, say, while a repository was only looked at. The choice: all of
them run here, where an error is logged and the next turn is another try.

Rules:
 1. No exception of the work ends its task. Cancelling does.
 2. One turn that fails leaves everything else as it is: what serves, serves on.
 3. An error that was not expected is logged with its traceback, the same one in the turns after it without.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from logging import Logger

import trio

from neptrio.errors import TritonError
from neptrio.foreign import summary, text_of


async def for_ever(
    seconds: float,
    work: Callable[[], Awaitable[object]],
    what: str,
    log: Logger,
    pause: Callable[[float], Awaitable[object]] = trio.sleep,
) -> None:
    """Calls `work` after every `pause` of so many seconds, for ever. `what` it does is the beginning of the line in the log
    when it fails."""
    last = ""
    while True:
        await pause(seconds)
        try:
            await work()
        except TritonError as error:
            log.error("%s failed: %s", what, text_of(error))
        except Exception as error:
            text = summary(error)
            if text == last:
                log.error("%s failed again: %s", what, text)
            else:
                last = text
                log.exception("%s failed, it is tried again", what)
