"""What models written for a Triton server find: the same in the server's process and in one of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.python.models import ISOLATION, config, python_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers

HOMES = {"inside": ISOLATION.format("none"), "process": ISOLATION.format("process")}

# answers with what its parameter "code" is as an expression over the request
SEES = """
import json
import numpy as np

class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        answers = []
        for r in requests:
            names = {"r": r, "names": r.requested_output_names(), "args": self.args, "pb_utils": pb_utils}
            seen = eval(json.loads(r.parameters())["code"], names)
            text = np.array([json.dumps(seen)], np.object_)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("B", text), pb_utils.Tensor("A", text)]))
        return answers
"""

# makes an output more than its configuration has
DEBUGS = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor(n, np.ones(1, np.float32)) for n in ("OUT", "DEBUG")])
                for r in requests]
"""

DEBUGS_OFTEN = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            for _ in range(2):
                sender.send(pb_utils.InferenceResponse(
                    [pb_utils.Tensor(n, np.ones(1, np.float32)) for n in ("DEBUG", "OUT")]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# returns what its parameter "code" is as an expression
RETURNS = """
import json
import numpy as np

class TritonPythonModel:
    {0}def execute(self, requests):
        one = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.ones(1, np.float32))])
        return eval(json.loads(requests[0].parameters())["code"])
"""
# completes its configuration with what no method sets, in the way that is left for it
COMPLETES = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        config._model_config["dynamic_batching"]["priority_levels"] = 20
        config._model_config["dynamic_batching"]["default_priority_level"] = 10
        return config

    def execute(self, requests):
        raise RuntimeError("not here")
"""
DECOUPLED = " model_transaction_policy { decoupled: true }"
TWO = " instance_group { count: 2 kind: KIND_CPU }"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    outputs = "B:TYPE_STRING:-1 A:TYPE_STRING:-1"
    for home, extra in HOMES.items():
        python_model(repository, f"sees_{home}", SEES, config(outputs=outputs) + extra)
        for kind, group in (("grouped", "{ kind: KIND_CPU }"), ("named", '{ name: "mine" kind: KIND_CPU }')):
            text = config(outputs=outputs, extra=f"instance_group {group}")
            python_model(repository, f"{kind}_{home}", SEES, text + extra)
        python_model(repository, f"completes_{home}", COMPLETES, f'backend: "python" {extra}')
        python_model(repository, f"debugs_{home}", DEBUGS, config(extra=TWO) + extra)
        python_model(repository, f"debugs_often_{home}", DEBUGS_OFTEN, config(extra=DECOUPLED) + extra)
        for form, word in (("", ""), ("async_", "async ")):
            python_model(repository, f"{form}returns_{home}", RETURNS.format(word), config() + extra)
        python_model(repository, f"only_sends_{home}", RETURNS.format(""), config(extra=DECOUPLED) + extra)
    with ServerProcess(repository) as process:
        yield process


def infer(
    server: ServerProcess,
    model: str,
    outputs: list[str] | None = None,
    protocol: Any = httpclient,
    **parameters: Any,
) -> Any:
    tensor = protocol.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.ones(1, np.float32))
    asked = None if outputs is None else [protocol.InferRequestedOutput(name) for name in outputs]
    with protocol.InferenceServerClient(server.http if protocol is httpclient else server.grpc) as client:
        return client.infer(model, [tensor], outputs=asked, parameters=parameters)


def sees(server: ServerProcess, home: str, code: str, outputs: list[str] | None = None, **more: Any) -> Any:
    """The value of the Python expression `code` in the model, which may use r, names and args."""
    result = infer(server, f"sees_{home}", outputs, code=code, **more)
    return json.loads(result.as_numpy("A")[0])


def stream(server: ServerProcess, model: str, count: int, **parameters: Any) -> list[Any]:
    """The first `count` responses of a stream to one request: results, or the texts of errors."""
    tensor = grpcclient.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.ones(1, np.float32))
    with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client) as answers:
        client.async_stream_infer(model, [tensor], parameters=parameters, enable_empty_final_response=True)
        found = [answers.next() for _ in range(count)]
    return [one.message() if isinstance(one, InferenceServerException) else one for one in found]


def output_names(result: Any) -> list[str]:
    """The names of a gRPC response's outputs, in order."""
    return [output.name for output in result.get_response().outputs]


@pytest.mark.parametrize("home", HOMES)
def test_requested_output_names_are_a_set_that_keeps_its_order(server: ServerProcess, home: str) -> None:
    assert sees(server, home, "isinstance(names, set)")
    assert sees(server, home, "sorted(names - {'B'})") == ["A"]
    assert sees(server, home, "[names.issubset({'A', 'B', 'C'}), names == {'A', 'B'}]") == [True, True]
    assert sees(server, home, "[*names, repr(names)]") == ["B", "A", "{'B', 'A'}"]  # as configured
    assert sees(server, home, "list(names)", ["A", "B"]) == ["A", "B"]
    assert sees(server, home, "list(names)", ["A"]) == ["A"]
    changed = "(names.discard('B'), names.add('X'), list(names))[-1]"
    assert sees(server, home, changed) == ["A", "X"]
    assert sees(server, home, "list(names)") == ["B", "A"], "the next request has a set of its own"


@pytest.mark.parametrize("home", HOMES)
def test_parameters_are_the_text_that_a_triton_server_gives(server: ServerProcess, home: str) -> None:
    code = "r.parameters()"
    given = {"a": 1, "b": "x", "c": True, "d": 1.5, "e": 'ü/"\n'}
    assert sees(server, home, code, **given) == (
        '{"code":"r.parameters()","a":1,"b":"x","c":true,"d":1.5,"e":"ü/\\"\\n"}'
    )
    numbers = {"a": 1e20, "b": 1e21, "c": 1.25e-06, "d": -2.5e-10, "e": 1e16, "f": 0.0, "g": 1.5e300}
    assert sees(server, home, code, **numbers) == (
        '{"code":"r.parameters()","a":100000000000000000000.0,"b":1e21,"c":0.00000125,"d":-2.5e-10,'
        '"e":10000000000000000.0,"f":0.0,"g":1.5e300}'
    )
    assert sees(
        server, home, "pb_utils.InferenceResponse([], parameters={'a': 1, 'b': 'x'}).parameters()"
    ) == ('{"a":1,"b":"x"}')
    assert sees(server, home, "pb_utils.InferenceRequest().parameters()") == "{}"


@pytest.mark.parametrize("home", HOMES)
def test_a_model_completes_what_no_method_sets(server: ServerProcess, home: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        batching = client.get_model_config(f"completes_{home}")["dynamic_batching"]
    assert (batching["priority_levels"], batching["default_priority_level"]) == (20, 10)


@pytest.mark.parametrize("home", HOMES)
def test_outputs_that_the_configuration_does_not_have_are_not_sent(server: ServerProcess, home: str) -> None:
    model = f"debugs_{home}"
    for _ in range(4):  # more than there are instances
        assert [o["name"] for o in infer(server, model).get_response()["outputs"]] == ["OUT"]
        assert output_names(infer(server, model, protocol=grpcclient)) == ["OUT"]
    with pytest.raises(
        InferenceServerException, match=f"unexpected inference output 'DEBUG' for model '{model}'"
    ):
        infer(server, model, ["DEBUG"])
    told = f"model '{model}' makes output(s) ['DEBUG'] that its configuration does not have"
    server.until_logged(told)
    assert [line[0] for line in server.log().splitlines() if told in line] == ["W"]


@pytest.mark.parametrize("home", HOMES)
def test_nor_are_they_by_a_sender(server: ServerProcess, home: str) -> None:
    model = f"debugs_often_{home}"
    assert [output_names(answer) for answer in stream(server, model, 3)] == [["OUT"], ["OUT"], []]
    told = f"model '{model}' makes output(s) ['DEBUG'] that its configuration does not have"
    server.until_logged(told)
    assert server.log().count(told) == 1


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("form", ["", "async_"])
@pytest.mark.parametrize(("code", "count"), [("[]", 0), ("[one, one]", 2)])
def test_a_wrong_number_of_responses(
    server: ServerProcess, home: str, form: str, code: str, count: int
) -> None:
    model = f"{form}returns_{home}"
    for protocol in (httpclient, grpcclient):
        with pytest.raises(InferenceServerException) as info:
            infer(server, model, protocol=protocol, code=code)
        assert info.value.message() == (
            f"Failed to process the request(s) for model '{model}_0', message: Number of InferenceResponse objects do "
            "not match the number of InferenceRequest objects. InferenceRequest(s) size is:1, and "
            f"InferenceResponse(s) size is:{count}\n"
        )
    assert infer(server, model, code="[one]").as_numpy("OUT").tolist() == [1]


@pytest.mark.parametrize("home", HOMES)
def test_a_decoupled_model_that_returns_something(server: ServerProcess, home: str) -> None:
    model = f"only_sends_{home}"
    (message,) = stream(server, model, 1, code="[one]")
    assert message == (
        f"Failed to process the request(s) for model '{model}_0', message: Python model '{model}_0' is using the "
        "decoupled mode and the execute function must return None."
    )


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(
    ("kind", "group", "instance"),
    [("sees", "{}", "{}_0"), ("grouped", "{}_0", "{}_0_0"), ("named", "mine", "mine_0")],
)
def test_instances_are_called_as_a_triton_server_calls_them(
    server: ServerProcess, home: str, kind: str, group: str, instance: str
) -> None:
    model = f"{kind}_{home}"
    group, instance = group.format(model), instance.format(model)
    shown = json.loads(infer(server, model, code="args").as_numpy("A")[0])
    assert shown["model_instance_name"] == instance
    assert [g["name"] for g in json.loads(shown["model_config"])["instance_group"]] == [group]
    with httpclient.InferenceServerClient(server.http) as client:
        assert [g["name"] for g in client.get_model_config(model)["instance_group"]] == [group]
    with pytest.raises(InferenceServerException, match=rf"for model '{instance}', message: NameError"):
        infer(server, model, code="nothing")


# fails where its folder's name says; {0} is where
FAILS = """
import json

if "{0}" == "import":
    raise RuntimeError("no luck")

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        if "{0}" == "auto_complete_config":
            raise RuntimeError("no luck")
        return config

    {1}def initialize(self, args):
        if "{0}" == "initialize":
            raise RuntimeError("no luck")

    {1}def execute(self, requests):
        return []
"""


PLACES = {"import": (6, "<module>"), "auto_complete_config": (12, ""), "initialize": (17, "")}
FAILING = [(home, place, form) for home in HOMES for place in PLACES for form in ("", "async ")]


def failing(repository: Path) -> dict[str, str]:
    """Models that fail at every place, and what is told of each."""
    reasons = {}
    for home, place, form in FAILING:
        name = f"{place}_{form.strip()}_{home}"
        folder = python_model(repository, name, FAILS.format(place, form), config() + HOMES[home])
        line, function = PLACES[place]
        at = f"{folder / '1' / 'model.py'}({line}): {function or place}"
        reasons[name] = f"Internal: RuntimeError: no luck\n\nAt:\n  {at}\n"
    return reasons


@pytest.mark.slow
def test_a_failed_load_tells_the_models_own_words(tmp_path: Path) -> None:
    reasons = failing(tmp_path)
    with (
        ServerProcess(tmp_path, "--model-control-mode=explicit") as server,
        httpclient.InferenceServerClient(server.http) as http,
        grpcclient.InferenceServerClient(server.grpc) as grpc,
    ):
        for name, reason in reasons.items():
            for client in (http, grpc):
                with pytest.raises(InferenceServerException) as info:
                    client.load_model(name)
                assert info.value.message() == (
                    f"load failed for model '{name}': version 1 is at UNAVAILABLE state: {reason};\n"
                )
        rows = {row["name"]: row["reason"] for row in http.get_model_repository_index()}
        assert rows == reasons


@pytest.mark.slow
def test_and_so_does_the_log(tmp_path: Path) -> None:
    reasons = failing(tmp_path)
    with ServerProcess(tmp_path, "--exit-on-error=false", "--strict-readiness=false") as server:
        for name, reason in reasons.items():
            told = f"load failed for model '{name}': version 1 is at UNAVAILABLE state: {reason};"
            server.until_logged(told.replace("\n", "\n    ") + "\n")
