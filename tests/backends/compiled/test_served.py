"""A backend in C, through a real server and Triton's own clients: execution, answers of all kinds, what it asks for."""

from __future__ import annotations

import json
import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

from tests.backends.compiled.asking import ONE, TEXT, asked, numbers, text_of
from tests.support import metrics
from tests.support.datatypes import TYPES
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers
from tests.support.waiting import until

pytestmark = pytest.mark.slow


def test_what_a_configuration_leaves_out_the_backend_completes(client: Any) -> None:
    config = client.get_model_config("identity")
    assert [(row["name"], row["data_type"], row["dims"]) for row in config["input"]] == [
        ("IN", "TYPE_INT32", [-1])
    ]
    assert config["max_batch_size"] == 8 and "dynamic_batching" in config
    assert [(row["kind"], row["count"]) for row in config["instance_group"]] == [("KIND_CPU", 2)], (
        "what it prefers"
    )
    assert client.infer("identity", [numbers(1, 2, 3)]).as_numpy("OUT").tolist() == [[1, 2, 3]]


def test_elements_of_every_datatype_come_back_over_http_and_grpc(client: Any, server: ServerProcess) -> None:
    given = {kind: np.array([[0, 1, 1]]).astype(kind.lower().replace("fp", "float")) for kind in TYPES[:-1]}
    given["STRING"] = np.array([[b"", "schön".encode(), b"\0\xff" * 3]], object)
    with grpc.InferenceServerClient(server.grpc) as other:
        for module, caller in ((http, client), (grpc, other)):
            inputs = []
            for kind, array in given.items():
                made = module.InferInput(f"IN_{kind}", [1, 3], kind.replace("STRING", "BYTES"))
                made.set_data_from_numpy(array)
                inputs.append(made)
            found = caller.infer("types", inputs)
            for kind, array in given.items():
                assert found.as_numpy(f"OUT_{kind}").tolist() == array.tolist(), kind
            wanted = [module.InferRequestedOutput("OUT_FP16"), module.InferRequestedOutput("OUT_STRING")]
            found = caller.infer("types", inputs, outputs=wanted)
            assert (
                found.as_numpy("OUT_INT8") is None
                and found.as_numpy("OUT_STRING").tolist() == given["STRING"].tolist()
            )


def test_a_large_tensor_comes_back_whole(client: Any) -> None:
    array = np.arange(3_000_000, dtype=np.int32).reshape(1, -1)
    made = http.InferInput("IN", list(array.shape), "INT32")
    made.set_data_from_numpy(array)
    for _ in range(3):  # the memory of the first is used again
        assert (client.infer("probe", [made]).as_numpy("OUT") == array).all()


def test_parameters_of_every_type_arrive_and_return(client: Any) -> None:
    given = {"text": "grün", "number": -(1 << 40), "truth": True, "real": 0.5}
    found = client.infer("probe", [numbers(1)], parameters=given).get_response()["parameters"]
    assert found == given and type(found["truth"]) is bool


def test_requests_meet_in_a_batch(client: Any) -> None:
    waiting = [client.async_infer("batched", [numbers(i)], parameters={"do": "batch"}) for i in range(4)]
    found = [one.get_result() for one in waiting]
    assert [one.as_numpy("OUT").tolist() for one in found] == [[[i]] for i in range(4)]
    assert max(one.get_response()["parameters"]["batch"] for one in found) > 1


def test_what_a_request_says_can_be_asked_for(client: Any) -> None:
    found = text_of(client, "ask", request_id="name", timeout=1234)
    assert found.startswith(
        "id=name correlation=0 flags=0 timeout=1234 cancelled=0 ready=1 properties=1,2 | "
    )
    assert found.endswith("5 TRITONSERVER_ServerNew is not supported by this server"), (
        "it says so by its name"
    )


@pytest.mark.parametrize(
    "what, status, message",
    [
        ("fail", "404", "the probe has not found it"),
        ("refuse all", "503", "not today"),
        ("nothing", "500", "the backend has let go of the request without a response"),
        (
            "short",
            "500",
            "the backend's output 'OUT' cannot be used: its shape needs 16 bytes, its buffer has 8",
        ),
        (
            "no string",
            "500",
            "the backend's output 'TEXT' cannot be used: its buffer does not hold 1 strings",
        ),
        (
            "many dimensions",
            "500",
            "the backend's output 'TEXT' cannot be used: it has more than 64 dimensions",
        ),
    ],
)
def test_an_error_is_that_requests_own(client: Any, what: str, status: str, message: str) -> None:
    with pytest.raises(InferenceServerException) as failed:
        asked(client, what)
    assert failed.value.status() == status and str(failed.value.message()).startswith(message)
    assert client.infer("probe", [numbers(3)]).as_numpy("OUT").tolist() == [[3]]


