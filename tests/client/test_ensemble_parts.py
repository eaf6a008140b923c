"""Ensembles whose models leave outputs out, and whose clients leave inputs out. Real clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.python.models import isolated
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers

# answers with the outputs that it has inputs for
PARTS = """
class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor(t.name().replace("IN", "OUT"), t.as_numpy()) for t in r.inputs()
            ])
            for r in requests
        ]
"""
# answers as often as the first value says, every other time with the first output only
TIMES = """
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            array = r.inputs()[0].as_numpy()
            for i in range(int(array[0])):
                names = ("OUT0", "OUT1") if i % 2 else ("OUT0",)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor(n, array * 0 + i) for n in names]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ROW = '{{ name: "{}" data_type: TYPE_FP32 dims: [ -1 ] {} }}'


def pair(kind: str, optional: str = "") -> str:
    """The configuration of IN0 and IN1, or OUT0 and OUT1."""
    name = "IN" if kind == "input" else "OUT"
    return f"{kind} [ {ROW.format(name + '0', optional)}, {ROW.format(name + '1', optional)} ] "


OPTIONAL = pair("input", "optional: true")


def step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    """A step of an ensemble; both maps are the model's name -> the ensemble's."""
    maps = [f'input_map {{ key: "{k}" value: "{v}" }}' for k, v in inputs.items()]
    maps += [f'output_map {{ key: "{k}" value: "{v}" }}' for k, v in outputs.items()]
    return f'{{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}'


def both(model: str, before: str, after: str) -> str:
    """A step that maps both inputs and both outputs: `before`0, `before`1 to `after`0, `after`1."""
    return step(
        model,
        {"IN0": before + "0", "IN1": before + "1"},
        {"OUT0": after + "0", "OUT1": after + "1"},
    )


def ensemble(repository: Path, name: str, *steps: str) -> None:
    text = f'platform: "ensemble" {OPTIONAL}{pair("output")}ensemble_scheduling {{ step [ {", ".join(steps)} ] }}'
    write_model(repository, name, text, {})


def one(model: str, before: str, after: str) -> str:
    return step(model, {"IN0": before}, {"OUT0": after})


@pytest.fixture(scope="module", params=["none", "process"], ids=["inside", "process"])
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    python, way = 'backend: "python" ', request.param
    first = "input [ " + ROW.format("IN0", "") + " ] "
    isolated(repository, "optional", PARTS, python + OPTIONAL + pair("output"), way)
    isolated(repository, "required", PARTS, python + pair("input") + pair("output"), way)
    isolated(repository, "single", PARTS, python + first + "output [ " + ROW.format("OUT0", "") + " ]", way)
    decoupled = "model_transaction_policy { decoupled: true } "
    isolated(repository, "times", TIMES, python + first + pair("output") + decoupled, way)
    ensemble(repository, "through", both("optional", "IN", "OUT"))
    ensemble(repository, "twice", both("optional", "IN", "m"), both("optional", "m", "OUT"))
    ensemble(repository, "strict", both("optional", "IN", "m"), both("required", "m", "OUT"))
    ensemble(
        repository,
        "split",
        both("optional", "IN", "m"),
        one("single", "m0", "OUT0"),
        one("single", "m1", "OUT1"),
    )
    ensemble(repository, "apart", one("single", "IN0", "OUT0"), one("single", "IN1", "OUT1"))
    repeated = step("times", {"IN0": "IN0"}, {"OUT0": "m0", "OUT1": "m1"})
    ensemble(repository, "repeated", repeated, both("optional", "m", "OUT"))
    with ServerProcess(repository) as process:
        yield process


def tensors(protocol: Any, given: str, value: float = 1) -> list[Any]:
    made = []
    for name in given.split():
        tensor = protocol.InferInput(name, [1], "FP32")
        tensor.set_data_from_numpy(np.full(1, value, np.float32))
        made.append(tensor)
    return made


def outputs(server: ServerProcess, model: str, given: str, asked: str, protocol: Any) -> list[str]:
    """The names of the outputs that come; `given` and `asked` are names separated by blanks."""
    wanted = [protocol.InferRequestedOutput(name) for name in asked.split()] or None
    address = server.http if protocol is httpclient else server.grpc
    with protocol.InferenceServerClient(address) as client:
        answer = client.infer(model, tensors(protocol, given), outputs=wanted).get_response()
    rows = answer["outputs"] if protocol is httpclient else answer.outputs
    return [row["name"] if protocol is httpclient else row.name for row in rows]


BOTH = "OUT0 OUT1"


@pytest.mark.parametrize("protocol", [httpclient, grpcclient], ids=["http", "grpc"])
@pytest.mark.parametrize(
    ("model", "given", "asked", "come"),
    [
        # a model of its own, for comparison
        ("optional", "IN0", "", "OUT0"),
        ("optional", "IN0", "OUT1", ""),
        ("through", "IN0 IN1", "", BOTH),
        ("through", "IN0", "", "OUT0"),
        ("through", "IN1", BOTH, "OUT1"),
        ("through", "IN0", "OUT1", ""),
        ("twice", "IN0 IN1", "", BOTH),
        ("twice", "IN0", "", "OUT0"),
        ("twice", "IN1", "OUT0", ""),
        ("strict", "IN0 IN1", "", BOTH),
        ("split", "IN0 IN1", "", BOTH),
        ("split", "IN0", "OUT0", "OUT0"),  # nobody needs the step that could not run
        ("split", "IN1", "OUT1", "OUT1"),
        ("apart", "IN0", "OUT0", "OUT0"),
        ("apart", "IN0 IN1", "OUT1", "OUT1"),
    ],
)
def test_what_was_made_is_answered(
    server: ServerProcess, model: str, given: str, asked: str, come: str, protocol: Any
) -> None:
    assert outputs(server, model, given, asked, protocol) == come.split()


@pytest.mark.parametrize(
    ("model", "given", "asked", "text"),
    [
        ("strict", "IN0", "", "expected 2 inputs but got 1 inputs for model 'required'. Got input(s) ['IN0'], but "
         "missing required input(s) ['IN1']"),
        ("strict", "IN1", "OUT1", "missing required input(s) ['IN0']"),
        ("split", "IN0", "", "expected 1 inputs but got 0 inputs for model 'single'. Got input(s) [], but missing "
         "required input(s) ['IN0']"),
        ("split", "IN0", "OUT1", "missing required input(s) ['IN0']"),
        ("apart", "IN0", "", "missing required input(s) ['IN0']"),
    ],
)  # fmt: skip
def test_a_step_that_cannot_do_without_fails_the_request(
    server: ServerProcess, model: str, given: str, asked: str, text: str
) -> None:
    for protocol, status in ((httpclient, "400"), (grpcclient, "StatusCode.INVALID_ARGUMENT")):
        with pytest.raises(InferenceServerException) as info:
            outputs(server, model, given, asked, protocol)
        assert info.value.message().startswith(f"in ensemble '{model}', [request id: <id_unknown>] expected")
        assert text in info.value.message()
        assert info.value.status() == status
    assert outputs(server, model, "IN0 IN1", "", httpclient) == BOTH.split()


def test_each_response_of_a_decoupled_step_may_leave_out_its_own(server: ServerProcess) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client) as answers:
        client.async_stream_infer("repeated", tensors(grpcclient, "IN0", 4))
        seen = []
        for _ in range(4):
            result = answers.result()
            seen.append([row.name for row in result.get_response().outputs])
    assert seen == [["OUT0"], BOTH.split()] * 2
