"""Dynamic batching as clients see it: real server, real clients, both protocols."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until


def tensor(module: Any, width: int = 4, value: int = 0, rows: int = 1) -> list[Any]:
    made = module.InferInput("INPUT0", [rows, width], "INT32")
    made.set_data_from_numpy(np.full((rows, width), value, dtype=np.int32))
    return [made]


def burst(client: Any, model: str, count: int, **options: Any) -> list[Any]:
    """`count` concurrent gRPC requests; their results or errors in request order."""
    done = threading.Semaphore(0)
    outcomes: list[Any] = [None] * count

    def callback(i: int) -> Any:
        def called(result: Any, error: Any) -> None:
            outcomes[i] = error or result
            done.release()

        return called

    for i in range(count):
        client.async_infer(model, tensor(grpcclient, value=i), callback(i), request_id=f"r{i}", **options)
    for _ in range(count):
        assert done.acquire(timeout=60)
    return outcomes


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Every batcher of this server starts once 8 requests wait."""
    repository: Path = tmp_path_factory.mktemp("held")
    for name, batching in {
        "eights": "",
        "fours": "preferred_batch_size: [ 4 ]",
        "ordered": "preserve_ordering: true",
        "logged": "",
    }.items():
        write_model(
            repository,
            name,
            identity_config(dims="-1", pairs=1, max_batch_size=8, extra=f"dynamic_batching {{ {batching} }}"),
        )
    write_model(repository, "alone", identity_config(dims="-1", pairs=1, max_batch_size=8))
    env = dict(os.environ, TRITONSERVER_DELAY_SCHEDULER="8")
    with ServerProcess(repository, "--log-verbose=1", env=env) as process:
        yield process


def executed(server: ServerProcess, model: str) -> dict[int, int]:
    with httpclient.InferenceServerClient(server.http) as client:
        stats = client.get_inference_statistics(model)["model_stats"][0]
    return {row["batch_size"]: row["compute_infer"]["count"] for row in stats["batch_stats"]}


@pytest.mark.parametrize(("model", "batches"), [("eights", {8: 1}), ("fours", {4: 2})])
def test_eight_requests_batch_and_each_gets_its_own_answer(
    held: ServerProcess, model: str, batches: dict[int, int]
) -> None:
    with grpcclient.InferenceServerClient(held.grpc) as client:
        results = burst(client, model, 8)
    for i, result in enumerate(results):
        assert result.get_response().id == f"r{i}"
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), np.full((1, 4), i, dtype=np.int32))
    assert executed(held, model) == batches


def test_the_verbose_log_says_why_a_batch_closed(held: ServerProcess) -> None:
    with grpcclient.InferenceServerClient(held.grpc) as client:
        burst(client, "logged", 8)
    line = "model 'logged' version 1: batch of 8 from 8 request(s) closed, full"
    until(lambda: line in held.log(), "the log line")


def test_the_verbose_log_says_what_will_and_will_not_batch(held: ServerProcess) -> None:
    for name, part in (
        ("eights", "Requests to 'eights' batch up to a sum of 8 (max_batch_size); a request is never split."),
        ("alone", "Nothing batches: 'alone' has no dynamic_batching, so every request is executed alone."),
    ):
        said = [line for line in held.log().splitlines() if part in line]
        assert len(said) == 1 and "version 1: " in said[0], name