def test_a_request_is_answered_after_execute_has_returned(client: Any) -> None:
    waiting = [client.async_infer("probe", [numbers(i)], parameters={"do": "later"}) for i in range(20)]
    assert [one.get_result().as_numpy("OUT").tolist() for one in waiting] == [[[77]]] * 20


def test_a_request_keeps_its_inputs_until_it_is_released(client: Any) -> None:
    def large(value: int, what: str) -> int:
        tensor = http.InferInput("IN", [1, 50_000], "INT32")
        tensor.set_data_from_numpy(np.full((1, 50_000), value, np.int32))
        return int(client.infer("probe", [tensor], parameters={"do": what}).as_numpy("OUT")[0, 0])

    assert large(111, "keep") == 111
    for value in (222, 333, 444):
        large(value, "")
    assert large(555, "look at kept") == 111


def test_what_is_called_wrongly_is_an_error_and_harms_nobody(client: Any, server: ServerProcess) -> None:
    with pytest.raises(InferenceServerException, match="as it should"):
        asked(client, "wrongly")
    until(lambda: "|3 TRITONBACKEND_RequestId" in server.log(), server.log)
    line = next(line for line in server.log().splitlines() if "|3 TRITONBACKEND_RequestId" in line)
    found = line[line.index("|") :].strip("|").split("|")
    functions = ["TRITONBACKEND_RequestId"] * 3 + ["TRITONSERVER_MessageDelete", "TRITONBACKEND_ResponseSend"]
    assert [text.split()[1] for text in found] == [
        f"{name}:" for name in (*functions, "TRITONBACKEND_OutputBuffer", "TRITONBACKEND_RequestRelease")
    ]
    assert all(text.startswith("3 ") and "released before" in text for text in found)


def test_a_decoupled_model_streams(server: ServerProcess) -> None:
    array = np.array([[1]], np.int32)
    made = grpc.InferInput("IN", [1, 1], "INT32")
    made.set_data_from_numpy(array)
    with grpc.InferenceServerClient(server.grpc) as client, Answers(client) as answers:
        client.async_stream_infer(
            "stream", [made], parameters={"do": "stream"}, enable_empty_final_response=True
        )
        values = []
        while True:
            result = answers.result()
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
            values.append(int(result.as_numpy("OUT")[0, 0]))
        client.async_stream_infer("stream", [made], parameters={"do": "fail"})
        assert "the probe has not found it" in str(answers.error())
    assert values == [0, 1, 2, 3, 4]


def test_a_callback_sends_more_than_a_client_may_leave_unread(server: ServerProcess) -> None:
    """Each of its responses waits until the one before was read: whoever tells it so does not wait for the callback."""
    made = grpc.InferInput("IN", [1, 1], "INT32")
    made.set_data_from_numpy(np.array([[1]], np.int32))
    with grpc.InferenceServerClient(server.grpc) as client, Answers(client) as answers:
        for _ in range(2):
            client.async_stream_infer("stream", [made], parameters={"do": "relay"})
            found = [answers.result().as_numpy("OUT") for _ in range(9)]
            assert all(array.shape == (1, 1 << 18) and np.ptp(array) == 0 for array in found)
            values = [int(array[0, 0]) for array in found]
            assert sorted(values) == [0, 1, 2, 10, 11, 12, 20, 21, 22]
            assert all(values[at + 1] == values[at] + 1 for at in (0, 1, 3, 4, 6, 7)), "one after the other"


def test_states_of_sequences(client: Any) -> None:
    for id in (11, 12):
        for i in (1, 2, 3):
            more = {"sequence_id": id, "sequence_start": i == 1, "sequence_end": i == 3}
            found = client.infer("sum", [numbers(10 * i)], parameters={"do": "accumulate"}, **more)
            assert found.as_numpy("OUT").tolist() == [[(10, 30, 60)[i - 1]]]


def test_metrics_of_its_own(client: Any, server: ServerProcess) -> None:
    assert [text_of(client, "count") for _ in range(2)] == ["2", "4"]
    assert 'probe_total{model="probe"} 4' in metrics.scrape(server)


def test_it_calls_models_of_the_server(client: Any) -> None:
    assert text_of(client, "call identity") == "OUT=42"
    assert "nobody" in text_of(client, "call nobody") and "error" in text_of(client, "call nobody")


def test_a_raw_input_is_what_the_models_configuration_says(client: Any) -> None:
    assert text_of(client, "call, raw") == "OUT=42"
    short = "3 3 bytes are no tensor of the shape [-1] of the raw input 'IN'"
    assert text_of(client, "call, raw and short") == short


def test_classes_of_what_it_has_called_have_labels(client: Any) -> None:
    found = text_of(client, "call, labelled")
    assert found == (
        "größte, none, none; 3 TRITONSERVER_InferenceResponseOutputClassificationLabel: out of bounds index"
    ), "the second label is empty, and there is no third"


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("wanted in pinned memory", "allocated=1 attributed=1 type=1"),
        ("wanted on a GPU", "allocated=0 attributed=0 type=1"),
        ("refused by the query", "error: nowhere"),
        ("refused by the attributes", "error: not like that"),
    ],
)
def test_an_allocator_is_asked_where_and_completes_attributes(client: Any, how: str, told: str) -> None:
    assert text_of(client, f"call, {how}") == told


