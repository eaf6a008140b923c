"""Delays, slot utilization, order of responses and null requests of the two strategies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from neptrio.config import sequence_config as configuration
from neptrio.config.model_config import new_config
from neptrio.scheduling.sequence_direct import delay_left
from tests.sequences.models import LATCHED, Caller, Stream, listing, rest, sequence_config
from tests.support import infer_messages
from tests.support.latch import Latch
from tests.support.raw_http2 import RawClient
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

MS = 1_000_000


@pytest.mark.parametrize(
    ("delay", "utilization", "ready", "now", "left"),
    [
        (0, 0.5, 1, 0, 0),  # either one alone means nothing
        (10 * MS, 0.0, 1, 0, 0),
        (10 * MS, 0.5, 1, 2 * MS, 8 * MS),
        (10 * MS, 0.5, 1, 10 * MS - 1, 1),
        (10 * MS, 0.5, 1, 10 * MS, 0),
        (10 * MS, 0.5, 1, 99 * MS, 0),
        (10 * MS, 0.5, 2, 0, 0),
        (10 * MS, 0.51, 2, 0, 10 * MS),
        (10 * MS, 1.0, 3, 0, 10 * MS),
        (10 * MS, 1.0, 4, 0, 0),
    ],
)
def test_direct_waits_for_both_delay_and_utilization(
    delay: int, utilization: float, ready: int, now: int, left: int
) -> None:
    assert delay_left(delay, utilization, 4, ready, 0, now) == left


@pytest.mark.parametrize("slots", [3, 7, 10, 64, 100])
def test_a_share_of_the_slots_is_the_number_that_was_written(slots: int) -> None:
    """0.3 of 10 slots are 3, whatever 32 bits make of 0.3."""
    for hundredths in range(1, 101):
        config = new_config()
        config.max_batch_size = slots
        direct = config.sequence_batching.direct
        direct.minimum_slot_utilization = hundredths / 100
        direct.max_queue_delay_microseconds = 1000
        share = configuration.parse(config, Path()).minimum_slot_utilization
        needed = -(-hundredths * slots // 100)
        assert delay_left(MS, share, slots, needed, 0, 0) == 0
        assert needed == 1 or delay_left(MS, share, slots, needed - 1, 0, 0) == MS


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strategies")


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    for name, delay_us, share in (("half", 3_600_000_000, 0.5), ("expires", 30_000, 1.0)):
        strategy = f"direct {{ max_queue_delay_microseconds: {delay_us} minimum_slot_utilization: {share} }}"
        write_model(repository, name, sequence_config(strategy, 4))
    write_model(repository, "nulls", sequence_config("direct { }", 8))
    for name, ordered in (("ordered", "true"), ("unordered", "false")):
        write_model(
            repository, name + "_instances", INSTANCES.replace("ORDERED", ordered), {"1/model.py": LATCHED}
        )
        write_model(repository, name + "_batch", REVERSED.replace("ORDERED", ordered), {"1/model.py": SENDER})
    with ServerProcess(repository) as process:
        yield process


def test_utilization_below_one_lets_a_batch_go(server: ServerProcess) -> None:
    """The delay is an hour: only half of the slots can have sent them."""
    with Stream(server) as stream:
        stream.send("half", 1, "s", 1)
        until(lambda: [r["queued"] for r in listing(server, "half")["sequences"]] == [1])
        stream.send("half", 2, "s", 2)
        assert [stream.receive()["BATCH_SIZE"] for _ in range(2)] == [2, 2]
        for sequence in (2, 1):
            stream.send("half", sequence, "e", 1)
        got = [stream.receive() for _ in range(2)]
    assert [(g["OUTPUT"], g["POSITION"]) for g in got] == [(3, 1), (2, 0)]


def test_the_delay_expires(server: ServerProcess) -> None:
    """One of four slots never is all of them: only the deadline can have sent it."""
    with Stream(server) as stream:
        for text, total in (("s", 5), ("", 10), ("e", 15)):
            stream.send("expires", 1, text, 5)
            got = stream.receive()
            assert (got["OUTPUT"], got["BATCH_SIZE"]) == (total, 1)
    _, stats = rest(server, "GET", "/v2/models/expires/stats")
    inference = stats["model_stats"][0]["inference_stats"]
    assert inference["queue"]["count"] == 3 and inference["queue"]["ns"] >= 3 * 30_000_000


INSTANCES = """
backend: "python" max_batch_size: 1 instance_group [ { count: 2 } ]
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
sequence_batching { max_sequence_idle_microseconds: 60000000
  oldest { max_candidate_sequences: 1 preserve_ordering: ORDERED } }
