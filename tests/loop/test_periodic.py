"""Tasks that do a piece of work again and again (loop.periodic)."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import trio
import trio.testing

from neptrio.errors import Unavailable
from neptrio.loop import periodic

log = logging.getLogger("neptrio.server")
SOURCES = Path(periodic.__file__).resolve().parents[1]


def test_no_error_ends_the_task_and_cancelling_does(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = iter(
        [OSError(107, "not connected"), OSError(107, "not connected"), None, Unavailable("later")]
    )
    ended = False

    async def main() -> None:
        nonlocal ended
        with trio.CancelScope() as scope:

            async def work() -> None:
                outcome = next(outcomes, scope)
                if isinstance(outcome, Exception):
                    raise outcome
                if outcome is scope:
                    scope.cancel()
                    await trio.sleep_forever()

            await periodic.for_ever(3600, work, "looking at a folder", log)
        ended = scope.cancelled_caught

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert ended
    assert [(record.getMessage(), record.exc_info is not None) for record in caplog.records] == [
        ("looking at a folder failed, it is tried again", True),
        ("looking at a folder failed again: OSError: [Errno 107] not connected", False),
        ("looking at a folder failed: later", False),
    ]


def test_every_task_of_that_kind_runs_here() -> None:
    """What sleeps and works for ever in a loop of its own ends the server with its first unexpected error."""
    found = [
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        if re.search(r"while True:\n\s+await trio\.sleep\(", path.read_text())
    ]
    assert found == []
