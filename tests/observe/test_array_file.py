"""A growing JSON array: complete at every moment, whatever happens to the process or the file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from neptrio.observe import array_file
from neptrio.observe.array_file import ArrayFile


def read(path: Path) -> list[Any]:
    found: list[Any] = json.loads(path.read_bytes())
    return found


def test_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "t"
    file = ArrayFile(str(path))
    for i in range(20):
        file.append(b"%d,%d" % (2 * i, 2 * i + 1))
        assert read(path) == list(range(2 * i + 2))
        if i == 9:
            file.rest()
            assert os.listdir(tmp_path) == ["t"]
    file.rest()
    assert os.listdir(tmp_path) == ["t"]


def test_nothing_is_written_twice_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = 0
    write = array_file._write

    def counted(out: Any, content: bytes) -> None:
        nonlocal written
        written += len(content)
        write(out, content)

    monkeypatch.setattr(array_file, "_write", counted)
    file = ArrayFile(str(tmp_path / "t"))
    content = b'"' + b"x" * 1000 + b'"'
    for _ in range(200):
        file.append(content)
    file.rest()
    assert written < 3 * 200 * len(content)  # each text twice, whatever the size of the file


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    file = ArrayFile(str(tmp_path / "t"))
    for i in range(5):
        file.append(b"%d" % i)
        assert read(tmp_path / "t") == list(range(i + 1)) and os.listdir(tmp_path) == ["t"]


@pytest.mark.parametrize("change", ["moved", "removed", "truncated", "longer"])
def test_a_file_that_somebody_changed_is_left_alone(tmp_path: Path, change: str) -> None:
    path = tmp_path / "t"
    file = ArrayFile(str(path))
    file.append(b"1")
    file.append(b"2")
    if change == "moved":
        path.rename(tmp_path / "moved")
    elif change == "removed":
        path.unlink()
    elif change == "truncated":
        path.write_bytes(b"")
    else:
        path.write_bytes(path.read_bytes() + b"more")
    file.append(b"3")
    file.append(b"4")
    assert read(path) == [3, 4]
    if change == "moved":
        assert read(tmp_path / "moved") == [1, 2]


def test_a_failed_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ArrayFile(str(tmp_path / "t"))
    file.append(b"1")
    file.append(b"2")
    write = array_file._write

    def full(out: Any, content: bytes) -> None:
        out.write(content[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(array_file, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        file.append(b"3")
    assert read(tmp_path / "t") == [1, 2] and os.listdir(tmp_path) == ["t"]
    monkeypatch.setattr(array_file, "_write", write)
    file.append(b"4")
    assert read(tmp_path / "t") == [1, 2, 4]


def test_take_over(tmp_path: Path) -> None:
    one, other = ArrayFile(str(tmp_path / "one")), ArrayFile(str(tmp_path / "other"))
    one.append(b"1")
    other.append(b"2")
    other.append(b"3")
    one.take_over(other)
    assert read(tmp_path / "one") == [1, 2, 3] and not (tmp_path / "other").exists()


def test_spares_of_servers_that_are_gone_are_removed(tmp_path: Path) -> None:
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    stale = tmp_path / f"t.{int(gone.stdout)}.tmp"
    alive = tmp_path / "t.1.tmp"
    for path in (stale, alive):
        path.touch()
    ArrayFile(str(tmp_path / "t")).append(b"1")
    assert not stale.exists() and alive.exists()


KILLED = """
import sys
from neptrio.observe.array_file import ArrayFile
file = ArrayFile(sys.argv[1])
number = 0
while True:
    file.append(b",".join(b'{"id":%d,"pad":"%s"}' % (i, b"x" * 3000) for i in range(number, number + 40)))
    number += 40
    print(number, flush=True)
"""


@pytest.mark.parametrize("rounds", [1, 2, 5, 9, 30])
def test_kill_9_in_the_middle_of_writing(tmp_path: Path, rounds: int) -> None:
    path = tmp_path / "t"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", KILLED, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for _ in range(rounds):
            settled = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = [item["id"] for item in read(path)]
    assert found == list(range(len(found))) and len(found) >= settled


def test_readers_always_find_a_complete_array(tmp_path: Path) -> None:
    path = tmp_path / "t"
    file = ArrayFile(str(path))
    file.append(b"0")
    reads = 0
    more = threading.Condition()
    done = threading.Event()

    def grow() -> None:
        for i in range(1, 100):
            file.append(b'{"id":%d,"pad":"%s"}' % (i, b"y" * 50000))
            with more:  # a file is open during one change at most (rule 2)
                seen = reads
                more.wait_for(lambda seen=seen: reads > seen + 1)
        done.set()

    writer = threading.Thread(target=grow)
    writer.start()
    sizes = []
    while not done.is_set():
        sizes.append(len(read(path)))
        with more:
            reads += 1
            more.notify()
    writer.join()
    assert sizes == sorted(sizes) and len(read(path)) == 100
