"""The page of `neptrio trace view` without a browser: stages, outcomes, data, policy."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from neptrio import commands
from neptrio.traces.reader import Trace
from neptrio.traces.view import (
    OUTCOMES,
    STAGES,
    Page,
    begin,
    collect,
    document,
    duration,
    html,
    outcome,
    segments,
)

HTTP = ["HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "QUEUE_START", "COMPUTE_START",
        "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END", "REQUEST_END", "INFER_RESPONSE_COMPLETE",
        "HTTP_SEND_START", "HTTP_SEND_END"]  # fmt: skip


def made(*names: str, step: int = 10, **more: Any) -> Trace:
    return Trace(1, "m", 1, times=[(1000 + i * step, name) for i, name in enumerate(names)], **more)


def page(*traces: Trace) -> Page:
    return Page(["file"], [(0, trace) for trace in traces], sum(not trace.parent for trace in traces))


class Parts(HTMLParser):
    """The elements of a page, and the text inside script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, dict[str, str | None], str]] = []
        self._inside: tuple[str, dict[str, str | None]] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = (tag, dict(attrs)) if tag in ("script", "style") else None

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, text: str) -> None:
        if self._inside:
            self.texts.append((*self._inside, text))

    def text(self, tag: str, kind: str | None = None) -> str:
        return "".join(text for name, attrs, text in self.texts if name == tag and attrs.get("type") == kind)

    def data(self) -> Any:
        return json.loads(self.text("script", "application/json"))


def test_every_stage_of_a_request() -> None:
    assert segments(made(*HTTP)) == [
        ("receive", 1000, 1010), ("overhead", 1010, 1020), ("overhead", 1020, 1030), ("queue", 1030, 1040),
        ("input", 1040, 1050), ("infer", 1050, 1060), ("output", 1060, 1070), ("overhead", 1070, 1080),
        ("overhead", 1080, 1100), ("send", 1100, 1110),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "more", "parent", "stages"),
    [
        (["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "REQUEST_START"], {}, False, ["wait", "overhead"]),
        (["REQUEST_START", "QUEUE_START", "REQUEST_END"], {}, False, ["overhead", "cache"]),
        (["REQUEST_START", "QUEUE_START", "REQUEST_END"], {}, True, ["overhead", "steps"]),
        (["REQUEST_START", "QUEUE_START", "REQUEST_END"], {"error": "no"}, False, ["overhead", "queue"]),
        (["QUEUE_START", "COMPUTE_START"], {}, False, ["queue"]),
        (["COMPUTE_START", "COMPUTE_END", "REQUEST_END"], {}, False, ["infer", "overhead"]),
        (["COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"], {}, True, ["steps"]),
        (["HTTP_RECV_START"], {}, False, []),
        ([], {}, False, []),
        (["MY_POINT", "REQUEST_START", "MY_POINT", "REQUEST_END"], {}, False, ["overhead"]),
    ],
)
def test_stages_of_requests_that_lack_points(
    names: list[str], more: dict[str, str], parent: bool, stages: list[str]
) -> None:
    assert [stage for stage, _, _ in segments(made(*names, **more), parent)] == stages


def test_responses_of_a_decoupled_model_lie_over_its_stages() -> None:
    reply = ["INFER_RESPONSE_COMPLETE", "GRPC_SEND_START", "GRPC_SEND_END"]
    names = ["GRPC_WAITREAD_END", "REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", *reply,
             *reply, "COMPUTE_OUTPUT_START", "COMPUTE_END", "REQUEST_END", *reply]  # fmt: skip
    found = segments(made(*names))
    assert found[-2:] == [("send", 1060, 1070), ("send", 1090, 1100)]
    assert found[-3:-2] == [("send", 1150, 1160)] and found[-4] == ("overhead", 1130, 1150)


def test_stages_never_overlap_and_add_up_to_the_request() -> None:
    rng = random.Random(5)
    for _ in range(3000):
        names = [name for name in HTTP if rng.random() < 0.8]
        trace = Trace(1, times=[(rng.randrange(50), name) for name in names])
        found = segments(trace, rng.random() < 0.5)
        body = [(a, b) for stage, a, b in found if stage != "send"]
        assert all(a < b for a, b in body)
        assert all(b <= c for (_, b), (c, _) in itertools.pairwise(body))
        at = sorted(trace.first()[n] for n in names if "SEND" not in n and "COMPLETE" not in n)
        ends = [b for _, b in body]
        assert not at or sum(b - a for a, b in body) == max([at[-1], *ends]) - at[0]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("", "ok"), ("no luck", "failed"), ("the request was cancelled", "cancelled"),
        ("Request timeout expired", "timeout"), ("Deadline Exceeded", "timeout"),
        ("Exceeds maximum queue size", "rejected"),
    ],
)  # fmt: skip
def test_outcomes(error: str, expected: str) -> None:
    assert outcome(made(*HTTP, error=error)) == expected and expected in OUTCOMES