"""


@pytest.mark.parametrize(("model", "order"), [("ordered_instances", [1, 2]), ("unordered_instances", [2, 1])])
def test_order_of_responses_across_instances(
    server: ServerProcess, repository: Path, model: str, order: list[int]
) -> None:
    """The first sequence's instance is held until the second's has finished."""
    with Latch(repository / model / "open") as latch, RawClient(server.grpc) as client:

        def send(value: int) -> None:
            numbers = np.full((1, 1), value, np.int32)
            whole = {"sequence_id": value, "sequence_start": True, "sequence_end": True}
            client.start(2 * value - 1, infer_messages.request(model, numbers, names=["INPUT"], **whole))

        def executions() -> int:
            _, stats = rest(server, "GET", f"/v2/models/{model}/stats")
            return int(stats["model_stats"][0]["execution_count"])

        send(1)
        until(lambda: [r["executing"] for r in listing(server, model)["sequences"]] == [1])
        send(2)
        until(lambda: executions() == 1)
        if order == [2, 1]:
            client.finish(3)
        client.sync()
        assert len(client.ends) == (order == [2, 1])
        latch.open()
        client.until(lambda: len(client.ends) == 2, "both answers")
        assert client.ends == [2 * value - 1 for value in order]


SENDER = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        for request in reversed(requests):
            value = pb.get_input_tensor_by_name(request, "INPUT").as_numpy()
            sender = request.get_response_sender()
            sender.send(pb.InferenceResponse([pb.Tensor("OUTPUT", value)]))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
REVERSED = """
backend: "python" max_batch_size: 3 model_transaction_policy { decoupled: true }
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
sequence_batching { max_sequence_idle_microseconds: 60000000
  oldest { max_candidate_sequences: 3 preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 3600000000
           preserve_ordering: ORDERED } }
"""


@pytest.mark.parametrize(("model", "order"), [("ordered_batch", [1, 2, 3]), ("unordered_batch", [3, 2, 1])])
def test_order_of_responses_within_a_batch(server: ServerProcess, model: str, order: list[int]) -> None:
    """The model answers its batch from the last request to the first; a decoupled stream does not reorder."""
    with Stream(server) as stream:
        for sequence in (1, 2, 3):
            stream.send(model, sequence, "se", sequence)
        assert [stream.receive()["OUTPUT"] for _ in range(3)] == order


def test_null_requests_account_for_every_place(server: ServerProcess) -> None:
    """Places of all batches = requests + null requests, exactly: a lost or doubled request would show."""
    clients, requests = 6, 60

    def load(seed: int) -> None:
        with Caller(server, "grpc" if seed % 2 else "http") as call:
            for i in range(requests):
                got = call("nulls", seed + 1, "s" if i == 0 else "e" if i == requests - 1 else "", 1)
                assert (got["OUTPUT"], got["CORRID"], got["READY"]) == (i + 1, seed + 1, 1)

    # a holder of slot 0 that sends nothing more: whoever follows needs a null request in its place
    with Stream(server) as stream:
        stream.send("nulls", 100, "s", 1)
        stream.receive()
        threads = [threading.Thread(target=load, args=(i,)) for i in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stream.send("nulls", 100, "e", 1)
        assert stream.receive()["OUTPUT"] == 2
    nulls = listing(server, "nulls")["null_requests"]
    _, stats = rest(server, "GET", "/v2/models/nulls/stats")
    stats = stats["model_stats"][0]
    sent = clients * requests + 2
    assert stats["inference_count"] == stats["inference_stats"]["success"]["count"] == sent
    assert nulls > 0
    assert sum(b["batch_size"] * b["compute_infer"]["count"] for b in stats["batch_stats"]) == sent + nulls
    assert sum(b["compute_infer"]["count"] for b in stats["batch_stats"]) == stats["execution_count"]
