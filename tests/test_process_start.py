"""What a process meets at its start: signals that come while the program is imported, streams that are closed."""

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


@pytest.mark.slow
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_streams_that_are_closed_lead_nowhere(tmp_path: Path, closed: tuple[int, ...]) -> None:
    """Their numbers are nobody else's, and what is printed is no error."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "t").write_text('[{"model_name":"m","id":1}]')
    told = tmp_path / "told"
    hook = f"""
import atexit, os
atexit.register(lambda: open({str(told)!r}, "w").write(" ".join(os.readlink(f"/proc/self/fd/{{n}}") for n in {closed})))
"""
    (tmp_path / "hook/sitecustomize.py").write_text(hook)
    command = [sys.executable, "-m", "neptrio", "trace", "export", str(tmp_path / "t")]
    shell = 'exec "$@" ' + " ".join(f"{number}{'>' if number else '<'}&-" for number in closed)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "hook"), os.environ.get("PYTHONPATH", "")])
    }
    assert subprocess.run(["sh", "-c", shell, "sh", *command], env=env).returncode == 0
    assert told.read_text().split() == ["/dev/null"] * len(closed)


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