def test_a_trace_that_breaks_off_is_incomplete() -> None:
    assert outcome(made(*HTTP[:6])) == "incomplete"
    assert outcome(Trace(1)) == "ok"  # level TENSORS alone: nothing is known to be missing


def test_waiting_for_a_message_is_no_part_of_the_duration() -> None:
    trace = made("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "REQUEST_START", "REQUEST_END")
    assert (begin(trace), duration(trace)) == (1010, 20)


def test_data_of_a_page() -> None:
    root = made(*HTTP)
    child = Trace(2, "n", 3, parent=1, times=[(1035, "REQUEST_START"), (1037, "REQUEST_END")], error="bad",
                  tensors=[("TENSOR_QUEUE_INPUT", {"name": "IN", "data": "1," * 4000, "shape": "2", "dtype": "INT32"}),
                           ("TENSOR_BACKEND_OUTPUT", {"name": "O", "data": "1", "shape": "1", "dtype": "FP32",
                                                      "source_dtype": "BF16", "truncated_from": "9,9"})])  # fmt: skip
    found = document(page(child, root))
    first, second = (dict(zip(found["columns"], row, strict=True)) for row in found["traces"])
    assert (first["id"], first["parent"], second["id"], second["parent"]) == (1, -1, 2, 0)
    assert found["base_ns"] == "1000" and found["models"] == [("m", "1"), ("n", "3")]
    times = first["times"]
    assert [(found["points"][times[i]], times[i + 1]) for i in (0, 2)] == [
        ("HTTP_RECV_START", 0),
        ("HTTP_RECV_END", 10),
    ]
    assert first["bars"][:6] == [list(STAGES).index("receive"), 0, 10, list(STAGES).index("overhead"), 10, 20]
    assert found["outcomes"][second["outcome"]][0] == "failed"
    large, small = second["tensors"]
    assert len(large["data"]) == 2048 and large["more"] == 8000 - 2048
    assert (small["dtype"], small["shape"]) == ("BF16", "9,9") and "first 1 elements" in small["note"]


def test_a_parent_that_is_not_in_the_file() -> None:
    found = document(page(Trace(5, "m", 1, parent=3), Trace(4, "m", 1, parent=9), Trace(6, "m", 1, parent=6)))
    assert [row[1] for row in found["traces"]] == [-1, -1, -1]


HOSTILE = [
    "</script><script>alert(1)</script>", "<!--<script>", "]]>", "\u2028\u2029", "{data}{script}", "&lt;", "'\"\\",
    "<img src=x onerror=alert(1)>", "\ud800", "javascript:alert(1)", "</title><base href=//x>", "\x00",
]  # fmt: skip


def test_hostile_names_stay_data() -> None:
    quiet = html(page(*(Trace(i + 1, "m", 1) for i in range(len(HOSTILE)))))
    nasty = Page(
        HOSTILE,
        [
            (i, Trace(i + 1, text, text, 0, text, text, [(5, text)],
                      [(text, {"name": text, "data": text, "dtype": text, "shape": text, "omitted": text})]))
            for i, text in enumerate(HOSTILE)
        ],
        len(HOSTILE),
    )  # fmt: skip
    parts = Parts(html(nasty))
    assert parts.tags == Parts(quiet).tags  # nothing became markup
    assert parts.text("script") == Parts(quiet).text("script")
    data = parts.data()
    assert data["files"] == HOSTILE and [model for model, _ in data["models"]] == HOSTILE


def test_the_policy_allows_the_pages_own_parts_only() -> None:
    text = html(page(made(*HTTP)))
    parts = Parts(text)
    policy = next(a["content"] for t, a in parts.tags if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.split(" ", 1) for rule in (policy or "").split("; "))

    def hash_of(content: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"

    assert rules == {
        "default-src": "'none'", "script-src": hash_of(parts.text("script")), "style-src": hash_of(parts.text("style")),
        "base-uri": "'none'", "form-action": "'none'",
    }  # fmt: skip
    assert not [
        (tag, name) for tag, attrs in parts.tags for name in attrs
        if name in ("src", "href", "style", "action") or name.startswith("on")
    ]  # fmt: skip
    script = parts.text("script")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|\bFunction\(|fetch\(|"
                         r"XMLHttpRequest|WebSocket|https?:|import\s*\(", script)  # fmt: skip
    assert "url(" not in parts.text("style") and "@import" not in parts.text("style")


def write(path: Path, traces: list[dict[str, Any]]) -> str:
    path.write_text(json.dumps(traces))
    return str(path)


def item(number: int, us: int, parent: int = 0, **more: Any) -> dict[str, Any]:
    times = [{"name": "REQUEST_START", "ns": 1}, {"name": "REQUEST_END", "ns": 1 + us * 1000}]
    made = {"id": number, "model_name": "m", "model_version": 1, "timestamps": times, **more}
    return {**made, "parent_id": parent} if parent else made


@pytest.mark.parametrize("order", [1, -1])
def test_of_too_many_requests_the_failed_and_the_slowest_are_kept(tmp_path: Path, order: int) -> None:
    items = [item(i * 10, us=i) for i in range(1, 101)]
    items += [item(i * 10 + 1, 1, parent=i * 10) for i in range(1, 101)]
    items += [item(i * 10 + 2, 1, parent=i * 10 + 1) for i in range(1, 101)]
    items[4]["error"] = "no"
    first = write(tmp_path / "a", items[::order])
    second = write(tmp_path / "b", [item(1000, us=1000), item(7, us=1)])
    found = collect([first, second], 4, lambda name, text: pytest.fail(text))
    assert (found.requests, found.left_out) == (102, 98)
    roots = {(number, trace.id) for number, trace in found.traces if not trace.parent}
    assert roots == {(0, 50), (0, 990), (0, 1000), (1, 1000)}
    assert {trace.id for number, trace in found.traces if not number} == {
        50, 51, 52, 990, 991, 992, 1000, 1001, 1002}  # fmt: skip
    assert len(collect([first, second], 102, lambda name, text: None).traces) == 302


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "t.json", [item(1, 5)])
    assert commands.run("trace", ["view", path]) == 0
    assert "1 of 1 requests" in capsys.readouterr().out
    assert Parts((tmp_path / "t.json.html").read_text()).data()["requests"] == 1
    assert commands.run("trace", ["view", "-o", "-", path]) == 0
    assert capsys.readouterr().out == (tmp_path / "t.json.html").read_text()
    assert commands.run("trace", ["view", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err
    Path(path).write_text(Path(path).read_text()[:-1])
    assert commands.run("trace", ["view", path]) == 0
    assert "cut off" in capsys.readouterr().err


def test_a_pipe_with_more_requests_than_the_page_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such files are read twice, and a pipe is empty then."""
    text = json.dumps([{"id": number, "model_name": "m"} for number in (1, 2)]).encode()

    def view(limit: int) -> tuple[int, str]:
        read_end, write_end = os.pipe()
        try:
            os.write(write_end, text)
        finally:
            os.close(write_end)
        try:
            output = str(tmp_path / "page.html")
            status = commands.run("trace", ["view", f"--limit={limit}", "-o", output, f"/dev/fd/{read_end}"])
        finally:
            os.close(read_end)
        return status, capsys.readouterr().err

    assert view(2) == (0, "")
    (tmp_path / "page.html").unlink()
    status, error = view(1)
    assert status == 1 and "can be read only once: write it to a file, or give a higher --limit" in error
    assert not (tmp_path / "page.html").exists()
