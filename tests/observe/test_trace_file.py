"""The trace writer: whole files at every moment, indices, limits, failures; tensors as text."""

from __future__ import annotations

import itertools
import json
import resource
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from neptrio.datatypes import NUMBER, NUMPY
from neptrio.observe import trace_file
from neptrio.observe.tensor_copy import TensorCopy
from neptrio.observe.trace_file import TraceWriter
from neptrio.observe.trace_record import tensor_text
from neptrio.observe.trace_settings import DEFAULTS, Scope
from neptrio.request.infer_request import Tensor
from neptrio.request.numpy_tensor import from_numpy
from tests.support.held_event import held_events
from tests.support.waiting import until


class Part:
    """As much of a trace as the writer sees."""

    def __init__(self, number: int, size: int = 0) -> None:
        self.number, self.pad = number, "x" * size
        self.tensors = None

    def text(self) -> bytes:
        return json.dumps({"id": self.number, "pad": self.pad}).encode()

    def drop_tensors(self) -> None:
        pass


def scope(path: Path, frequency: int = 0, count: int = -1) -> Scope:
    values = {"log_frequency": frequency, "trace_file": str(path), "trace_count": count}
    return Scope({}, {**DEFAULTS, **values})


def ids(path: Path) -> list[int]:
    return [item["id"] for item in json.loads(path.read_bytes())]


@pytest.fixture
def writer() -> Any:
    made = TraceWriter(lambda: None)
    yield made
    made.close()


def test_one_growing_file(writer: TraceWriter, tmp_path: Path) -> None:
    path = tmp_path / "t"
    for number in range(4):
        own = scope(path)
        writer.put(own, [Part(number)])
        writer.flush(own, False)
        writer.settle()
        assert ids(path) == list(range(number + 1))
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_nothing_traced_makes_no_file(writer: TraceWriter, tmp_path: Path) -> None:
    for frequency in (0, 2):
        writer.flush(scope(tmp_path / "t", frequency), frequency == 2)
    writer.reset(str(tmp_path / "t"))
    writer.settle()
    assert list(tmp_path.iterdir()) == []


def test_indexed_files_and_the_index(writer: TraceWriter, tmp_path: Path) -> None:
    path, own = tmp_path / "t", scope(tmp_path / "t", 2)
    for number in range(5):
        writer.put(own, [Part(number)])
    writer.flush(own, False)
    used_up = scope(path, count=1)
    writer.put(used_up, [Part(9)])
    writer.flush(used_up, True)  # the count is used up: indexed, though log_frequency is 0
    writer.settle()
    assert [ids(tmp_path / f"t.{i}") for i in range(4)] == [[0, 1], [2, 3], [4], [9]] and not path.exists()
    writer.reset(str(path))
    writer.put(own, [Part(7)])
    writer.flush(own, False)
    writer.settle()
    assert ids(tmp_path / "t.0") == [7]
    assert writer.statistics() == trace_file.TraceWriterStatistics(7, 0, False)


@pytest.mark.parametrize("used_up", [True, False])
def test_scopes_that_share_a_path_never_share_a_file(
    writer: TraceWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture, used_up: bool
) -> None:
    """A model's and the server's, both with a count, and the index begins again while both are under way."""
    path = tmp_path / "t"
    first, second = scope(path, count=5), scope(path, count=5)
    writer.put(first, [Part(0)])
    writer.settle()
    writer.reset(str(path))
    writer.put(second, [Part(10)])
    writer.settle()
    writer.put(first, [Part(1)])
    writer.put(second, [Part(11)])
    for own in (first, second):
        writer.flush(own, used_up)
    writer.settle()
    if used_up:
        assert [ids(tmp_path / f"t.{i}") for i in range(2)] == [[0, 1], [10, 11]]
    else:  # settings have changed: both belong to FILE
        assert ids(path) == [0, 1, 10, 11]
    assert writer.statistics() == trace_file.TraceWriterStatistics(4, 0, False)
    assert not caplog.records


