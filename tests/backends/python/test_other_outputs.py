"""Answers that are not as the configuration says: the log says what differs, and what the model wants checked is an error."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.backends.python.models import config, isolated
from tests.support.server import ServerProcess
from tests.support.streams import Answers

# the id of a request says which outputs it is answered with
MODEL = """
import numpy as np
MADE = {
    "misnamed": [("OUTPT0", np.zeros((1, 2), np.float32))],
    "none": [],
    "extra": [("OUTPUT0", np.zeros((1, 2), np.float32)), ("MORE", np.zeros((1, 2), np.float32))],
    "type": [("OUTPUT0", np.zeros((1, 2), np.float64))],
    "rank": [("OUTPUT0", np.zeros(2, np.float32))],
    "twice": [("OUTPUT0", np.zeros((1, 2), np.float32))] * 2,
    "right": [("OUTPUT0", np.zeros((1, 2), np.float32))],
}
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor(*row) for row in MADE[r.request_id()]]) for r in requests]
"""
# answers each request with a response without data, one whose output has another name, and the end
STREAMED = """
import numpy as np
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([]))
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPT0", np.zeros(2, np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DECOUPLED = "model_transaction_policy { decoupled: true } "
INPUT = {"name": "IN", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
CHECK = 'parameters {{ key: "check_outputs" value: {{ string_value: "{}" }} }}\n'
RIGHT = ["OUTPUT0 FP32 [1, 2]"]
MISNAMED = (
    "answers without its output 'OUTPUT0' and with ['OUTPT0'], which its configuration does not have "
    "(is 'OUTPT0' meant to be it?)"
)
SECOND_LACKING = "answers without its output 'OUTPUT1'"
TWICE = "makes output 'OUTPUT0' more than once"
TYPE = "makes output 'OUTPUT0' as FP64, its configuration says FP32"
RANK = "makes output 'OUTPUT0' with 1 dimension(s), its configuration says 2, the batch's included where it has one"
EXTRA = "makes output(s) ['MORE'] that its configuration does not have"
LACKING = "answers without its output 'OUTPUT0'"


@pytest.mark.parametrize("way", ["process", "none"])
def test_an_answer_that_differs_from_the_configuration(tmp_path: Path, way: str) -> None:
    text = config("IN:TYPE_FP32:2", "OUTPUT0:TYPE_FP32:2", 4)
    for name, checked in (("m", ""), ("asked", ""), ("good", "all"), ("strict", "all"), ("lenient", "none")):
        isolated(tmp_path, name, MODEL, text + (CHECK.format(checked) if checked else ""), way=way)
    for name, checked in (("pair", "names"), ("strict_pair", "all")):
        text = config("IN:TYPE_FP32:2", "OUTPUT0:TYPE_FP32:2 OUTPUT1:TYPE_FP32:2", 4)
        isolated(tmp_path, name, MODEL, text + CHECK.format(checked), way=way)

    def names(
        server: ServerProcess, model: str, kind: str, outputs: list[str] | None = None
    ) -> list[str] | str:
        """The outputs of the answer, or its error."""
        body = {"id": kind, "inputs": [INPUT]} | (
            {} if outputs is None else {"outputs": [{"name": name} for name in outputs]}
        )
        try:
            with urlopen(
                f"http://{server.http}/v2/models/{model}/infer", json.dumps(body).encode()
            ) as answer:
                return [f"{o['name']} {o['datatype']} {o['shape']}" for o in json.load(answer)["outputs"]]
        except HTTPError as error:
            with error:
                assert error.code == 500
                return str(json.load(error)["error"])

    with ServerProcess(tmp_path) as server:
        for outputs in (None, ["OUTPUT0"]):
            assert names(server, "m", "misnamed", outputs) == f"model 'm' {MISNAMED}"
            assert names(server, "m", "none", outputs) == []
            assert names(server, "m", "extra", outputs) == RIGHT
            assert names(server, "m", "type", outputs) == ["OUTPUT0 FP64 [1, 2]"]
            assert names(server, "m", "rank", outputs) == ["OUTPUT0 FP32 [2]"]

            assert names(server, "strict", "misnamed", outputs) == f"model 'strict' {MISNAMED}"
            assert names(server, "strict", "none", outputs) == f"model 'strict' {LACKING}"
            assert names(server, "strict", "extra", outputs) == RIGHT
            assert names(server, "strict", "type", outputs) == f"model 'strict' {TYPE}"
            assert names(server, "strict", "rank", outputs) == f"model 'strict' {RANK}"

            assert names(server, "lenient", "misnamed", outputs) == []
            assert names(server, "lenient", "type", outputs) == ["OUTPUT0 FP64 [1, 2]"]
        # as many outputs as there are, of which one is missing
        assert names(server, "pair", "twice") == RIGHT * 2
        assert names(server, "strict_pair", "twice") == f"model 'strict_pair' {SECOND_LACKING}"
        assert names(server, "strict", "twice") == f"model 'strict' {TWICE}"
        assert names(server, "asked", "misnamed", ["OUTPUT0"]) == f"model 'asked' {MISNAMED}"
        assert names(server, "good", "right") == names(server, "good", "right", ["OUTPUT0"]) == RIGHT
        for said in (
            f"model 'm' {MISNAMED}: such requests fail",
            f"model 'm' {LACKING}: clients get an answer that lacks it",
            f"model 'm' {EXTRA}: they are not sent",
            f"model 'pair' {SECOND_LACKING}: clients get an answer that lacks it",
            f"model 'pair' {TWICE}: clients get it so",
            f"model 'm' {TYPE}: clients get FP64",
            f"model 'm' {RANK}: clients get it so",
            f"model 'asked' {MISNAMED}: such requests fail",
            f"model 'strict' {TYPE}: such requests fail",
            f"model 'lenient' {MISNAMED}: clients get an answer that lacks it",
        ):
            server.until_logged(said)
            assert server.log().count(said) == 1, said
        assert "model 'good'" not in server.log()


@pytest.mark.parametrize("way", ["process", "none"])
def test_responses_without_data_of_a_decoupled_model(tmp_path: Path, way: str) -> None:
    """They are right whatever is checked, but not where their data has another name."""
    text = config("IN:TYPE_FP32:2", "OUTPUT0:TYPE_FP32:2", 0, DECOUPLED + CHECK.format("all"))
    isolated(tmp_path, "m", STREAMED, text, way=way)
    tensor = grpcclient.InferInput("IN", [2], "FP32")
    tensor.set_data_from_numpy(np.ones(2, np.float32))
    with (
        ServerProcess(tmp_path) as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
        Answers(client) as answers,
    ):
        for outputs in (None, [grpcclient.InferRequestedOutput("OUTPUT0")]):
            client.async_stream_infer("m", [tensor], outputs=outputs, enable_empty_final_response=True)
            assert list(answers.result().get_response().outputs) == []
            assert f"model 'm' {MISNAMED}" in answers.error().message()
            assert answers.result().get_response().parameters["triton_final_response"].bool_param


def test_what_is_checked_may_be_set_for_a_backend(tmp_path: Path) -> None:
    text = config("IN:TYPE_FP32:2", "OUTPUT0:TYPE_FP32:2", 4)
    isolated(tmp_path, "m", MODEL, text)
    isolated(tmp_path, "wrong", MODEL, text + CHECK.format("some"))
    flags = ["--backend-config=python,check-outputs=all", "--exit-on-error=false"]
    with ServerProcess(tmp_path, *flags) as server:
        server.until_logged("parameter 'check_outputs' must be 'none', 'names' or 'all', got 'some'")
        body = {"id": "type", "inputs": [INPUT]}
        with pytest.raises(HTTPError) as caught:
            urlopen(f"http://{server.http}/v2/models/m/infer", json.dumps(body).encode())
        with caught.value as error:
            assert json.load(error)["error"] == f"model 'm' {TYPE}"
