"""What a compiled cache is asked, and when it is not: without a server, with a real process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neptrio.backends.compiled import cache, cache_process, host
from neptrio.backends.compiled.cache import CompiledCache
from neptrio.errors import Unavailable
from neptrio.loop.loop_pass import LoopPass
from neptrio.loop.mailbox import CompletionQueue
from neptrio.loop.timers import Timers
from neptrio.request.infer_request import monotonic_ns
from neptrio.request.numpy_tensor import from_numpy, to_numpy
from neptrio.scheduling.cache_config import CacheConfig
from tests.support.waiting import until

pytestmark = pytest.mark.slow


class Direct:
    """The cache without a server: the test is the trio thread."""

    def __init__(self, library: Path, control: Path, **settings: int) -> None:
        self.control = control
        self.control.write_text("normal")
        self.completions = CompletionQueue()
        self.timers = Timers(LoopPass())
        config = CacheConfig("probe", compiled=True, settings={"control": str(control)}, **settings)  # type: ignore[arg-type]
        self.cache = CompiledCache(config, library, host.library_path(), self.timers, self.completions)

    def __enter__(self) -> Direct:
        self.cache.begin()
        until(lambda: self.pid() is not None)
        return self

    def __exit__(self, *_: object) -> None:
        pid = self.cache.under_way().pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)  # it may hang
        self.cache.close()
        self.turn()
        self.completions.close()

    def turn(self) -> None:
        for item in self.completions.drain():
            item.deliver()

    def pid(self) -> int | None:
        self.turn()
        return self.cache.under_way().pid

    def asked(self, key: bytes) -> Any:
        found: list[Any] = []
        assert self.cache.ask(key, found.append) is not None
        until(lambda: self.turn() or found)
        return found[0]

    def store(self, key: bytes, *arrays: Any) -> None:
        outputs = [from_numpy(f"T{i}", array) for i, array in enumerate(arrays)]
        self.cache.insert(key, outputs)
        until(lambda: self.turn() or not self.cache.under_way().storing_bytes)


@pytest.fixture
def direct(caches: Path, tmp_path: Path) -> Iterator[Direct]:
    with Direct(caches / "probe" / "libtritoncache_probe.so", tmp_path / "control", timeout_ms=100) as made:
        yield made


def test_large_answers_and_many_questions_are_bounded(
    direct: Direct, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = np.arange(3 << 18, dtype=np.int32)  # 3 MiB: received one at a time
    direct.store(b"large", large)
    (found,) = direct.asked(b"large")
    np.testing.assert_array_equal(to_numpy(found), large)
    monkeypatch.setattr(cache_process, "MOST_BYTES", large.nbytes)
    direct.store(b"too large", large)
    monkeypatch.undo()
    assert direct.asked(b"too large") is None
    monkeypatch.setattr(cache, "MOST_STORING", 2 * large.nbytes)
    direct.control.write_text("hang")
    answers: list[Any] = []
    assert direct.cache.ask(b"large", answers.append) is not None
    for key in (b"a", b"b"):
        direct.cache.insert(key, [from_numpy("T", large)])
    assert direct.cache.under_way().questions == 2, "the second would be too much on the way"
    while direct.cache.ask(b"large", answers.append) is not None:
        pass
    assert direct.cache.under_way().questions == cache.MOST_OPEN
    assert answers == []


def test_what_is_overdue_is_a_miss_and_closes_the_cache_to_others(
    direct: Direct, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hung = direct.pid()
    direct.store(b"key", np.zeros(4))
    direct.control.write_text("hang")
    answers: list[Any] = []
    again: list[Any] = []

    def answered(found: Any) -> None:
        answers.append(found)
        again.append(direct.cache.ask(b"key", answers.append))

    now = monotonic_ns()
    monkeypatch.setattr(cache, "monotonic_ns", lambda: now)
    first = direct.cache.ask(b"key", answered)
    second = direct.cache.ask(b"key", answered)
    third = direct.cache.ask(b"key", answered)
    assert first is not None and second is not None and third is not None
    third.forget()
    monkeypatch.setattr(cache, "monotonic_ns", lambda: now + 99_999_999)
    direct.timers.fire(now + 99_999_999)
    assert answers == []
    monkeypatch.setattr(cache, "monotonic_ns", lambda: now + 100_000_000)
    direct.timers.fire(now + 100_000_000)
    assert answers == [None, None] and again == [None, None], (
        "who is answered comes back and is not asked for"
    )
    assert direct.cache.insert(b"other", [from_numpy("T", np.zeros(4))]) is False
    assert direct.cache.under_way().questions == 3
    monkeypatch.setattr(cache, "monotonic_ns", lambda: now + 5_000_000_000)
    direct.timers.fire(now + 5_000_000_000)
    direct.control.write_text("normal")
    until(lambda: direct.pid() not in (None, hung))
    assert "cache 'probe' has ended: it did not answer within 5 s" in caplog.text
    monkeypatch.undo()
    assert direct.asked(b"key") is None, "a new process, which has nothing"
    direct.store(b"key", np.ones(4))
    assert direct.asked(b"key") is not None
    under_way = direct.cache.under_way()
    assert (under_way.questions, under_way.overdue) == (0, 0)
    assert (direct.cache.statistics().lookups, direct.cache.statistics().hits) == (7, 0)


def test_what_nobody_waits_for_any_more_is_overdue_too(
    direct: Direct, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else clients that give up sooner than the time limit would keep a cache that hangs in use."""
    direct.control.write_text("hang")
    answers: list[Any] = []
    now = monotonic_ns()
    monkeypatch.setattr(cache, "monotonic_ns", lambda: now)
    given_up = direct.cache.ask(b"key", answers.append)
    assert given_up is not None
    given_up.forget()
    monkeypatch.setattr(cache, "monotonic_ns", lambda: now + 100_000_000)
    direct.timers.fire(now + 100_000_000)
    assert direct.cache.under_way().overdue == 1
    assert direct.cache.ask(b"key", answers.append) is None
    direct.timers.fire(now + 200_000_000)
    assert direct.cache.under_way().overdue == 1, "once"
    assert answers == [], "who has given up is not told"