@pytest.mark.parametrize("other", ["./t", "folder/../t", "link/t", "relative", "t/.", "t//"])
def test_a_file_that_settings_spell_in_two_ways_is_one_file(
    writer: TraceWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    spelled = "t" if other == "relative" else f"{tmp_path}/{other}"
    values = [{**DEFAULTS, "trace_file": name} for name in (str(tmp_path / "t"), spelled)]
    scopes = [Scope({}, one) for one in values]
    for number in range(6):
        writer.put(scopes[number % 2], [Part(number)])
        writer.settle()
    assert ids(tmp_path / "t") == list(range(6))


def test_the_number_of_a_file_that_others_append_to_is_left_out(writer: TraceWriter, tmp_path: Path) -> None:
    numbered, other = scope(tmp_path / "t", 1), scope(tmp_path / "t.0")
    for number in range(4):
        writer.put(numbered if number % 2 else other, [Part(number)])
        writer.settle()
    assert ids(tmp_path / "t.0") == [0, 2] and [ids(tmp_path / f"t.{i}") for i in (1, 2)] == [[1], [3]]


def test_many_scopes_together_do_not_wait_in_memory(
    writer: TraceWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "HELD_BYTES", 5000)
    scopes = [scope(tmp_path / f"t{i}", 100) for i in range(10)]
    for number, own in enumerate(scopes * 2):
        writer.put(own, [Part(number, 600)])
    writer.settle()
    written = sum(len(ids(path)) for path in tmp_path.glob("t*.0"))
    assert len(scopes) <= written <= 2 * len(scopes)
    for own in scopes:
        writer.flush(own, False)
    writer.settle()
    assert [ids(tmp_path / f"t{i}.0") for i in range(10)] == [[i, i + 10] for i in range(10)]


@pytest.mark.parametrize("frequency", [0, 6])
def test_large_amounts_do_not_wait_in_memory(
    writer: TraceWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frequency: int
) -> None:
    monkeypatch.setattr(trace_file, "SPILL_BYTES", 1000)
    own, path = scope(tmp_path / "t", frequency), tmp_path / ("t.0" if frequency else "t")
    for number in range(4):
        writer.put(own, [Part(number, 600)])
    writer.settle()
    assert ids(path) == [0, 1, 2, 3]
    for number in range(4, 6):
        writer.put(own, [Part(number)])
    writer.flush(own, False)
    writer.settle()
    assert ids(path) == [0, 1, 2, 3, 4, 5]


def test_texts_are_made_while_traces_gather(
    writer: TraceWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        trace_file, "GATHER_SECONDS", 1000.0
    )  # nothing is written before somebody asks for it
    made: list[int] = []

    class Told(Part):
        def text(self) -> bytes:
            made.append(self.number)
            return super().text()

    own = scope(tmp_path / "t")
    for number in range(3):
        writer.put(own, [Told(number)])
        until(lambda number=number: made == list(range(number + 1)), "its text is made at once")  # type: ignore[misc]
    assert not list(tmp_path.iterdir())
    writer.flush(own, False)
    writer.put(own, [Told(3)])
    writer.settle()
    assert ids(tmp_path / "t") == [0, 1, 2, 3]


def test_gathering_ends_though_traces_come_without_end(writer: TraceWriter, tmp_path: Path) -> None:
    own, ended = scope(tmp_path / "t"), threading.Event()

    class Endless(Part):
        def text(self) -> bytes:
            if not ended.is_set():
                writer.put(own, [Endless(self.number + 1)])
            return super().text()

    writer.put(own, [Endless(0)])
    until(lambda: writer.statistics().written, "what was gathered is on disk, though more has come")
    ended.set()
    writer.settle()
    found = ids(tmp_path / "t")
    assert found == list(range(len(found)))


def test_a_full_queue_drops_traces(
    writer: TraceWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "QUEUE_BYTES", 0)
    own = scope(tmp_path / "t")
    writer.put(own, [Part(1)])
    writer.flush(own, False)
    writer.settle()
    assert writer.statistics().dropped == 1 and list(tmp_path.iterdir()) == []


def test_a_failure_is_told_once_and_ends_with_the_next_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int] = []
    writer = TraceWriter(lambda: told.append(1))
    own = scope(tmp_path / "none" / "t", 1)
    for number in range(3):
        writer.put(own, [Part(number)])
    writer.settle()
    assert told == [1] and len(caplog.records) == 1 and "No such file" in caplog.text
    (tmp_path / "none").mkdir()
    writer.put(own, [Part(5)])
    writer.close()
    assert ids(tmp_path / "none" / "t.0") == [5]


