"""How responses get from the server's loop to whoever waits for them, and how that side waits.

The problem: the server decides on one trio thread. A caller may be a task on that thread, a task of another trio
or asyncio loop, or a plain thread, and must neither block its own loop nor be woken through a thread. The choice:
one small queue for a call, in a form for each kind of caller.

Rules:
 1. put() is called on the server's trio thread, get() by the one caller that owns the mail.
 2. Items come out in the order in which they were put in. None is lost when get() is cancelled.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from typing import Any, Protocol

import sniffio
import trio

Item = Any  # (InferResponse, final) or an exception


class Mail(Protocol):
    """The server's side of a caller's queue."""

    def put(self, item: Item) -> None: ...


class AsyncMail(Mail, Protocol):
    """A queue whose owner waits in a coroutine."""

    async def get(self) -> Item: ...


class ThreadMail:
    """For a caller that is a plain thread."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.put = self._items.put

    def get(self) -> Item:
        """Blocks until there is an item."""
        return self._items.get()


class LoopMail:
    """For a task on the server's own trio loop."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._task: trio.lowlevel.Task | None = None

    def put(self, item: Item) -> None:
        self._items.append(item)
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)

    async def get(self) -> Item:
        """Waits for an item; a checkpoint in any case."""

        def abort(_: Any) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        if self._items:
            await trio.lowlevel.checkpoint()
        while not self._items:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(abort)
        return self._items.popleft()


class TrioMail(LoopMail):
    """For a task of a trio loop in another thread than the server's."""

    def __init__(self) -> None:
        super().__init__()
        self._token = trio.lowlevel.current_trio_token()

    def put(self, item: Item) -> None:
        try:
            self._token.run_sync_soon(super().put, item)
        except trio.RunFinishedError:
            pass  # nobody is left who could wait


class AsyncioMail:
    """For a task of an asyncio loop."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.get = self._items.get

    def put(self, item: Item) -> None:
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:
            pass  # the loop is closed


def mail_here(server_token: trio.lowlevel.TrioToken) -> AsyncMail:
    """A mail for the running task, whichever library runs it. Raises RuntimeError outside of trio and asyncio."""
    library = sniffio.current_async_library()
    if library == "trio":
        return LoopMail() if trio.lowlevel.current_trio_token() is server_token else TrioMail()
    if library == "asyncio":
        return AsyncioMail()
    raise RuntimeError(f"expected a task of trio or asyncio, got one of {library}")
