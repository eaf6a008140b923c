"""Signals to a program with a server in it: Ctrl-C ends it at once whatever an async function waits for, SIGTERM leaves no folder."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
import trio
import neptrio

server = neptrio.Server(exit_timeout_secs=3600)

@server.function
async def patient(n: int) -> int:
    print("asked", flush=True)
    await asyncio.Event().wait()
    return n

def blocking():
    with server.running() as running:
        running.model("patient").infer({"n": 1})

async def tasks():
    async with server:
        await server.model("patient").infer({"n": 1})

{"blocking": blocking, "asyncio": lambda: asyncio.run(tasks()), "trio": lambda: trio.run(tasks)}[sys.argv[1]]()
"""


INTERRUPTED_ANYWHERE = """
import asyncio, sys
import neptrio

# a busy machine is no matter here: what is said of a slow loop would be an error
server = neptrio.Server(exit_timeout_secs=3600, loop_lag_warning_ms=0)

@server.function
async def patient(n: int) -> int:
    await asyncio.Event().wait()
    return n

# Python looks for signals where a function begins, and where one written in C has returned.
def moments_until_it_waits(call, interrupt_at=None):
    moments = 0
    def profiler(frame, event, arg):
        nonlocal moments
        if "/neptrio/embedded/" not in frame.f_code.co_filename or event not in ("call", "c_return"):
            return
        moments += 1
        if moments == interrupt_at or frame.f_code.co_qualname == "ThreadMail.get":
            raise KeyboardInterrupt
    sys.setprofile(profiler)
    try:
        call()
    except KeyboardInterrupt:
        return moments
    finally:
        sys.setprofile(None)

with server.running() as running:
    model = running.model("patient")
    ways = {
        "infer": lambda: model.infer({"n": 1}),
        "stream": lambda: list(model.stream({"n": 1})),
        "infer_each": lambda: list(model.infer_each([{"n": 1}, {"n": 2}])),
        "ready": running.ready,
        "add": lambda: running.add(patient, name="added", replace=True),
    }
    call = ways[sys.argv[1]]
    moments = moments_until_it_waits(call)
    for moment in range(1, moments + 1):
        moments_until_it_waits(call, moment)
    print(moments, flush=True)
"""


@contextmanager
def program(text: str, way: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", text, way],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"TMPDIR": str(folder), "PATH": ""},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def ended_by(number: signal.Signals, way: str, folder: Path) -> tuple[int, str]:
    """The exit status of the program, and its errors, after a signal while the model is asked."""
    with program(PROGRAM, way, folder) as process:
        assert process.stdout is not None and process.stdout.readline() == "asked\n"
        assert len(list(folder.iterdir())) == 1, "its functions' folder"
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        return process.returncode, errors


@pytest.mark.slow
@pytest.mark.parametrize("way", ["blocking", "asyncio", "trio"])
def test_the_program_ends_and_leaves_nothing(tmp_path: Path, way: str) -> None:
    status, errors = ended_by(signal.SIGINT, way, tmp_path)
    assert status in (-signal.SIGINT, 1), errors  # 1: trio has put it into a group
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert list(tmp_path.iterdir()) == []
    assert ended_by(signal.SIGTERM, way, tmp_path)[0] == -signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["infer", "stream", "infer_each", "ready", "add"])
def test_a_request_is_cancelled_at_whichever_moment_its_caller_is_interrupted(
    tmp_path: Path, way: str
) -> None:
    with program(INTERRUPTED_ANYWHERE, way, tmp_path) as process:
        output, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, "")
        assert int(output) > 5, "moments at which it was interrupted"
