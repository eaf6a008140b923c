"""A model's process that gets no thread says so to whoever needs it, and goes on."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from triton_python_backend_utils._process import threads
from triton_python_backend_utils._process.child import Child
from triton_python_backend_utils._process.wire import Wire

REFUSED = "the system gives the model's process no further thread now (limit of threads, or memory)"


class Own(Child):
    """A process without rings, whose model needs a thread to serve."""

    def prepare(self, message: dict[str, Any]) -> None:
        pass

    def begin(self) -> None:
        threads.start(print)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Own, Wire]]:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ours, theirs = socket.socketpair()
    monkeypatch.setattr(threading.Thread, "start", start)
    yield Own(ours), Wire(theirs)
    ours.close()
    theirs.close()


def test_a_question_that_needs_a_thread_is_answered(
    ends: tuple[Own, Wire], capsys: pytest.CaptureFixture[str]
) -> None:
    child, server = ends
    child._ask_whether_ready(3)
    assert server.receive() == {"t": "is_ready", "k": 3, "ready": False}
    assert REFUSED in capsys.readouterr().err


def test_initialize_fails_where_nothing_could_serve(ends: tuple[Own, Wire], tmp_path: Path) -> None:
    child, server = ends
    file = tmp_path / "model.py"
    file.write_text("class TritonPythonModel:\n    def execute(self, requests):\n        return []\n")
    asked = {
        "t": "initialize",
        "name": "m_0",
        "path": str(file),
        "folder": str(file.parent),
        "decoupled": False,
        "spans": None,
        "args": {},
    }
    child._guarded(child._initialize, asked)
    answer = server.receive()
    assert answer is not None and answer["t"] == "failed" and REFUSED in answer["text"]
    assert child.model is None


@pytest.mark.slow
def test_the_end_of_a_thread_that_others_wait_for_ends_the_process() -> None:
    program = (
        "import threading\n"
        "from triton_python_backend_utils._process import threads\n"
        "threads.start(int, 'no number')\n"
        "threading.Event().wait()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "ValueError: invalid literal for int() with base 10: 'no number'" in ended.stderr
