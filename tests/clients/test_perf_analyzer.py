"""perf_analyzer, with which Triton's users measure, in every way in which it can send."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.clients.servers import example_server
from tests.support.server import ServerProcess
from tools import perf_analyzer

pytest.importorskip("schemathesis", reason="run by make test-clients")


@pytest.fixture(scope="module")
def program() -> str:
    try:
        return str(perf_analyzer.fetch())
    except perf_analyzer.Missing as error:
        pytest.skip(f"perf_analyzer cannot be had here: {error}")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with example_server("simple", "speech_detection", flags=["--allow-client-shm=true"]) as process:
        yield process


@pytest.mark.parametrize(
    "arguments",
    [
        "-i http",
        "-i http --async",
        "-i grpc",
        "-i grpc --async",
        "-i grpc --streaming",
        "-i http --shared-memory system",
        "-i grpc --shared-memory system",
        "-i grpc --streaming --shared-memory system",
        "-i http -b 4",
        "-i grpc --request-rate-range 200",
        "-i http -m speech_detection --sequence-length 10",
        "-i grpc --streaming -m speech_detection --sequence-length 10",
    ],
)
def test_sends_and_is_answered(server: ServerProcess, program: str, arguments: str) -> None:
    address = server.http if "http" in arguments else server.grpc
    shape = [] if "rate" in arguments else ["--concurrency-range", "2"]
    model = [] if "-m" in arguments.split() else ["-m", "simple"]
    command = [program, *model, "-u", address, *arguments.split(), *shape]
    # one window of a number of requests: how stable it is does not matter here
    command += [
        "--measurement-mode",
        "count_windows",
        "--measurement-request-count",
        "50",
        "-s",
        "999",
        "-r",
        "3",
    ]
    run = subprocess.run(
        command, capture_output=True, text=True, env=perf_analyzer.environment(), timeout=120
    )
    said = run.stdout + run.stderr
    count = re.search(r"Successful request count: (\d+)", said) or re.search(r"Request count: (\d+)", said)
    assert count is not None and int(count[1]) >= 50, said
    assert "rror" not in run.stderr, said
