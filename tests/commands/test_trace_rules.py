"""Files of a real server under the public summary tool's rules, and our report beside theirs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from neptrio import commands
from tests.support import summary_rules
from tests.support.traced import HARD, Traced, hard, sixteen

TITLES = {"request": "infer request", "receive": "Receive", "wait": "Wait/Read", "send": "Send", "handler": "Handler",
          "queue": "Queue", "compute": "Compute", "input": "Input", "infer": "Infer", "output": "Output"}  # fmt: skip


def report(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str, int], dict[str, float]]:
    """Our averages in us by front, model and version; "count" too."""
    capsys.readouterr()
    assert commands.run("trace", ["summary", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found: dict[tuple[str, str, int], dict[str, float]] = {}
    title, count, front, rows = ("", 0), 0, "", {}
    for line in captured.out.splitlines():
        if head := re.fullmatch(r"Summary for (.*) \((\d+)\): trace count = (\d+)", line):
            title, count, rows = (head[1], int(head[2])), int(head[3]), {}
        elif row := re.fullmatch(r" *(?:(HTTP|GRPC) )?(.*?) \(avg\): (\d+)us", line):
            if row[1]:
                front = row[1]
                found[front, *title] = rows
                rows["count"] = count
            if row[2] != "Overhead":
                rows[next(key for key, text in TITLES.items() if text == row[2])] = float(row[3])
    return found


def test_every_kind_of_request_satisfies_the_rules(every_kind: Path) -> None:
    """HTTP, gRPC, stream, ensembles, BLS, decoupled, cached, failed and cancelled requests with tensors."""
    counts = {key: len(spans["handler"]) for key, spans in summary_rules.summary(every_kind).items()}
    assert counts == {
        ("HTTP", "single", 1): 2 + 2 + 3 + 1, ("HTTP", "pipeline", 1): 2, ("HTTP", "nested", 1): 1,
        ("HTTP", "caller", 1): 1, ("HTTP", "cached", 1): 2, ("HTTP", "failing", 1): 1,
        ("GRPC", "single", 1): 2 + 2, ("GRPC", "pipeline", 1): 1, ("GRPC", "repeat", 1): 1, ("GRPC", "gate", 1): 1,
    }  # fmt: skip
    traces = summary_rules.load(every_kind)
    assert {
        activity for trace in traces.values() for activity, _ in trace["tensors"]
    } == summary_rules.ACTIVITIES


def test_our_report_has_the_averages_of_the_rules(
    every_kind: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = report(every_kind, capsys)
    theirs = summary_rules.summary(every_kind)
    assert set(ours) == {key for key, spans in theirs.items() if "request" in spans}
    for key, rows in ours.items():
        expected = theirs[key]
        assert rows.pop("count") == len(expected["handler"])
        for stage, us in rows.items():
            number = len(expected["request"] if stage in ("request", "receive", "wait", "send") else expected["handler"])  # fmt: skip
            assert us == pytest.approx(sum(expected[stage]) / number / 1000, abs=0.51), (key, stage)
        assert set(rows) == set(expected)


def test_every_datatype_satisfies_the_rules(traced: Traced, capsys: pytest.CaptureFixture[str]) -> None:
    with traced.tracing(traced.folder / "rules_datatypes.json", "TIMESTAMPS", "TENSORS") as path:
        with httpclient.InferenceServerClient(traced.server.http) as client:
            for name in HARD:
                client.infer(f"type_{name}", hard(httpclient, name))
    assert len(summary_rules.summary(path)) == len(HARD) == len(report(path, capsys))


@pytest.mark.parametrize("frequency", ["0", "5"])
def test_many_requests_of_both_protocols(traced: Traced, frequency: str) -> None:
    name = f"rules_many_{frequency}.json"
    with traced.tracing(traced.folder / name, "TIMESTAMPS", log_frequency=frequency) as path:
        with httpclient.InferenceServerClient(traced.server.http, concurrency=4) as http:
            with grpcclient.InferenceServerClient(traced.server.grpc) as grpc:
                calls = [http.async_infer("pipeline", sixteen(httpclient, "IN")) for _ in range(20)]
                traced.stream(grpc, "single", [(sixteen(grpcclient), {}) for _ in range(30)], 30)
                for call in calls:
                    call.get_result()
    files = [path] if frequency == "0" else sorted(traced.folder.glob(name + ".*"))
    total = 0
    for file in files:
        total += sum(
            len(spans["request"]) for spans in summary_rules.summary(file).values() if "request" in spans
        )
    assert total == 50 and len(files) == (1 if frequency == "0" else 10)


def test_no_file_where_nothing_is_traced(traced: Traced) -> None:
    path = traced.folder / "rules_nothing.json"
    traced.on(path, "OFF")
    with httpclient.InferenceServerClient(traced.server.http) as client:
        client.infer("single", sixteen(httpclient))
    traced.off()
    assert not list(traced.folder.glob("rules_nothing.json*"))


WHOLE = [{"name": n, "ns": i} for i, n in enumerate(["HTTP_RECV_START", "REQUEST_START", "REQUEST_END"])]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"parent_id": 9}, "the parent 9"), ({"id": "1"}, "numeric id"), ({"model_version": "1", "timestamps": WHOLE}, "identity"),
        ({"timestamps": [{"name": "http recv start", "ns": 1}]}, "known names"),
        ({"timestamps": [{"name": "REQUEST_START", "ns": 1}, {"name": "REQUEST_END", "ns": 2}]}, "no front"),
        ({"timestamps": [{"name": "HTTP_RECV_START", "ns": 1}, {"name": "REQUEST_START", "ns": 2}]}, "is whole"),
        ({"timestamps": [{"name": n, "ns": i} for i, n in enumerate(
            ["HTTP_RECV_START", "REQUEST_START", "REQUEST_END", "HTTP_SEND_START", "HTTP_SEND_END"])]}, "missing"),
        ({"activity": "TENSOR_QUEUE_INPUT", "tensor": {"name": "x", "data": "1", "shape": "2", "dtype": "FP32"}}, "2 numbers"),
        ({"activity": "TENSOR_QUEUE_INPUT", "tensor": {"name": "x", "data": "1", "shape": "1", "dtype": "BF16"}}, "dtype"),
    ],
)  # fmt: skip
def test_the_rules_find_what_is_wrong(tmp_path: Path, broken: dict[str, Any], message: str) -> None:
    path = tmp_path / "t"
    path.write_text(
        json.dumps([{"id": 1, "model_name": "m", "model_version": 1, "timestamps": [], **broken}])
    )
    with pytest.raises(ValueError, match=message):
        summary_rules.summary(path)


def synthetic(path: Path, traces: int, letters: int) -> None:
    """A file of `traces` requests with tensors of `letters` each."""
    points = [("HTTP_RECV_START", 0), ("HTTP_RECV_END", 5), ("REQUEST_START", 9), ("QUEUE_START", 10), ("COMPUTE_START", 30),
              ("COMPUTE_INPUT_END", 33), ("COMPUTE_OUTPUT_START", 80), ("COMPUTE_END", 83), ("REQUEST_END", 85),
              ("HTTP_SEND_START", 90), ("HTTP_SEND_END", 100)]  # fmt: skip
    data = "1," * (letters // 2 - 1) + "1"
    with path.open("w") as out:
        out.write("[")
        for number in range(1, traces + 1):
            times = [{"name": name, "ns": number * 10**6 + us * 1000} for name, us in points]
            top = {"model_name": "big", "model_version": 1, "id": number, "timestamps": times}
            made = {"id": number, "activity": "TENSOR_QUEUE_INPUT",
                    "tensor": {"name": "x", "data": data, "shape": str(letters // 2), "dtype": "INT32"}}  # fmt: skip
            out.write((",\n" if number > 1 else "") + json.dumps(top) + ",\n" + json.dumps(made))
        out.write("]")


LIMITED = """
import resource, sys
from neptrio.traces import export as trace_export
from neptrio.traces import replay as trace_replay
from neptrio.traces import summary as trace_summary
from neptrio.traces import view as trace_view
from neptrio import commands
import numpy
with open("/proc/self/statm") as statm:
    size = int(statm.read().split()[0]) * resource.getpagesize()
