"""A library of a model's own decides which of the requests that the dynamic batcher puts together are executed together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

from tests.backends.compiled.asking import ONE, TEXT, numbers
from tests.backends.compiled.conftest import compiled
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers
from tests.support.waiting import until

pytestmark = pytest.mark.slow

SIX = TEXT.replace("max_batch_size: 8", "max_batch_size: 6") + ONE
BATCHING = "dynamic_batching { max_queue_delay_microseconds: 60000000 } "  # a batch is full before that
DECOUPLED = "model_transaction_policy { decoupled: true } "
LONG = 'parameters { key: "EXECUTE_TIMEOUT_SECONDS" value: { string_value: "4" } } '


def path(library: Path | str) -> str:
    return f'parameters {{ key: "TRITON_BATCH_STRATEGY_PATH" value: {{ string_value: "{library}" }} }} '


@pytest.fixture(scope="module")
def strategy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("strategy") / "sums.so"
    return compiled(library, Path(__file__).parent / "strategy" / "strategy.c")


@pytest.fixture(scope="module")
def server(
    backends: Path, probe: Path, strategy: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "sums", SIX + BATCHING + LONG, {"batchstrategy.so": strategy.read_bytes()})
    write_model(folder, "streams", SIX + BATCHING + DECOUPLED + path(strategy))
    write_model(folder, "sequences", TEXT + ONE + "sequence_batching { } " + path(strategy))
    write_model(folder, "nowhere", TEXT + ONE + path("nowhere.so"))
    write_model(folder, "other", SIX + BATCHING + path(probe))
    made = ServerProcess(
        folder, f"--backend-directory={backends}", "--exit-on-error=false", "--strict-readiness=false"
    )
    yield made
    made.stop()
    assert "strategy: sums had " in made.log()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[http.InferenceServerClient]:
    with http.InferenceServerClient(server.http, concurrency=6) as made:
        yield made


def executions(client: Any, model: str) -> dict[int, int]:
    """Batch size -> executions."""
    (found,) = client.get_inference_statistics(model)["model_stats"]
    sizes = {row["batch_size"]: row["compute_infer"]["count"] for row in found["batch_stats"]}
    assert found["execution_count"] == sum(sizes.values())
    assert found["inference_count"] == sum(size * count for size, count in sizes.items())
    return sizes


def six(client: Any, value: int, do: str = "batch") -> list[Any]:
    """What becomes of six requests, which fill a batch of the dynamic batcher."""
    waiting = [client.async_infer("sums", [numbers(value)], parameters={"do": do}) for _ in range(6)]
    found = []
    for one in waiting:
        try:
            result = one.get_result()
        except InferenceServerException as error:
            found.append(error.message())
        else:
            assert result.as_numpy("OUT").tolist() == [[value]]
            found.append(result.get_response()["parameters"].get("batch"))
    return found


@pytest.mark.parametrize(
    ("value", "together"),
    [(1, 6), (4, 2), (3, 3), (11, 1), (-1, 1)],  # an error of the library is a no
)
def test_each_execution_has_the_requests_that_the_library_includes(
    client: Any, value: int, together: int
) -> None:
    before = executions(client, "sums")
    assert six(client, value) == [together] * 6
    after = executions(client, "sums")
    assert {
        size: count - before.get(size, 0) for size, count in after.items() if count != before.get(size)
    } == {together: 6 // together}


def test_the_batches_of_a_decoupled_model(server: ServerProcess, client: Any) -> None:
    made = grpc.InferInput("IN", [1, 1], "INT32")
    made.set_data_from_numpy(np.array([[11]], np.int32))
    with grpc.InferenceServerClient(server.grpc) as streaming, Answers(streaming) as answers:
        for i in range(6):
            streaming.async_stream_infer("streams", [made], request_id=f"{i}", parameters={"do": "stream"})
        values: dict[str, list[int]] = {}
        for result in answers.results(30):
            values.setdefault(result.get_response().id, []).append(int(result.as_numpy("OUT")[0, 0]))
    assert values == {f"{i}": [0, 1, 2, 3, 4] for i in range(6)}
    assert executions(client, "streams") == {1: 6}


def test_a_crash_costs_the_execution_that_it_met_and_those_that_were_to_follow(
    server: ServerProcess, client: Any
) -> None:
    assert six(client, 11) == [1] * 6
    found = six(client, 4, "crash at the second")
    assert found.count(None) == 2, found
    assert sum("killed by signal 11" in str(text) for text in found) == 4, found
    until(lambda: client.is_model_ready("sums"), server.log)


def test_a_time_limit_is_that_of_each_execution(client: Any) -> None:
    """Six executions of 0.8 s each are no execution of more than four seconds."""
    assert six(client, 11, "sleep 800") == [None] * 6


def test_what_cannot_be_is_said_when_the_model_is_loaded(client: Any) -> None:
    reasons = {row["name"]: row.get("reason", "") for row in client.get_model_repository_index()}
    assert "TRITON_BATCH_STRATEGY_PATH cannot be specified with sequence batcher" in reasons["sequences"]
    assert "Batching library path not found: nowhere.so" in reasons["nowhere"]
    assert "has no function TRITONBACKEND_ModelBatcherInitialize" in reasons["other"]
