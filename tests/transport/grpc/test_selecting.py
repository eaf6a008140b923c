"""The queue of answers that workers classify."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from neptrio.request.infer_request import InferRequest, InferResponse
from neptrio.transport.grpc import selecting
from neptrio.transport.grpc.selecting import Selecting


def test_a_stream_that_ends_when_its_answer_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has finished already, so that cancelling comes too late."""
    told: list[Any] = []

    class Connection:
        wire: Any
        services = None

        def flush_soon(self) -> None:
            told.append("flush")

    async def ready(*_: Any) -> None:
        queue.end()

    monkeypatch.setattr(selecting, "select_later", ready)
    monkeypatch.setattr(selecting, "_slow", lambda request, response: True)
    connection: Any = Connection()
    queue = Selecting(connection, lambda *answer: told.append(answer), lambda size: told.append(size))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            connection.wire = SimpleNamespace(start=nursery.start_soon)
            assert queue.take(InferRequest(), InferResponse([]), True)

    trio.run(main)
    assert told == [0, 0], "what it holds is counted, and given back"