def test_files_where_clients_may_name_them_take_no_more_than_they_may(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int] = []
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "of somebody").write_bytes(bytes(3000))
    writer = TraceWriter(lambda: told.append(1), str(folder), 4000)
    inside, outside = scope(folder / "t"), scope(tmp_path / "t")
    writer.put(inside, [Part(1)])
    writer.settle()
    assert ids(folder / "t") == [1] and not told
    (folder / "of somebody").write_bytes(bytes(4000))
    writer.put(inside, [Part(2)])
    writer.settle()
    assert told == [1] and "--trace-max-bytes" in caplog.text
    assert ids(folder / "t") == [1] and writer.statistics().dropped == 1
    writer.put(outside, [Part(3)])  # what the operator has named has no limit
    writer.settle()
    assert ids(tmp_path / "t") == [3]
    (folder / "of somebody").unlink()
    writer.put(inside, [Part(4)])
    writer.close()
    assert ids(folder / "t") == [1, 4]


def test_a_full_disk_leaves_the_old_file(
    writer: TraceWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = scope(tmp_path / "t")
    writer.put(own, [Part(1)])
    writer.flush(own, False)
    writer.settle()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "t").stat().st_size + 2, hard))
    try:
        writer.put(own, [Part(2)])
        writer.flush(own, False)
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["t"] and ids(tmp_path / "t") == [1]
    assert writer.statistics().failed
    assert f"File too large: '{tmp_path / 't'}'" in caplog.text