limit = size + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.exit(commands.run("trace", sys.argv[2:]))
"""
ROOM = 48 << 20


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("big") / "big.json"
    synthetic(path, 8000, 12_000)
    yield path
    path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("action", ["summary", "view", "export"])
def test_files_larger_than_memory(big: Path, tmp_path: Path, action: str) -> None:
    """The process may grow by 48 MiB; the file has twice as much."""
    out = tmp_path / "out"
    assert big.stat().st_size > 2 * ROOM * 0.98
    more = {"summary": [], "view": ["-o", str(out), "--limit=500"], "export": ["-o", str(out)]}[action]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LIMITED, str(ROOM), action, *more, str(big)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    if action == "summary":
        assert "Summary for big (1): trace count = 8000" in done.stdout
        assert "HTTP infer request (avg): 100us" in done.stdout and "Data Flow:" in done.stdout
    elif action == "view":
        assert "500 of 8000 requests" in done.stdout
    else:
        assert sum(e.get("cat") == "request" for e in json.loads(out.read_text())["traceEvents"]) == 8000


@pytest.mark.slow
def test_the_limit_of_that_test_is_one() -> None:
    code = LIMITED.replace("sys.exit(", "x = bytearray(2 * int(sys.argv[1])); sys.exit(")
    done = subprocess.run([sys.executable, "-c", code, str(ROOM)], capture_output=True, text=True, timeout=60)
    assert done.returncode and "MemoryError" in done.stderr
