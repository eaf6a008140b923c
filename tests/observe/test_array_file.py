"""A growing JSON array: complete at every moment, whatever happens to the process or the file."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from neptrio.observe.array_file import ArrayFile, sweep


def read(path: Path) -> list[Any]:
    found: list[Any] = json.loads(path.read_bytes())
    return found


@pytest.fixture(params=["change places", "hard links", "neither"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> ArrayFile:
    """An array in each of the ways that file systems allow."""
    name = "t"
    if request.param == "neither":  # the name for a link on the way becomes longer than names may be
        name = "t" * (255 - len(f".{os.getpid()}.tmp"))
    made = ArrayFile(str(tmp_path / name))
    made.exchange = request.param == "change places"
    return made


def test_it_grows(file: ArrayFile, tmp_path: Path) -> None:
    path = Path(file.path)
    for i in range(20):
        file.append(b"%d,%d" % (2 * i, 2 * i + 1))
        assert read(path) == list(range(2 * i + 2))
        if i == 9:
            file.rest()
            assert os.listdir(tmp_path) == [path.name]
    file.rest()
    assert os.listdir(tmp_path) == [path.name]


def test_several_pieces_at_once(file: ArrayFile) -> None:
    file.append(b"1", b"2,3", b"4")
    file.append(b"5", b"6")
    assert read(Path(file.path)) == [1, 2, 3, 4, 5, 6]
    large = b"x" * 300_000
    file.append((b"7,", b'"', large, b'"'), b"8", (b"9",))
    assert read(Path(file.path)) == [1, 2, 3, 4, 5, 6, 7, large.decode(), 8, 9]
    with pytest.raises(TypeError):
        file.append((b"10", "11"))  # type: ignore[arg-type]
    assert len(read(Path(file.path))) == 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_pieces_of_all_sizes_and_numbers_arrive_in_order(file: ArrayFile, seed: int) -> None:
    """More than one system call takes, parts of texts, and empty ones."""
    chance = random.Random(seed)
    expected: list[str] = []
    for count in (1, 63, 64, 65, 300):
        pieces: list[bytes | tuple[bytes, ...]] = []
        for number in range(count):
            text = chance.choice("abcdef") * chance.choice([0, 1, 9, 1000, 40_000, 65_534, 65_536, 200_000])
            expected.append(f"{number} {text}")
            parts = b'"%d ' % number, text.encode(), b"", b'"'
            pieces.append(chance.choice([parts, b"".join(parts)]))
        file.append(*pieces)
        assert read(Path(file.path)) == expected


def written() -> int:
    """Bytes that this thread has written with system calls."""
    lines = Path("/proc/thread-self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


@pytest.mark.parametrize("exchange", [True, False])
def test_nothing_is_written_twice_over(tmp_path: Path, exchange: bool) -> None:
    file = ArrayFile(str(tmp_path / "t"))
    file.exchange = exchange
    content = b'"' + b"x" * 1000 + b'"'
    before = written()
    for _ in range(200):
        file.append(content)
    file.rest()
    assert read(tmp_path / "t") == ["x" * 1000] * 200
    # each text twice, whatever the size of the file
    assert 1.9 * 200 * len(content) < written() - before < 2.2 * 200 * len(content)


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


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Writing beyond `size` bytes of a file fails, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_changes_nothing(file: ArrayFile, tmp_path: Path) -> None:
    path = Path(file.path)
    file.append(b"1")
    file.append(b"2")
    with files_up_to(path.stat().st_size + 2), pytest.raises(OSError, match="File too large"):
        file.append(b"3")
    assert read(path) == [1, 2] and os.listdir(tmp_path) == [path.name]
    in_the_middle = path.stat().st_size + 100_000
    with files_up_to(in_the_middle), pytest.raises(OSError, match="File too large"):
        file.append((b'"', b"x" * 30_000, b"y" * 90_000, b'"'), b"4")
    assert read(path) == [1, 2] and os.listdir(tmp_path) == [path.name]
    file.append(b"4")
    assert read(path) == [1, 2, 4]


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
    dead = int(gone.stdout)
    stale = [tmp_path / name for name in (f"t.{dead}.tmp", f"t.{dead}.tmp2", f"t.12.{dead}.tmp")]
    others = [tmp_path / name for name in ("t.1.tmp", f"t.3.{os.getpid()}.tmp", f"u.{dead}.tmp", "t.x.tmp")]
    for path in (*stale, *others):
        path.touch()
    sweep(str(tmp_path / "t"))
    assert not any(path.exists() for path in stale) and all(path.exists() for path in others)


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


@pytest.mark.slow
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
            with more:  # a file is open during one change at most (cext/observe/array_file, rule 2)
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
