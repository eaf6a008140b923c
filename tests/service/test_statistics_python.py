"""Statistics and metrics that only Python models can show: decoupled responses, errors, warm-up,
memory, custom metrics."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.python.models import config, isolated, python_model
from tests.support.cancelled import UNTIL_CANCELLED
from tests.support.metrics import families, scrape, value
from tests.support.server import ServerProcess
from tests.support.statistics import stats
from tests.support.streams import Answers
from tests.support.waiting import until

# IN = [good, bad, close]: good responses, then bad errors, then a final flag if close
DECOUPLED = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            good, bad = (int(x) for x in pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[:2])
            for i in range(good):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(1, i, np.float32))]))
            for _ in range(bad):
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("bad")))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# the same from threads of its own, which go on when execute() has long returned
THREADED = """
import threading


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            good, bad = (int(x) for x in pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[:2])
            threading.Thread(target=self.answer, args=(request.get_response_sender(), good, bad)).start()

    def answer(self, sender, good, bad):
        for i in range(good):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(1, i, np.float32))]))
        for _ in range(bad):
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("bad")))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ENDLESS = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.float32))]))
            until_cancelled(sender)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
FAILING = """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            wish = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().flatten()[0])
            if wish == 2:
                raise ValueError("all of it")
            answers.append(
                pb_utils.InferenceResponse(error=pb_utils.TritonError("one of it")) if wish
                else pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros((1, 1), np.float32))])
            )
        return answers
"""
MEMORY = """
class TritonPythonModel:
    def initialize(self, args):
        self.block = np.ones(64 << 20, np.uint8)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.float32))]) for _ in requests]
"""
LARGE = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.ones(16 << 20, np.float32))]) for _ in requests]
"""
LARGE_RESPONSES = """
class TritonPythonModel:
    def initialize(self, args):
        self.prepared = np.ones(8 << 20, np.float32)

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for _ in range(3):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.prepared)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CUSTOM = """
class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily(name="answers", description="How many", kind=pb_utils.MetricFamily.COUNTER)
        self.answers = family.Metric(labels={"model": args["model_name"], "kind": "all"})
        sizes = pb_utils.MetricFamily("sizes", "How large", pb_utils.MetricFamily.HISTOGRAM)
        self.sizes = sizes.Metric(labels={}, buckets=[1, 10])

    def execute(self, requests):
        self.answers.increment(len(requests))
        self.sizes.observe(5)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.float32))]) for _ in requests]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    decoupled = config(extra="model_transaction_policy { decoupled: true }")
    python_model(repository, "threaded", "import numpy as np\n" + THREADED, decoupled)
    for name in ("decoupled", "by_grpc", "storm"):
        python_model(repository, name, "import numpy as np\n" + DECOUPLED, decoupled)
    python_model(
        repository,
        "failing",
        "import numpy as np\n" + FAILING,
        config("IN:TYPE_FP32:1", "OUT:TYPE_FP32:1", 8),
    )
    python_model(repository, "endless", UNTIL_CANCELLED + "import numpy as np\n" + ENDLESS, decoupled)
    both = config(extra="instance_group [ { count: 2 } ]")
    isolated(repository, "apart", "import numpy as np\n" + MEMORY, both)
    isolated(repository, "apart_small", "import numpy as np\n" + MEMORY.replace("64 << 20", "1"))
    isolated(repository, "large", "import numpy as np\n" + LARGE)
    isolated(repository, "sent", "import numpy as np\n" + DECOUPLED, decoupled)
    isolated(repository, "large_responses", "import numpy as np\n" + LARGE_RESPONSES, decoupled)
    python_model(repository, "custom", "import numpy as np\n" + CUSTOM)
    with ServerProcess(repository, "--metrics-config=histogram_latencies=true") as process:
        yield process


def counts(durations: dict[str, Any]) -> dict[str, int]:
    return {k: v["count"] for k, v in durations.items() if v["count"]}


def stream(server: ServerProcess, model: str, *wishes: tuple[int, int]) -> None:
    """Sends each wish and waits for its final response."""
    with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client) as answers:
        for good, bad in wishes:
            tensor = grpcclient.InferInput("IN", [2], "FP32")
            tensor.set_data_from_numpy(np.array([good, bad], np.float32))
            client.async_stream_infer(model, [tensor], enable_empty_final_response=True)
            for _ in range(good + bad + 1):
                answers.next()


def test_decoupled_responses(server: ServerProcess) -> None:
    stream(server, "decoupled", (3, 0), (0, 0), (1, 1))
    # an execution is counted when execute() has returned, which may be after the last response
    until(lambda: stats(server, "decoupled")["execution_count"] == 3, "the third execution")
    got = stats(server, "decoupled")
    assert {k: counts(v) for k, v in got["response_stats"].items()} == {
        "0": {"compute_infer": 3, "compute_output": 2, "success": 2, "empty_response": 1},
        "1": {"compute_infer": 2, "compute_output": 1, "success": 1, "fail": 1},
        "2": {"compute_infer": 2, "compute_output": 1, "success": 1, "empty_response": 1},
        "3": {"compute_infer": 1, "empty_response": 1},
    }
    for entry in got["response_stats"].values():
        assert list(entry) == [
            "compute_infer",
            "compute_output",
            "success",
            "fail",
            "empty_response",
            "cancel",
        ]
        ended = entry["success"]["ns"] + entry["fail"]["ns"] + entry["empty_response"]["ns"]
        assert entry["compute_infer"]["ns"] + entry["compute_output"]["ns"] == ended
    assert counts(got["inference_stats"]) == {
        "success": 2, "fail": 1, "queue": 2, "compute_input": 2, "compute_infer": 2, "compute_output": 2,
    }  # fmt: skip
    assert (got["inference_count"], got["execution_count"]) == (2, 3)
    inference = got["inference_stats"]
    stages = ("queue", "compute_input", "compute_infer", "compute_output")
    assert inference["success"]["ns"] >= sum(inference[k]["ns"] for k in stages)
    labels = {"model": "decoupled", "version": "1"}
    text = scrape(server)
    assert value(text, "nv_inference_first_response_histogram_ms_count", **labels) == 3
    assert (
        value(text, "nv_inference_request_failure", reason="OTHER", **labels)
        + value(text, "nv_inference_request_failure", reason="BACKEND", **labels)
        == 1
    )


def test_copying_a_response_out_of_a_process_is_output(server: ServerProcess) -> None:
    """Three responses that were ready and have 32 MiB each."""
    with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client) as answers:
        tensor = grpcclient.InferInput("IN", [2], "FP32").set_data_from_numpy(np.zeros(2, np.float32))
        client.async_stream_infer("large_responses", [tensor], enable_empty_final_response=True)
        answers.results(4)
    responses = stats(server, "large_responses")["response_stats"]
    # at 100 GiB/s, faster than any machine copies; nothing is said of what comes before, where the machine may stand still
    assert all(responses[str(i)]["compute_output"]["ns"] > 300_000 for i in range(3))


def check_decoupled(got: dict[str, Any]) -> None:
    """What must hold in every snapshot of a decoupled model that is never cancelled."""
    inference, held, made = got["inference_stats"], got["live"], got["accounts"]
    number = {k: v["count"] for k, v in inference.items()}
    stages = ("queue", "compute_input", "compute_infer", "compute_output")
    assert {number[stage] for stage in stages} == {number["success"]}
    assert inference["success"]["ns"] >= sum(inference[stage]["ns"] for stage in stages)
    assert got["inference_count"] == number["success"] == made["answered"]
    assert made["accepted"] == made["answered"] + made["failed"] + held["accepted"]
    assert (made["failed"], made["cancelled"]) == (number["fail"], 0)
    # between its execution and its last response a request is in none of the three
    assert held["accepted"] >= held["queued"] + held["prepared"] + held["executing"]
    assert (held["inflight_bytes"] > 0) == (held["accepted"] > 0)
    finals = 0
    for entry in got["response_stats"].values():
        ended = [entry[kind] for kind in ("success", "fail", "empty_response")]
        assert entry["compute_infer"]["count"] == sum(e["count"] for e in ended)
        assert entry["compute_output"]["count"] == entry["success"]["count"]
        assert entry["compute_infer"]["ns"] + entry["compute_output"]["ns"] == sum(e["ns"] for e in ended)
        finals += entry["empty_response"]["count"]
    assert finals == made["answered"] + made["failed"], "every request ended with its flag"
    for stage, histogram in got["percentiles"].items():
        assert histogram["count"] == number["success"], stage


@pytest.mark.parametrize("model", ["storm", "threaded"])
def test_snapshots_of_a_decoupled_model_are_consistent_during_a_storm(
    server: ServerProcess, model: str
) -> None:
    dice = random.Random(model)
    wishes = [[(dice.randint(0, 6), int(dice.random() < 0.3)) for _ in range(30)] for _ in range(4)]
    threads = [threading.Thread(target=stream, args=(server, model, *own)) for own in wishes]
    for thread in threads:
        thread.start()
    query, polls = "live=true&percentiles=50", 0
    while any(thread.is_alive() for thread in threads):
        check_decoupled(stats(server, model, query))
        polls += 1
    assert polls > 1
    got = stats(server, model, query)
    check_decoupled(got)
    sent = [wish for own in wishes for wish in own]
    assert got["accounts"]["accepted"] == len(sent) and not any(got["live"].values())
    assert got["accounts"]["failed"] == sum(bad for _, bad in sent)
    totals = [sum(e[kind]["count"] for e in got["response_stats"].values()) for kind in ("success", "fail")]
    assert totals == [sum(good for good, _ in sent), sum(bad for _, bad in sent)]
    for index, entry in got["response_stats"].items():
        assert entry["success"]["count"] == sum(good > int(index) for good, _ in sent)


def test_copies_into_and_out_of_processes_are_counted(server: ServerProcess) -> None:
    """What is copied out of a process, and what a decoupled model is given."""
    numbers = np.zeros(16 << 20, np.float32)
    with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client) as answers:
        tensor = grpcclient.InferInput("IN", [len(numbers)], "FP32")
        tensor.set_data_from_numpy(numbers)
        client.async_stream_infer("sent", [tensor], enable_empty_final_response=True)
        answers.result()  # no response of its own: `good` is 0
        client.stop_stream()
        told = client.get_inference_statistics("sent").model_stats[0].inference_stats.compute_input
        assert (told.count, told.ns > 0) == (1, True), "it was answered before its batch was back"
        small = grpcclient.InferInput("IN", [1], "FP32")
        small.set_data_from_numpy(numbers[:1])
        client.infer("large", [small])
        told = client.get_inference_statistics("large").model_stats[0].inference_stats.compute_output
        # 64 MiB at 100 GiB/s, faster than any machine copies
        assert (told.count, told.ns > 600_000) == (1, True)
    got = stats(server, "large")
    assert got["batch_stats"][0]["compute_output"] == got["inference_stats"]["compute_output"]


def test_a_stream_that_its_client_leaves_is_cancelled(server: ServerProcess) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client) as answers:
        tensor = grpcclient.InferInput("IN", [2], "FP32")
        tensor.set_data_from_numpy(np.zeros(2, np.float32))
        client.async_stream_infer("endless", [tensor])
        answers.result()
        client.stop_stream(cancel_requests=True)

    def ended() -> bool:
        now = stats(server, "endless")
        return bool(now["inference_stats"]["fail"]["count"] and now["execution_count"])

    until(ended, "the cancelled stream's end")
    got = stats(server, "endless")
    assert counts(got["inference_stats"]) == {"fail": 1}
    assert {k: counts(v) for k, v in got["response_stats"].items()} == {
        "0": {"compute_infer": 1, "compute_output": 1, "success": 1},
        "1": {"cancel": 1},
    }
    labels = {"model": "endless", "version": "1"}
    assert value(scrape(server), "nv_inference_request_failure", reason="CANCELED", **labels) == 1


def test_response_stats_over_grpc(server: ServerProcess) -> None:
    stream(server, "by_grpc", (2, 0))
    plain = stats(server, "by_grpc")["response_stats"]
    with grpcclient.InferenceServerClient(server.grpc) as client:
        message = client.get_inference_statistics("by_grpc").model_stats[0].response_stats
    assert sorted(message) == sorted(plain) == ["0", "1", "2"]
    for key, entry in plain.items():
        for name, duration in entry.items():
            assert message[key].HasField(name)
            assert getattr(message[key], name).count == duration["count"]
            assert getattr(message[key], name).ns == duration["ns"]


def test_model_exceptions_count_as_executions_and_failures(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        for wish in (0, 1, 2):
            tensor = httpclient.InferInput("IN", [2, 1], "FP32")
            tensor.set_data_from_numpy(np.full((2, 1), wish, np.float32))
            if wish:
                with pytest.raises(InferenceServerException, match="of it"):
                    client.infer("failing", [tensor])
            else:
                client.infer("failing", [tensor])
    got = stats(server, "failing")
    assert counts(got["inference_stats"]) == {
        "success": 1, "fail": 2, "queue": 1, "compute_input": 1, "compute_infer": 1, "compute_output": 1,
    }  # fmt: skip
    assert (got["inference_count"], got["execution_count"]) == (2, 3)
    assert [b["batch_size"] for b in got["batch_stats"]] == [2]
    assert counts(got["batch_stats"][0] | {"batch_size": {"count": 0}})["compute_infer"] == 3
    assert got["last_inference"] > 0 and got["response_stats"] == {}


def test_memory_usage_of_processes_that_load_together(server: ServerProcess) -> None:
    """Each model has what its own processes hold, whatever the others allocate at the same time."""
    large, small = stats(server, "apart")["memory_usage"], stats(server, "apart_small")["memory_usage"]
    assert [(row["type"], row["id"]) for row in (*large, *small)] == [("CPU", 0)] * 2
    assert 2 * 64 << 20 < large[0]["byte_size"] < 260 << 20, "two instances"
    assert 0 < small[0]["byte_size"] < 60 << 20
    with grpcclient.InferenceServerClient(server.grpc) as client:
        [row] = client.get_inference_statistics("apart").model_stats[0].memory_usage
    assert (row.type, row.id, row.byte_size) == ("CPU", 0, large[0]["byte_size"])
    labels = {"model": "apart", "version": "1", "type": "CPU", "id": "0"}
    assert value(scrape(server), "neptrio_model_memory_bytes", **labels) == large[0]["byte_size"]


HOLDING = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        pb_utils.holds_memory([("GPU", 1, 1), ("CPU_PINNED", 0, 3)])
        pb_utils.holds_memory([("GPU", 1, 1 << 40), ("CPU_PINNED", 0, 5)])
        for rows in ([("TPU", 0, 1)], [("GPU", -1, 1)], [("GPU", 0, -1)], ["GPU"], [("GPU", 0, 1)] * 65):
            try:
                pb_utils.holds_memory(rows)
            except ValueError:
                continue
            raise AssertionError(rows)

    def execute(self, requests):
        return []
"""


