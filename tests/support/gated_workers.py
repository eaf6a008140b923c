"""Holds what the server's workers are asked to do until a test lets it go on."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from neptrio.loop.workers import Workers


class WorkersGate:
    """Counts the steps: asked for, given up, done. For the server's thread, except for reading the counts."""

    def __init__(self) -> None:
        self.open = trio.Event()
        self.asked = 0
        self.left = 0
        self.done = 0


def gate_workers(monkeypatch: pytest.MonkeyPatch) -> WorkersGate:
    """A closed gate before all workers."""
    made = WorkersGate()
    run = Workers.run

    async def gated(self: Workers, step: Any, whose: object = None) -> Any:
        made.asked += 1
        try:
            await made.open.wait()
            answer = await run(self, step, whose)
        except trio.Cancelled:
            made.left += 1
            raise
        made.done += 1
        return answer

    monkeypatch.setattr(Workers, "run", gated)
    return made