def test_nobody_waits_for_the_end_of_a_process_that_hangs(
    direct: Direct, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes seconds where it has much memory: what it was asked a moment before it is killed is a miss in time."""
    direct.control.write_text("hang")
    answers: list[Any] = []
    now = monotonic_ns()
    monkeypatch.setattr(cache, "monotonic_ns", lambda: now)
    direct.cache.insert(b"other", [from_numpy("T", np.zeros(4))])  # which is never overdue
    assert direct.cache.under_way().questions == 1
    monkeypatch.setattr(cache, "monotonic_ns", lambda: now + 4_950_000_000)
    direct.timers.fire(now + 4_950_000_000)
    assert direct.cache.ask(b"key", answers.append) is not None
    for late in (5_000_000_000, 5_050_000_000):
        monkeypatch.setattr(cache, "monotonic_ns", lambda late=late: now + late)
        direct.timers.fire(now + late)
    assert answers == [None]
    assert direct.cache.ask(b"key", answers.append) is None
    monkeypatch.undo()
    direct.control.write_text("normal")
    until(lambda: direct.pid() is not None)
    direct.store(b"key", np.ones(4))
    assert direct.asked(b"key") is not None and answers == [None]


def begun(library: Path, settings: dict[str, str]) -> None:
    """Starts the cache without a server, and ends it."""
    config = CacheConfig("probe", compiled=True, settings=settings)
    completions = CompletionQueue()
    made = CompiledCache(config, library, host.library_path(), Timers(LoopPass()), completions)
    try:
        made.begin()
    finally:
        made.close()
        completions.close()


def test_a_library_that_is_none_and_one_that_cannot_begin(caches: Path, probe: Path, tmp_path: Path) -> None:
    library, control, text = (
        caches / "probe" / "libtritoncache_probe.so",
        tmp_path / "control",
        tmp_path / "text.so",
    )
    begun(library, {"control": str(control)})
    text.write_text("no library at all, but long enough for a header of one " * 4)
    with pytest.raises(Unavailable, match=r"unable to load shared library: .*invalid ELF header"):
        begun(text, {})
    with pytest.raises(Unavailable, match=r"it lacks one of TRITONCACHE_CacheInitialize"):
        begun(probe, {})
    control.write_text("die")
    with pytest.raises(Unavailable, match=r"cannot be used: its process was killed by signal 6 \(Aborted\)"):
        begun(library, {"control": str(control)})