def test_memory_that_a_process_tells_of(tmp_path: Path) -> None:
    isolated(tmp_path, "holding", HOLDING, config() + "instance_group { count: 2 kind: KIND_CPU } ")
    with ServerProcess(tmp_path) as server:
        rows = {
            (row["type"], row["id"]): row["byte_size"] for row in stats(server, "holding")["memory_usage"]
        }
        assert rows.pop(("CPU", 0)) > 0 and rows == {("GPU", 1): 2 << 40, ("CPU_PINNED", 0): 10}


GROWING = """
import threading
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        pb_utils.holds_memory([("GPU", 1, 7)])
        threading.Thread(target=self.grow, daemon=True).start()

    def grow(self):
        with open(FIFO) as told:
            told.read()
        pb_utils.holds_memory([("GPU", 1, 9)])

    def execute(self, requests):
        return []
"""


@pytest.mark.slow
def test_the_page_follows_what_a_model_holds_while_nobody_asks_it(tmp_path: Path) -> None:
    fifo = tmp_path / "grow"
    os.mkfifo(fifo)
    isolated(tmp_path / "models", "growing", GROWING.replace("FIFO", repr(str(fifo))), config())
    labels = {"model": "growing", "version": "1", "type": "GPU", "id": "1"}
    with ServerProcess(tmp_path / "models") as server:

        def told() -> int:
            return next(
                row["byte_size"] for row in stats(server, "growing")["memory_usage"] if row["type"] == "GPU"
            )

        assert told() == value(scrape(server), "neptrio_model_memory_bytes", **labels) == 7
        fifo.write_text("now")
        until(lambda: told() == 9, "it is told of")
        assert value(scrape(server), "neptrio_model_memory_bytes", **labels) == 9


def test_memory_usage_of_a_model_that_loads_alone(tmp_path: Path) -> None:
    isolated(tmp_path, "memory", "import numpy as np\n" + MEMORY, way="none")
    with ServerProcess(tmp_path) as server:
        (usage,) = stats(server, "memory")["memory_usage"]
        assert 60 << 20 < usage["byte_size"] < 100 << 20
        labels = {"model": "memory", "version": "1", "type": "CPU", "id": "0"}
        assert value(scrape(server), "neptrio_model_memory_bytes", **labels) == usage["byte_size"]


def test_custom_metrics(server: ServerProcess) -> None:
    tensor = httpclient.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.zeros(1, np.float32))
    with httpclient.InferenceServerClient(server.http) as client:
        for _ in range(3):
            client.infer("custom", [tensor])
    text = scrape(server)
    assert value(text, "answers", model="custom", kind="all") == 3
    assert value(text, "sizes_bucket", le="1") == 0
    assert value(text, "sizes_bucket", le="10") == value(text, "sizes_count") == 3
    found = families(text)
    assert (found["answers"].type, found["answers"].documentation) == ("counter", "How many")
