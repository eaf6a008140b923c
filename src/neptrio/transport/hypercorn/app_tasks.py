"""The app's tasks on a hypercorn connection, and the events that wait for them (rule 3 of connection.py)."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import trio
from hypercorn.trio.task_group import TaskGroup

log = logging.getLogger("neptrio.rest")

QUEUE_BYTES = 1 << 20  # of body events waiting for the app, per request
EVENT_BYTES = 256  # what an event counts for, besides its body


class AppQueue:
    """A queue of a request's events (body, disconnect) between hypercorn's stream and the app."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque()
        self._bytes = 0
        self._over = False
        self._news = trio.Event()
        self._room = trio.Event()

    async def put(self, event: dict[str, Any]) -> None:
        """Adds an event; waits while more than QUEUE_BYTES wait for the app."""
        if self._over:
            return
        self._events.append(event)
        self._bytes += len(event.get("body", b"")) + EVENT_BYTES
        self._news.set()
        if event["type"] == "http.request":
            while self._bytes > QUEUE_BYTES and not self._over:
                self._room = trio.Event()
                await self._room.wait()
        else:
            self._room.set()  # a disconnect: a put() that waits for the app may go on

    async def get(self) -> dict[str, Any]:
        """The app's receive(). A disconnect stays in the queue and is returned each time."""
        while not self._events:
            self._news = trio.Event()
            await self._news.wait()
        event = self._events[0]
        if event["type"] == "http.request":
            self._events.popleft()
            self._bytes -= len(event["body"]) + EVENT_BYTES
            self._room.set()
        return event

    def close(self) -> None:
        """Called when the app has ended: drops the events, and all that follow."""
        self._over = True
        self._events.clear()
        self._room.set()


class AppTasks(TaskGroup):
    """hypercorn's task group, with an AppQueue between each stream and its app."""

    async def spawn_app(self, app: Any, config: Any, scope: Any, send: Any) -> Any:
        queue = AppQueue()

        async def run() -> None:
            try:
                await app(scope, queue.get, send)
            except Exception:
                log.exception("an app call failed")
            finally:
                queue.close()
            await send(None)

        assert self._nursery is not None
        self._nursery.start_soon(run)
        return queue.put
