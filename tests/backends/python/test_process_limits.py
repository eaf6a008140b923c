"""What a model's process says costs the server no more than what it has sent, and what it can have kept has an end."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from neptrio.backends.python import isolated_host, process_session
from neptrio.backends.python.isolated_host import IsolatedHost
from neptrio.request.infer_request import InferRequest
from triton_python_backend_utils import TritonError
from triton_python_backend_utils._process import wire
from triton_python_backend_utils._process.wire import FRAME, Broken, Wire


class Process:
    """Collects what is sent to the process."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def post_message(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def post(self, function: Any) -> None:
        function()

    def send(self, message: dict[str, Any], descriptors: Any = ()) -> None:
        self.sent.append(message)


def services(posted: list[Any]) -> Any:
    family = SimpleNamespace(Metric=lambda *args: object())
    return SimpleNamespace(
        completions=SimpleNamespace(post=posted.append),
        custom_metrics=SimpleNamespace(family=lambda *args: family),
    )


def test_a_length_alone_costs_nothing() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(FRAME.pack(wire.MOST_TEXT) + b"{}")
    theirs.close()
    tracemalloc.start()
    try:
        assert Wire(ours).receive() is None
        assert tracemalloc.get_traced_memory()[1] < 4 * wire.FIRST_READ
    finally:
        tracemalloc.stop()
        ours.close()


@pytest.mark.parametrize("length", [wire.MOST_TEXT + 1, 2**32 - 1])
def test_a_frame_that_is_too_long_is_refused(length: int) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(FRAME.pack(length))
    with pytest.raises(Broken, match=f"a message of {length} bytes; at most"):
        Wire(ours).receive()
    ours.close()
    theirs.close()


@pytest.mark.slow
def test_a_frame_beyond_the_first_read_arrives_whole() -> None:
    ours, theirs = socket.socketpair()
    text = "".join(chr(32 + i % 90) for i in range(3 * wire.FIRST_READ + 17))
    sender = threading.Thread(target=Wire(theirs).send, args=({"t": "log", "text": text},))
    sender.start()
    message = Wire(ours).receive()
    sender.join()
    assert message is not None and message["text"] == text
    ours.close()
    theirs.close()


def test_questions_take_no_threads_and_have_a_limit() -> None:
    process = Process()
    posted: list[Any] = []
    host = IsolatedHost("m_0", "m", services(posted))
    before = set(threading.enumerate())
    for key in range(isolated_host.MOST_QUESTIONS + 5):
        # a child may number several alike
        host.message(process, {"t": "ask", "k": key % 10, "op": "ready", "name": "x", "version": ""})  # type: ignore[arg-type]
    assert set(threading.enumerate()) <= before
    assert len(posted) == isolated_host.MOST_QUESTIONS and len(process.sent) == 5
    assert process.sent[0]["failure"] == (
        TritonError.UNAVAILABLE,
        f"{isolated_host.MOST_QUESTIONS} questions of this process are not answered yet",
    )


def test_metrics_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_host, "MOST_METRICS", 2)
    process = Process()
    host = IsolatedHost("m_0", "m", services([]))

    def ask(key: int, **more: Any) -> dict[str, Any]:
        host.message(process, {"t": "ask", "k": key, **more})  # type: ignore[arg-type]
        return process.sent.pop()

    family = ask(1, op="family", args=["a", "", 0])["value"]
    metric = ask(2, op="metric", id=family, args=[{}, None])["value"]
    assert ask(3, op="metric", id=family, args=[{}, None])["failure"] == (
        TritonError.UNAVAILABLE,
        "a process has at most 2 metrics and families of them",
    )
    host.message(process, {"t": "forget", "id": metric})  # type: ignore[arg-type]
    assert ask(4, op="metric", id=family, args=[{}, None])["failure"] is None


def test_calls_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_session, "MOST_CALLS", 1)
    begun: list[int] = []
    said: list[Any] = []
    monkeypatch.setattr(
        process_session, "IsolatedCall", lambda *_: SimpleNamespace(submit=lambda: begun.append(len(begun)))
    )
    made = process_session.ProcessSession(
        SimpleNamespace(name="m_0", capacity=1), Process(), services([]), False
    )  # type: ignore[arg-type]
    monkeypatch.setattr(made, "end", SimpleNamespace(respond=lambda *given: said.append(given)))
    try:
        for key in (1, 2):
            made.called(key, InferRequest(), False, False, False, None)
    finally:
        made.close()
    assert len(begun) == 1
    ((key, response, final, *_),) = said
    assert (key, final) == (2, True)
    assert str(response.error) == "a process has at most 1 calls of other models under way"


def test_who_begins_to_wait_for_room_while_it_is_looked_for_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    posted: list[Any] = []
    timers: list[Any] = []
    given = SimpleNamespace(
        completions=SimpleNamespace(post=posted.append),
        timers=SimpleNamespace(at=lambda when, look: timers.append(look)),
    )
    made = process_session.ProcessSession(SimpleNamespace(name="m_0", capacity=1), Process(), given, False)  # type: ignore[arg-type]

    def look() -> bool:
        """Nothing waits any more, and then, on another thread, something does."""
        made.lag()
        return False

    monkeypatch.setattr(made, "end", SimpleNamespace(look=look))
    try:
        made.lag()
        posted.pop().deliver()
        timers.pop()()
        assert len(posted) == 1
    finally:
        made.close()
