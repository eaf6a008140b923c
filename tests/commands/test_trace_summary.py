"""`neptrio trace` on files of both makers: whole, cut off, by event, by object."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from neptrio import commands
from neptrio.traces.reader import opened

US = 1000


def stamps(*pairs: tuple[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "ns": us * US} for name, us in pairs]


HTTP = stamps(
    ("HTTP_RECV_START", 100), ("HTTP_RECV_END", 121), ("REQUEST_START", 140), ("QUEUE_START", 145),
    ("COMPUTE_START", 160), ("COMPUTE_INPUT_END", 178), ("COMPUTE_OUTPUT_START", 386), ("COMPUTE_END", 402),
    ("REQUEST_END", 409), ("INFER_RESPONSE_COMPLETE", 410), ("HTTP_SEND_START", 471), ("HTTP_SEND_END", 478),
)  # fmt: skip
GRPC = stamps(
    ("GRPC_WAITREAD_START", 0), ("GRPC_WAITREAD_END", 1000), ("REQUEST_START", 1010), ("QUEUE_START", 1020),
    ("REQUEST_END", 1110), ("GRPC_SEND_START", 1120), ("GRPC_SEND_END", 1150),
)  # fmt: skip


def meta(number: int, model: str = "simple", parent: int = 0, **more: Any) -> dict[str, Any]:
    made = {"model_name": model, "model_version": 1, "id": number, **more}
    return {**made, "parent_id": parent} if parent else made


def tensor(
    number: int, activity: str, name: str, data: str, dtype: str = "INT32", shape: str = "2"
) -> dict[str, Any]:
    value = {"name": name, "data": data, "shape": shape, "dtype": dtype}
    return {**meta(number), "activity": activity, "tensor": value}


def report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, *flags: str
) -> tuple[list[str], str]:
    path = tmp_path / "trace.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert commands.run("trace", ["summary", *flags, str(path)]) == 0
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err


def test_the_guides_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, warnings = report(
        tmp_path, capsys, [{**meta(1), "timestamps": HTTP}, {**meta(2), "timestamps": GRPC}]
    )
    assert lines[1:] == [
        "Summary for simple (1): trace count = 1",
        "HTTP infer request (avg): 378us",
        "  Receive (avg): 21us",
        "  Send (avg): 7us",
        "  Overhead (avg): 81us",
        "  Handler (avg): 269us",
        "    Overhead (avg): 12us",
        "    Queue (avg): 15us",
        "    Compute (avg): 242us",
        "      Input (avg): 18us",
        "      Infer (avg): 208us",
        "      Output (avg): 16us",
        "Percentiles: p50=378us p90=378us p95=378us p99=378us max=378us",
        "",
        "Summary for simple (1): trace count = 1",
        "GRPC infer request (avg): 150us",
        "  Wait/Read (avg): 1000us",
        "  Send (avg): 30us",
        "  Overhead (avg): 20us",
        "  Handler (avg): 100us",
        "    Overhead (avg): 100us",
        "Percentiles: p50=150us p90=150us p95=150us p99=150us max=150us",
        "",
        "Slowest requests:",
        "  id 1 simple (1): 378us (queue 15us, compute 242us, send 7us)",
        "  id 2 simple (1): 150us (send 30us)",
        "",
    ]
    assert lines[0].startswith("File: ") and not warnings


def test_an_object_per_event_children_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child = [t for t in HTTP if "HTTP" not in t["name"]]
    content = [meta(8, "step", 7)] + [{"id": 8, "timestamps": [t]} for t in child]
    content += [{"id": 7, "timestamps": [t]} for t in HTTP] + [meta(7, "ensemble")]
    lines, _ = report(tmp_path, capsys, content)
    assert [line for line in lines if line.startswith("Summary")] == [
        "Summary for ensemble (1): trace count = 1",
        "Summary for step (1): trace count = 1",
    ]
    assert lines[lines.index("Summary for step (1): trace count = 1") + 1] == "Handler (avg): 269us"


def test_the_guides_prose_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prose = [
        {**t, "name": t["name"].replace("REQUEST", "REQUEST_HANDLER").replace("_", " ").lower()} for t in HTTP
    ]
    lines, _ = report(tmp_path, capsys, [{**meta(1), "timestamps": prose}])
    assert "HTTP infer request (avg): 378us" in lines


@pytest.mark.parametrize("cut", [1, 2, 30, 400])
def test_a_file_that_is_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str], cut: int) -> None:
    content = json.dumps([{**meta(i), "timestamps": HTTP} for i in range(1, 4)])
    lines, warnings = report(tmp_path, capsys, content[:-cut])
    count = 3 if cut == 1 else 2
    assert f"Summary for simple (1): trace count = {count}" in lines
    assert "cut off" in warnings


def test_files_larger_than_what_is_read_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from neptrio.traces import reader as trace_reader

    monkeypatch.setattr(trace_reader, "CHUNK", 64)
    monkeypatch.setattr(trace_reader, "WINDOW", 3)
    content = json.dumps([{**meta(i), "timestamps": HTTP} for i in range(1, 101)], indent=1)
    lines, warnings = report(tmp_path, capsys, content)
    assert "Summary for simple (1): trace count = 100" in lines and not warnings


def test_incomplete_traces_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, _ = report(tmp_path, capsys, [{"id": 1, "timestamps": HTTP[:2]}])
    assert lines[1:] == ["1 incomplete traces (no REQUEST_START or REQUEST_END) are left out"]


def test_each_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, _ = report(tmp_path, capsys, [{**meta(1, request_id="r"), "timestamps": GRPC[1:4]}], "-t")
    assert lines[1:10] == [
        "simple (1):",
        "\tid: 1",
        "\trequest id: r",
        "\tGRPC_WAITREAD_END",
        "\t\t10us",
        "\tREQUEST_START",
        "\t\t10us",
        "\tQUEUE_START",
        "",
    ]


def test_data_flow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = [
        meta(1, "ensemble"),
        {**tensor(1, "TENSOR_QUEUE_INPUT", "in", "1,2"), **meta(1, "ensemble")},
        meta(2, "step", 1),
        {**tensor(2, "TENSOR_BACKEND_OUTPUT", "out", '"a,b","c\\"d"', "BYTES"), **meta(2, "step", 1)},
    ]
    lines, _ = report(tmp_path, capsys, content)
    bar, inner = "=" * 58, "=" * 50
    assert lines[1:] == [
        "Data Flow:",
        "  " + bar, "  Name: ensemble", "  Version:1", "  QUEUE_INPUT:", "    in: [1 2]", "  " + bar,
        "    " + inner, "    Name: step", "    Version:1", "    BACKEND_OUTPUT:",
        "      out: ['a,b' 'c\"d']", "    " + inner,
    ]  # fmt: skip


@pytest.mark.parametrize("action", ["summary", "view", "export"])
def test_what_is_no_trace_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str) -> None:
    path = tmp_path / "t"
    for content, got in (("", "an empty file"), ("{}", "'{}'"), ("hello", "'hello'")):
        path.write_text(content)
        assert commands.run("trace", [action, str(path)]) == 1
        assert f"error: {path} is no trace file: expected a JSON array, got {got}" in capsys.readouterr().err
    assert commands.run("trace", [action, str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_files_that_cannot_be_read_do_not_end_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = tmp_path / "good"
    good.write_text(json.dumps([{**meta(1), "timestamps": HTTP}]))
    assert commands.run("trace", ["summary", str(tmp_path / "none"), str(good)]) == 1
    assert "Summary for simple (1): trace count = 1" in capsys.readouterr().out


def test_a_file_that_is_damaged_is_read_as_far_as_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = [json.dumps({**meta(i), "timestamps": HTTP}) for i in range(1, 4)]
    content = f"[{objects[0]},{objects[1]},\0\0\0\0 garbage that is no JSON,{objects[2]}]"
    lines, warnings = report(tmp_path, capsys, content)
    assert "Summary for simple (1): trace count = 2" in lines
    assert "it is damaged at '\\x00\\x00\\x00\\x00 garbage" in warnings


def test_files_that_were_joined_are_not_taken_for_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers count their traces from 1 each, so the ids of two files are not those of one."""
    one = json.dumps([{**meta(1), "timestamps": HTTP}])
    lines, warnings = report(tmp_path, capsys, f"{one}\n{one}\n")
    assert lines[1] == "Summary for simple (1): trace count = 1"
    assert "more follows the end of its array" in warnings
    assert not report(tmp_path, capsys, f"{one}\n \n")[1]


