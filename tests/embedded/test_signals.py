"""Signals to a program with a server in it: Ctrl-C ends it at once whatever an async function waits for, SIGTERM leaves no folder."""

from __future__ import annotations

import signal
import subprocess
import sys
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


def ended_by(number: signal.Signals, way: str, folder: Path) -> tuple[int, str]:
    """The exit status of the program, and its errors, after a signal while the model is asked."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, way],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"TMPDIR": str(folder), "PATH": ""},
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "asked\n"
        assert len(list(folder.iterdir())) == 1, "its functions' folder"
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        return process.returncode, errors
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["blocking", "asyncio", "trio"])
def test_the_program_ends_and_leaves_nothing(tmp_path: Path, way: str) -> None:
    status, errors = ended_by(signal.SIGINT, way, tmp_path)
    assert status in (-signal.SIGINT, 1), errors  # 1: trio has put it into a group
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert list(tmp_path.iterdir()) == []
    assert ended_by(signal.SIGTERM, way, tmp_path)[0] == -signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
