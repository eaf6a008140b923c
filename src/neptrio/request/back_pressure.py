"""Who waits for room: each has a callback, that is called when there is some (Responder.wait_for_room)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

log = logging.getLogger("neptrio.request")


def let_send(waiting: Iterable[Callable[[], object]]) -> None:
    """Calls each that waits. What one raises is logged: the others would wait for ever."""
    for callback in waiting:
        try:
            callback()
        except Exception:
            log.exception("a sender that waited for room could not go on")
