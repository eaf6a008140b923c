"""`neptrio trace export`: are the events what the Trace Event Format allows, and nested as viewers need?"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from neptrio import commands

FIELDS = {  # ph -> members that such an event has, beside ph, name, pid and tid
    "X": {"ts", "dur", "cat", "args"},
    "M": {"args"},
    "i": {"ts", "cat", "s", "args"},
    "s": {"ts", "cat", "id"},
    "f": {"ts", "cat", "id", "bp"},
}


def export(path: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """The events of a file, after checking each by itself and all of them together."""
    out = tmp_path / "events.json"
    assert commands.run("trace", ["export", "--format", "perfetto", "-o", str(out), str(path)]) == 0
    found = json.loads(out.read_text(), parse_float=Decimal)
    assert set(found) == {"displayTimeUnit", "traceEvents"}
    events: list[dict[str, Any]] = found["traceEvents"]
    named: set[tuple[int, int]] = set()
    lanes: dict[tuple[int, int], list[tuple[Decimal, Decimal]]] = defaultdict(list)
    for event in events:
        assert set(event) == {"ph", "name", "pid", "tid"} | FIELDS[event["ph"]], event
        assert isinstance(event["name"], str) and event["pid"] > 0 and event["tid"] >= 0
        assert all(event.get(key, Decimal(0)) >= 0 for key in ("ts", "dur"))
        place = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            named.add(place)
        else:
            assert {place, (event["pid"], 0)} <= named  # names come first
        if event["ph"] == "X":
            lanes[place].append((event["ts"], event["ts"] + event["dur"]))
    for slices in lanes.values():
        nested(slices)
    flows(events)
    return events


def nested(slices: list[tuple[Decimal, Decimal]]) -> None:
    """Two slices of a lane are nested or apart."""
    above: list[Decimal] = []
    for start, end in sorted(slices, key=lambda s: (s[0], -s[1])):
        while above and above[-1] <= start:
            above.pop()
        assert not above or end <= above[-1], (start, end, above)
        above.append(end)


def flows(events: list[dict[str, Any]]) -> None:
    """Every flow has one begin and one end, not before it, each inside a slice of its lane."""
    ends: dict[str, dict[int, dict[str, Any]]] = {"s": {}, "f": {}}
    for event in events:
        if event["ph"] in ends:
            assert event["id"] not in ends[event["ph"]]
            ends[event["ph"]][event["id"]] = event
            assert any(
                slice_["ph"] == "X" and (slice_["pid"], slice_["tid"]) == (event["pid"], event["tid"])
                and slice_["ts"] <= event["ts"] <= slice_["ts"] + slice_["dur"]
                for slice_ in events
            )  # fmt: skip
    assert set(ends["s"]) == set(ends["f"])
    assert all(ends["s"][number]["ts"] <= end["ts"] for number, end in ends["f"].items())


def requests(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {event["args"]["id"]: event for event in events if event.get("cat") == "request"}


def write(path: Path, traces: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(traces))
    return path


def points(*pairs: tuple[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "ns": ns} for name, ns in pairs]


@pytest.mark.parametrize("action", ["export", "view"])
def test_the_trace_file_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    text = write(tmp_path / "t", [{"id": 1}]).read_text()
    (tmp_path / "link").symlink_to("t")
    for name in ("t", "link"):
        assert commands.run("trace", [action, "-o", str(tmp_path / name), str(tmp_path / "t")]) == 1
        captured = capsys.readouterr()
        assert "is the trace file itself: name another" in captured.err and not captured.out
    assert (tmp_path / "t").read_text() == text


def test_nothing_is_written_of_what_is_no_trace_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t").write_text("I1129 a log\n")
    (tmp_path / "out").write_text("of before")
    assert commands.run("trace", ["export", str(tmp_path / "t")]) == 1
    assert not capsys.readouterr().out
    assert commands.run("trace", ["export", "-o", str(tmp_path / "out"), str(tmp_path / "t")]) == 1
    assert (tmp_path / "out").read_text() == "of before"


def test_every_kind_of_request(every_kind: Path, tmp_path: Path) -> None:
    events = export(every_kind, tmp_path)
    traces = {item["id"]: item for item in json.loads(every_kind.read_text()) if "timestamps" in item}
    found = requests(events)
    assert set(found) == set(traces)
    for number, event in found.items():
        trace = traces[number]
        times = {stamp["name"]: stamp["ns"] for stamp in trace["timestamps"]}
        start = next(
            times[name] for name in ("HTTP_RECV_START", "GRPC_WAITREAD_END", "REQUEST_START") if name in times
        )
        assert (event["ts"], event["dur"]) == (
            Decimal(start) / 1000,
            Decimal(trace["timestamps"][-1]["ns"] - start) / 1000,
        )
        assert event["name"] == f"{trace['model_name']} (1)"
        assert event["args"].get("request_id") == trace.get("request_id")
        assert event["args"].get("error") == trace.get("error")
        parent = trace.get("parent_id")
        if parent:  # within its parent in time, and by its side or inside it
            above = found[parent]
            assert above["ts"] <= event["ts"] and event["ts"] + event["dur"] <= above["ts"] + above["dur"]
            assert event["pid"] == above["pid"]
    outcomes = {event["args"]["outcome"] for event in found.values()}
    assert outcomes == {"ok", "failed", "cancelled"}
    assert sum(event["ph"] == "i" for event in events) == 3  # the decoupled model's responses
    stages = {event["name"] for event in events if event.get("cat") == "stage"}
    assert {"receive", "queue", "input", "infer", "output", "send", "overhead", "steps", "cache"} >= stages
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert sorted(processes) == sorted(
        {trace["model_name"] for trace in traces.values() if "parent_id" not in trace}
    )


def test_stages_of_a_request(tmp_path: Path) -> None:
    times = points(("HTTP_RECV_START", 1_000_000_000_000_001), ("HTTP_RECV_END", 1_000_000_000_021_002),
                   ("REQUEST_START", 1_000_000_000_030_000), ("REQUEST_END", 1_000_000_000_040_000))  # fmt: skip
    events = export(
        write(tmp_path / "t", [{"id": 7, "model_name": "m", "model_version": 2, "timestamps": times}]),
        tmp_path,
    )
    rows = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert rows == [
        ("m (2)", Decimal("1000000000000.001"), Decimal("39.999")),
        ("receive", Decimal("1000000000000.001"), Decimal("21.001")),
        ("overhead", Decimal("1000000000021.002"), Decimal("8.998")),
        ("overhead", Decimal("1000000000030.000"), Decimal("10.000")),
    ]


def test_parallel_steps_get_lanes_of_their_own_and_flows(tmp_path: Path) -> None:
    def part(number: int, parent: int, start: int, end: int) -> dict[str, Any]:
        times = points(("REQUEST_START", start), ("QUEUE_START", start + 1), ("REQUEST_END", end))
        top = {"id": number, "model_name": f"m{number}", "model_version": 1, "timestamps": times}
        return {**top, "parent_id": parent} if parent else top

    root, left, right, after, deep = (
        part(1, 0, 1000, 9000), part(2, 1, 2000, 5000), part(3, 1, 3000, 6000), part(4, 1, 6000, 8000),
        part(5, 3, 3500, 4000),
    )  # fmt: skip
    for order in ([root, left, right, after, deep], [deep, after, right, left, root]):
        events = export(write(tmp_path / "t", order), tmp_path)
        lanes = {number: event["tid"] for number, event in requests(events).items()}
        assert lanes[1] == lanes[2] == lanes[4] and lanes[3] == lanes[5] != lanes[1]
        assert [event["id"] for event in events if event["ph"] == "s"] == [3]


@pytest.mark.slow
def test_requests_that_overlap(tmp_path: Path) -> None:
    """Any times: slices of a lane are nested or apart, and lanes are used again."""
    rng = random.Random(11)
    traces: list[dict[str, Any]] = []
    for number in range(1, 3001):
        start = number * 100 + rng.randrange(50)
        cut = sorted(start + rng.randrange(900) for _ in range(6))
        names = [
            "GRPC_WAITREAD_START",
            "GRPC_WAITREAD_END",
            "REQUEST_START",
            "QUEUE_START",
            "COMPUTE_START",
            "REQUEST_END",
        ]
        trace: dict[str, Any] = {"id": number, "model_name": f"m{number % 3}", "model_version": 1,
                                 "timestamps": points(*zip(names, cut, strict=True))}  # fmt: skip
        if number > 5 and rng.random() < 0.3:
            trace["parent_id"] = number - rng.randrange(1, 5)
        traces.append(trace)
    rng.shuffle(traces)
    events = export(write(tmp_path / "t", traces), tmp_path)
    assert len(requests(events)) == 3000
    assert max(event["tid"] for event in events) < 60


@pytest.mark.parametrize("content", ["[]", '[{"id": 1, "model_name": "m", "model_version": 1}]', "[1, {}]"])
def test_files_without_times(tmp_path: Path, content: str) -> None:
    path = tmp_path / "t"
    path.write_text(content)
    assert not requests(export(path, tmp_path))
