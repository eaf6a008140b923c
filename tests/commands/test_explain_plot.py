"""`neptrio explain MODEL --plot` against a real server: points, page and table, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neptrio import commands
from tests.sequences.models import sequence_config
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.transport.test_tokens import row

TWICE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for _ in range(2):
                tensor = pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("measured")
    write_model(folder, "m", identity_config("TYPE_FP32", pairs=1, extra="dynamic_batching { }"))
    write_model(folder, "text", identity_config("TYPE_STRING", dims="-1", max_batch_size=0, pairs=1))
    write_model(folder, "sum", sequence_config("direct { }", 4))
    decoupled = (
        "model_transaction_policy { decoupled: true } "
        'parameters { key: "isolation" value { string_value: "none" } }'
    )
    config = identity_config(pairs=1, extra=decoupled).replace('"identity"', '"python"')
    write_model(folder, "twice", config, {"1/model.py": TWICE})
    with ServerProcess(folder) as process:
        yield process


def ask(server: ServerProcess, path: str) -> Any:
    with urllib.request.urlopen(f"http://{server.http}/v2/models/{path}", timeout=30) as answer:
        return json.loads(answer.read())


def measure(server: ServerProcess, file: Path, model: str, *flags: str) -> int:
    return commands.run(
        "explain", [model, f"--plot={file}", f"--url={server.http}", "--seconds=0.04", *flags]
    )


def table(page: str) -> list[dict[str, str]]:
    """The rows of the page's last table, by column."""
    found = page.rpartition("<table>")[2]
    head = re.findall(r'<th scope="col">(.*?)</th>', found)
    rows = re.findall(r"<tr>(<td.*?)</tr>", found)
    return [dict(zip(head, re.findall(r"<td[^>]*>(.*?)</td>", line), strict=True)) for line in rows]


def test_a_running_model_is_measured_and_left_as_it_is(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, before = tmp_path / "m.html", ask(server, "m/config")
    assert (
        measure(server, file, "m", "--concurrency=3,1", "--batch-sizes=1,8", "--latency-budget-ms=60000") == 0
    )
    said, page = capsys.readouterr().out, file.read_text()
    rows = table(page)
    points = [(row["rows per request"], row["concurrency"]) for row in rows]
    assert points == [("1", "1"), ("1", "3"), ("8", "1"), ("8", "3")]
    asked = 0
    for row_ in rows:
        requests = int(row_["requests"].replace(",", ""))
        asked += requests
        assert requests >= int(row_["concurrency"])
        assert 1 <= int(row_["executions"].replace(",", "")) <= requests
        assert "failed" not in row_["notes"] and "other clients" not in row_["notes"]
    stats = ask(server, "m/stats")["model_stats"][0]["inference_stats"]
    assert stats["success"]["count"] >= asked and stats["fail"]["count"] == 0
    assert rows[2]["rows per execution"] == "8.00"
    assert ask(server, "m/config") == before
    assert "Measuring 'm' at 4 points" in said and f"{file}: 4 points" in said
    assert "Most inferences per second with p99 within 60000 ms:" in said
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_page_stands_alone(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "m.html"
    assert measure(server, file, "m", "--concurrency=1,2", "--batch-sizes=1,8") == 0
    page = file.read_text()
    style = re.search(r"<style>(.*?)</style>", page, re.S)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}'" in page
    assert not re.search(r"<script|<link|<img|https?:|url\(|\bstyle=|\son\w+=", page)
    assert page.count('<svg viewBox="0 0 420 260" role="img" aria-label=') >= 5
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page


def test_sequences_are_ended_and_decoupled_requests_counted_once(
    server: ServerProcess, tmp_path: Path
) -> None:
    flags = ("--concurrency=1,6", "--sequence-length=3", "--shape=INPUT:1")
    assert measure(server, tmp_path / "sum.html", "sum", *flags) == 0
    page = (tmp_path / "sum.html").read_text()
    assert "Each client sends sequences of 3 requests" in page
    assert [row["notes"].partition("not steady")[0] for row in table(page)] == ["", ""]
    assert ask(server, "sum/stats?live=true")["model_stats"][0]["live"]["sequences"] == 0
    assert measure(server, tmp_path / "twice.html", "twice", "--concurrency=2", "--batch-sizes=1") == 0
    page = (tmp_path / "twice.html").read_text()
    assert "a request counts once, when its last response has come" in page and "not judged" in page
    (only,) = table(page)
    assert only["requests"] == only["executions"] or float(only["rows per execution"]) > 1


def test_inputs_come_from_a_file(server: ServerProcess, tmp_path: Path) -> None:
    data = tmp_path / "data.json"
    data.write_text('{"data": [{"INPUT0": ["one", "two"]}]}')
    file = tmp_path / "text.html"
    assert measure(server, file, "text", "--concurrency=1", f"--input-data={data}") == 0
    assert "Inputs are those of data.json." in file.read_text()


@pytest.mark.parametrize(
    ("model", "flags", "status", "said"),
    [
        ("text", (), 1, "input 'INPUT0' has variable dims [-1]: choose them with --shape INPUT0:N"),
        ("nope", (), 1, "Request for unknown model: 'nope' is not found"),
        ("m", ("--batch-sizes=1,9",), 1, "the model takes up to 8 rows, got 9"),
        ("m", ("--model-repository=x",), 2, "--plot measures a running server"),
        ("m", ("--input-data=/nowhere/data.json",), 1, "/nowhere/data.json"),
        ("m", ("--sequence-length=0",), 1, "--sequence-length: expected a number above 0, got 0"),
    ],
)
def test_what_cannot_be_measured_is_said(
    server: ServerProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    flags: tuple[str, ...],
    status: int,
    said: str,
) -> None:
    file = tmp_path / "page.html"
    assert measure(server, file, model, *flags) == status
    assert said in capsys.readouterr().err and not file.exists()


def test_flags_of_the_measurement_need_plot(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run("explain", ["m", "--seconds=1"]) == 2
    assert "--seconds goes with --plot" in capsys.readouterr().err
    for wrong in (
        "--concurrency=0",
        "--batch-sizes=1,x",
        "--seconds=nan",
        "--shape=A:x",
        "--latency-budget-ms=0",
    ):
        with pytest.raises(SystemExit):
            commands.run("explain", ["m", "--plot", wrong])
        assert "error: argument --" in capsys.readouterr().err


def test_a_server_that_refuses_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "models", "m", identity_config(pairs=1))
    (tmp_path / "auth.toml").write_text(
        row("reader", "read")
        + row("few", "infer", "read", models="requests_per_second = 1")
        + row("all", "infer", "read")
    )
    file = tmp_path / "m.html"
    with ServerProcess(tmp_path / "models", f"--auth-config={tmp_path}/auth.toml") as server:
        flags = ("--concurrency=1,4", "--batch-sizes=1")
        for token, said in (
            ("", "a token is needed"),
            ("reader", "HTTP status 403"),
            ("few", "may make 1 requests per second"),
        ):
            monkeypatch.setenv("NEPTRIO_TOKEN", token)
            assert measure(server, file, "m", *flags) == 1
            assert said in capsys.readouterr().err
            # the third is refused at some moment or other
            assert token == "few" or not file.exists()
        monkeypatch.setenv("NEPTRIO_TOKEN", "all")
        assert measure(server, file, "m", *flags) == 0
        assert [row["notes"].partition("not steady")[0] for row in table(file.read_text())] == ["", ""]