def test_a_file_that_grows_is_read_as_it_was(tmp_path: Path) -> None:
    """Or a replay to the server that writes it would replay its own requests."""
    (tmp_path / "t").write_text('[{"id": 1},')
    with opened(str(tmp_path / "t")) as source:
        first = source.read(3)
        with (tmp_path / "t").open("a") as more:
            more.write('{"id": 2},')
        assert first + source.read() == '[{"id": 1},'


def test_what_has_no_id_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = [1, None, {"id": "5"}, {"model_name": "m"}, {**meta(1), "timestamps": HTTP}]
    lines, warnings = report(tmp_path, capsys, content)
    assert "Summary for simple (1): trace count = 1" in lines
    assert "4 objects without a trace's id (a number) are left out" in warnings


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """`neptrio trace summary -t FILE | head`: no message, and no traceback at the end."""
    path = tmp_path / "t"
    path.write_text(json.dumps([{**meta(i), "timestamps": HTTP} for i in range(1, 2000)]))
    command = [sys.executable, "-W", "error", "-m", "neptrio", "trace", "summary", "-t", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == commands.ENOUGH


def test_steps_and_clients_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = [t for t in HTTP if "HTTP" not in t["name"]]
    root = [t for t in HTTP if "COMPUTE" not in t["name"]]
    content = [
        {**meta(1, "flow"), "timestamps": root}, {**meta(2, "step", 1), "timestamps": step},
        {**meta(3, "step", 1), "timestamps": step}, {**meta(4, "step"), "timestamps": HTTP},
        {**meta(5, "flow", error="no"), "timestamps": root}, {**meta(6, "step", 5), "timestamps": step},
    ]  # fmt: skip
    lines, _ = report(tmp_path, capsys, content)
    at = lines.index("Summary for step (1): trace count = 4")
    assert lines[at + 1 : at + 4] == [
        "From clients: 1, as steps and calls: 3", "HTTP infer request (avg): 378us", "  Receive (avg): 21us"
    ]  # fmt: skip
    assert "With errors: 1" in lines
    at = lines.index("HTTP requests with steps (avg handler time):")
    assert lines[at + 1 : at + 4] == ["  flow (1): 269us", "    step (1): 269us, 1.5 per request", ""]


@pytest.mark.slow
def test_percentiles_of_many_and_of_few() -> None:
    from neptrio.traces.summary import Durations

    few, many = Durations(), Durations()
    for ns in range(100, 0, -1):
        few.add(ns)
    assert few.percentiles((1, 50, 99, 100)) == [1, 50, 99, 100] and few.largest == 100
    for ns in range(250_000):
        many.add(ns * 1000)
    found = many.percentiles((50, 90, 99))
    assert found == [pytest.approx(share * 250_000_000, rel=1e-3) for share in (0.5, 0.9, 0.99)]
    assert many.largest == 249_999_000


def test_tensors_that_triton_servers_write_badly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = [
        meta(1),
        tensor(1, "TENSOR_QUEUE_INPUT", "chars", "\x01,\x02", "UINT8"),
        tensor(1, "TENSOR_QUEUE_INPUT", "half", "", "FP16"),
        tensor(1, "TENSOR_QUEUE_INPUT", "fine", "3,4", "UINT8"),
        {**meta(1), "activity": "TENSOR_QUEUE_INPUT", "tensor": 5},
    ]
    lines, warnings = report(tmp_path, capsys, content)
    text = "\n".join(lines)
    assert "chars: (its text is not one of UINT8 elements: '\\x01,\\x02')" in text
    assert "half: (its shape [2] has 2 elements, its text has 0)" in text and "fine: [3 4]" in text
    assert "an object of trace 1 is not understood" in warnings


def test_children_of_a_parent_that_never_comes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from neptrio.traces import summary as trace_summary

    monkeypatch.setattr(trace_summary, "PARENTS", 10)
    content = [{**meta(i, "step", 1000 + i), "timestamps": HTTP} for i in range(1, 101)]
    lines, _ = report(tmp_path, capsys, content)
    assert lines[1:] == ["100 traces that came over neither HTTP nor gRPC are left out"]