def test_its_requests_have_their_priority(client: Any) -> None:
    """Requests of the second level expire while the batcher waits for more."""
    assert text_of(client, "priority 1") == "OUT=42"
    assert text_of(client, "priority 2").startswith("error: ")


def test_every_function_does_what_it_says(client: Any, server: ServerProcess) -> None:
    assert text_of(client, "every", model="every", sequence_id="a sequence") == "all as it should be"
    text = metrics.scrape(server)
    found = [
        metrics.value(text, f"probe_durations_{name}", **at)
        for name, at in (("bucket", {"le": "10"}), ("sum", {}))
    ]
    assert found == [1, 5]
    usage = client.get_inference_statistics("every")["model_stats"][0]["memory_usage"]
    assert [row["byte_size"] for row in usage if row["type"] == "GPU"] == [2000]


def test_what_the_server_says_of_itself_and_its_models(client: Any) -> None:
    def says(what: str) -> Any:
        return json.loads(text_of(client, f"server says {what}"))

    assert text_of(client, "server says ready probe") == "ready=1 batching=2"
    assert says("server") == client.get_server_metadata()
    assert says("metadata stream") == client.get_model_metadata("stream")
    assert says("config sum") == client.get_model_config("sum")
    assert says("statistics types") == client.get_inference_statistics("types")
    assert [row["name"] for row in says("statistics")["model_stats"]] == sorted(
        row["name"] for row in client.get_inference_statistics()["model_stats"]
    )
    assert says("index") == client.get_model_repository_index()
    assert [row["state"] for row in says("ready-index")] == ["READY"] * len(says("index"))
    codes = {"400": 3, "404": 2}
    for subject, getter in (
        ("metadata", client.get_model_metadata),
        ("config", client.get_model_config),
        ("statistics", client.get_inference_statistics),
    ):
        with pytest.raises(InferenceServerException) as failed:
            getter("nobody")
        text = text_of(client, f"server says {subject} nobody")
        assert text == f"{codes[failed.value.status()]} {failed.value.message()}"
    assert text_of(client, "server says format probe").startswith("5 TRITONSERVER_ServerModelConfig: ")


def test_the_server_s_metrics(client: Any, server: ServerProcess) -> None:
    text = text_of(client, "server says metrics")
    assert metrics.value(text, "nv_inference_request_success", model="probe", version="1") > 0
    assert set(metrics.families(text)) <= set(metrics.families(metrics.scrape(server)))


def test_there_are_no_metrics_where_they_are_off(backends: Path, tmp_path: Path) -> None:
    write_model(tmp_path, "probe", TEXT + ONE)
    server = ServerProcess(tmp_path, f"--backend-directory={backends}", "--allow-metrics=false")
    try:
        with http.InferenceServerClient(server.http) as client:
            told = text_of(client, "server says metrics")
    finally:
        server.stop()
    assert told == "5 the server has no metrics port (--allow-metrics=false), so it tells none"


def test_its_log_lines_and_its_command_line(server: ServerProcess) -> None:
    line = next(line for line in server.log().splitlines() if "probe: backend probe" in line)
    assert json.loads(line[line.index("{") :])["cmdline"]["color"] == "green"


def test_it_is_told_what_the_log_shows_now(client: Any, server: ServerProcess) -> None:
    begun = [line for line in server.log().splitlines() if "probe: backend probe" in line]
    assert len(begun) > 10 and all(" shown=1110 " in line for line in begun), "those that complete, too"
    assert text_of(client, "shown") == "1110"
    try:
        client.update_log_settings({"log_verbose_level": 2, "log_warning": False})
        assert text_of(client, "shown") == "1011", "by who asks next"
    finally:
        client.update_log_settings({"log_verbose_level": 0, "log_warning": True})
    assert text_of(client, "shown") == "1110"


def test_the_servers_process_never_opens_the_library(server: ServerProcess) -> None:
    assert "libtriton_probe" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_a_cancelled_request_is_told_so(server: ServerProcess) -> None:
    made = grpc.InferInput("IN", [1, 1], "INT32")
    made.set_data_from_numpy(np.array([[1]], np.int32))
    with grpc.InferenceServerClient(server.grpc) as client:
        done: queue.Queue[Any] = queue.Queue()
        call = client.async_infer(
            "probe", [made], lambda result, error: done.put(error), parameters={"do": "wait for cancel"}
        )
        call.cancel()
        assert done.get(timeout=30) is not None
        client.async_infer("probe", [made], lambda result, error: done.put(error))
        assert done.get(timeout=30) is None, "the instance is free again"