def test_files_that_are_no_traces_are_never_replaced(
    writer: TraceWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of numbered files those that are taken are left out; trace files of earlier runs make room."""
    path = tmp_path / "t"
    (tmp_path / "t.0").write_text("a letter")
    (tmp_path / "t.1").mkdir()
    (tmp_path / "t.2").symlink_to(tmp_path / "gone")
    (tmp_path / "t.3").write_text('[\n{"id": 7}\n]\n')
    (tmp_path / "t.5").write_bytes(b"")
    (tmp_path / "t.6").write_bytes(b"\x7fELF")
    for own in (scope(path, frequency=1), scope(path, count=5)):  # each trace; the count is used up
        for number in (1, 2):
            writer.put(own, [Part(number)])
        writer.flush(own, True)
        writer.settle()
    assert ids(tmp_path / "t.3") == [1] and ids(tmp_path / "t.4") == [2]
    assert ids(tmp_path / "t.5") == [1, 2]
    assert (tmp_path / "t.0").read_text() == "a letter" and (tmp_path / "t.6").read_bytes() == b"\x7fELF"
    assert (tmp_path / "t.1").is_dir() and (tmp_path / "t.2").is_symlink()
    assert not (tmp_path / "gone").exists() and not path.exists()
    assert caplog.text.count("its number is left out") == 3
    assert not writer.statistics().failed


def test_a_trace_file_that_came_to_be_something_else_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was fine when it was set; now FILE is somebody's, and traces end with one message."""
    told: list[int] = []
    writer = TraceWriter(lambda: told.append(1))
    path = tmp_path / "t"
    path.write_text("a letter")
    own = scope(path)
    writer.put(own, [Part(1)])
    writer.flush(own, False)
    writer.settle()
    assert told == [1] and path.read_text() == "a letter" and writer.statistics().dropped == 1
    assert "exists and is no trace file: it would be lost" in caplog.text
    path.unlink()
    writer.put(own, [Part(2)])
    writer.close()
    assert ids(path) == [2]


def test_a_writer_that_is_closed_just_before_it_looks_for_work_ends(tmp_path: Path) -> None:
    with held_events() as events:
        writer = TraceWriter(lambda: None)
    writer.reset(str(tmp_path / "t"))
    assert events.reached.wait(60)
    closing = threading.Thread(target=writer.close, daemon=True)
    closing.start()
    until(lambda: events.sets == 3, "close() has woken the thread")
    events.go_on()
    closing.join(60)
    assert not closing.is_alive()


def test_traces_are_on_disk_soon(writer: TraceWriter, tmp_path: Path) -> None:
    writer.put(scope(tmp_path / "t"), [Part(1)])
    until((tmp_path / "t").exists, "nobody asks for it")
    writer.settle()  # it is counted once it is written
    assert ids(tmp_path / "t") == [1] and writer.statistics().written == 1


def test_traces_are_on_disk_soon_also_when_more_come_all_the_time(
    writer: TraceWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = scope(tmp_path / "t")
    monkeypatch.setattr(trace_file, "SPILL_BYTES", 1 << 40)
    numbers = itertools.count()
    come = threading.Event()
    text = trace_file.group_text

    def one_more(parts: Any) -> bytes:
        if not come.is_set():
            writer.put(own, [Part(next(numbers))])
        return text(parts)

    monkeypatch.setattr(trace_file, "group_text", one_more)
    writer.put(own, [Part(next(numbers))])
    try:
        until((tmp_path / "t").exists, "it does not wait for an end")
    finally:
        come.set()
    writer.settle()  # one more may have been under way when the end came
    writer.flush(own, False)
    writer.settle()
    assert ids(tmp_path / "t") == list(range(next(numbers)))


def test_with_a_count_traces_grow_where_they_belong_once_it_is_used_up(
    writer: TraceWriter, tmp_path: Path
) -> None:
    own = scope(tmp_path / "t", count=3)
    for number in range(3):
        writer.put(own, [Part(number)])
        writer.settle()
        assert ids(tmp_path / "t.0") == list(range(number + 1)) and not (tmp_path / "t").exists()
    writer.flush(own, True)
    early = scope(tmp_path / "t", count=9)
    writer.put(early, [Part(3)])
    writer.settle()
    assert ids(tmp_path / "t.1") == [3]
    writer.put(early, [Part(4)])
    writer.flush(early, False)  # settings change before the count is used up
    writer.settle()
    assert ids(tmp_path / "t") == [3, 4]
    last = scope(tmp_path / "t", 1)
    writer.put(last, [Part(5)])
    writer.settle()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t", "t.0", "t.1"] and ids(tmp_path / "t.1") == [5]


def _document(copied: TensorCopy) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(b"".join(tensor_text(copied)))
    return made


@pytest.mark.parametrize("name", [n for n in NUMBER if n not in ("BYTES", "BF16", "BOOL")])
def test_numbers_read_back(name: str) -> None:
    dtype = NUMPY[NUMBER[name]]
    if name.startswith("FP"):
        array = np.array([[0.1, -2.5, 65504, np.inf, -np.inf, 1e-7]], dtype)
    else:
        limits = np.iinfo(dtype)
        array = np.array([[limits.min, limits.max, 1, 65]], dtype)
    made = _document(TensorCopy(from_numpy("x", array), 1 << 20))
    assert made["shape"] == ",".join(map(str, array.shape)) and made["dtype"] == name
    read = np.array([dtype.type(text) for text in made["data"].split(",")], dtype)
    np.testing.assert_array_equal(read, array[0])


def test_bool_bf16_and_bytes() -> None:
    def document(array: Any) -> dict[str, Any]:
        return _document(TensorCopy(from_numpy("x", array), 1 << 20))

    assert document(np.array([True, False]))["data"] == "1,0"
    half = document(np.array([1.5, -3], ml_dtypes.bfloat16))
    assert (half["data"], half["dtype"], half["source_dtype"]) == ("1.5,-3.0", "FP32", "BF16")
    text = document(np.array([b'a"b\\', b"\xff\x00", "ü".encode()], dtype=np.object_))
    assert text["data"] == '"a\\"b\\\\","\\\\xff\x00","ü"'
    assert document(np.zeros((0, 3), np.float32))["data"] == ""


def test_size_limit_marks_what_is_cut() -> None:
    numbers = _document(TensorCopy(from_numpy("x", np.arange(10, dtype=np.int32).reshape(2, 5)), 14))
    assert numbers == {"name": "x", "data": "0,1,2", "shape": "3", "dtype": "INT32", "truncated_from": "2,5"}
    text = _document(TensorCopy(from_numpy("x", np.array([b"abc", b"defg"], np.object_)), 9))
    assert (text["data"], text["shape"], text["truncated_from"]) == ('"abc"', "1", "2")


def test_a_copy_does_not_change_with_its_tensor() -> None:
    memory = bytearray(b"\1\2")
    copied = TensorCopy(Tensor("x", NUMBER["UINT8"], (2,), memory), 100)
    copied.make()
    memory[0] = 9
    assert _document(copied)["data"] == "1,2"
