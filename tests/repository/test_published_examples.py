"""The published extensions' own examples: refused as they are printed, with the place of the mistake, and accepted as
docs/protocol/sequence-extension.md 1 and docs/protocol/model-repository-extension.md 1 correct them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support import onnx_models
from tests.support.control import post, refused
from tests.support.http import Http1
from tests.support.repository import write_model
from tests.support.server import ServerProcess

PAGES = Path(__file__).resolve().parents[2] / "docs" / "protocol"

# the bodies as they are printed
SEQUENCE = """{
"parameters" : { "sequence_id" : 42 }
"inputs" : [
{
"name" : "input0",
"shape" : [ 2, 2 ],
"datatype" : "UINT32",
"data" : [ 1, 2, 3, 4 ]
}
],
"outputs" : [
{
"name" : "output0",
}
]
}"""
LOAD = """{
  "parameters": {
    "config": "{
      "name": "mymodel",
      "backend": "onnxruntime",
      "inputs": [{
          "name": "INPUT0",
          "datatype": "FP32",
          "shape": [ 1 ]
        }
      ]
    }",

    "file:1/model.onnx" : "<base64-encoded-file-content>"
  }
}"""
HEAD = "failed to parse the request JSON buffer: "
MODEL = (
    'backend: "identity" input [ { name: "input0" data_type: TYPE_UINT32 dims: [ 2, 2 ] } ] '
    'output [ { name: "output0" data_type: TYPE_UINT32 dims: [ 2, 2 ] } ]'
)


def corrected(page: str) -> list[dict[str, Any]]:
    """The JSON examples of a page."""
    blocks = re.findall(r"```json\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.S)
    assert blocks
    return [json.loads(block) for block in blocks]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("examples")
    write_model(repository, "plain", MODEL)
    with ServerProcess(repository, "--model-control-mode=explicit", "--load-model=plain") as process:
        yield process


def infer(server: ServerProcess, body: str) -> Any:
    with Http1(server.http) as http:
        return http.request("POST", "/v2/models/plain/infer", body.encode())


def test_a_missing_comma(server: ServerProcess) -> None:
    text = "Missing a comma or '}' after an object member. at 40 (line 3, after \"parameters\")"
    assert refused(infer(server, SEQUENCE), 400) == HEAD + text


def test_a_trailing_comma(server: ServerProcess) -> None:
    rest = SEQUENCE.replace("42 }", "42 },")
    at = rest.rindex("}\n]")
    place = 'line 14, after "outputs[0].name": no comma may stand before a closing bracket'
    assert refused(infer(server, rest), 400) == (f"{HEAD}Missing a name for object member. at {at} ({place})")


def test_a_text_that_is_not_escaped(server: ServerProcess) -> None:
    place = r'line 3, in "parameters.config": a line break or tab inside a string is written \n or \t'
    assert refused(post(server, "models/mymodel/load", LOAD.encode()), 400) == (
        f"{HEAD}Invalid encoding in string. at 36 ({place})"
    )
    flat = " ".join(LOAD.split())
    place = r'after "parameters.config": a quotation mark inside a string is written \"'
    at = flat.index("name")
    assert refused(post(server, "models/mymodel/load", flat.encode()), 400) == (
        f"{HEAD}Missing a comma or '}}' after an object member. at {at} ({place})"
    )


@pytest.mark.parametrize(
    ("config", "wrong", "meant"),
    [
        ({"inputs": []}, "'inputs' of ModelConfig", "'input'"),
        ({"outputs": []}, "'outputs' of ModelConfig", "'output'"),
        ({"input": [{"name": "INPUT0", "datatype": "FP32"}]}, "'datatype' of ModelInput", "'data_type'"),
        ({"output": [{"name": "OUTPUT0", "shape": [1]}]}, "'shape' of ModelOutput", "'dims'"),
    ],
)
def test_names_of_the_metadata_are_explained(
    server: ServerProcess, config: Any, wrong: str, meant: str
) -> None:
    text = refused(post(server, "models/plain/load", {"parameters": {"config": json.dumps(config)}}), 500)
    explained = "its configuration has input, output, data_type (TYPE_FP32) and dims"
    assert (
        f"unknown field {wrong}, did you mean {meant}? A model's metadata has" in text and explained in text
    )
    request = service_pb2.RepositoryModelLoadRequest(model_name="plain")
    request.parameters["config"].string_param = json.dumps(config)
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as info:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).RepositoryModelLoad(request)
    assert info.value.details() == text


def test_the_corrected_sequences(server: ServerProcess) -> None:
    examples = corrected("sequence-extension")
    assert [example["parameters"]["sequence_id"] for example in examples] == [
        42,
        "e333c95a-07fc-42d2-ab16-033b1a566ed5",
    ]
    for example in examples:
        reply = infer(server, json.dumps(example))
        assert (reply.status, json.loads(reply.body)["outputs"][0]["data"]) == (200, [1, 2, 3, 4])


def test_the_corrected_load(server: ServerProcess) -> None:
    [example] = corrected("model-repository-extension")
    content = base64.b64encode(onnx_models.identity(shape=(1,), names=("INPUT0", "OUTPUT0"))).decode()
    assert example["parameters"].keys() == {"config", "file:1/model.onnx"}
    example["parameters"]["file:1/model.onnx"] = content
    assert post(server, "models/mymodel/load", example).status == 200
    with httpclient.InferenceServerClient(server.http) as client:
        assert client.get_model_metadata("mymodel")["inputs"] == [
            {"name": "INPUT0", "datatype": "FP32", "shape": [1]}
        ]
