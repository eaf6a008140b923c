"""Signals that come while the program is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from neptrio.process_start import Uninterrupted

# the signal comes when a module is about to be imported
HOOK = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job does not have

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["AT"]:
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["neptrio.cli", "numpy._core.umath", "neptrio.server_process", "trio"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_ends_it_quietly(tmp_path: Path, number: int, module: str) -> None:
    (tmp_path / "hook").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "hook/sitecustomize.py").write_text(HOOK)
    done = subprocess.run(
        [sys.executable, "-m", "neptrio", str(tmp_path / "models"), "--http-port=0"],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "hook"), "AT": module, "SIGNAL": str(int(number))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-number, "", "")


def test_the_command_begins_there() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert '\nneptrio = "neptrio.__main__:main"\n' in text


def test_an_interrupt_waits_for_the_end_of_an_import() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    steps = []
    try:
        with pytest.raises(KeyboardInterrupt), Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            steps.append("imported")
        assert steps == ["imported"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
