"""What identifies a sequence on the wire: integers of all 64 bits, and flags that need an id for every model."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2, service_pb2_grpc

import neptrio.client
from tests.sequences.models import rest
from tests.support.server import ServerProcess

NO_ID = "inference request to model 'plain' must specify a non-zero or non-empty correlation ID"
LARGE = [1 << 63, (1 << 63) + 1, (1 << 64) - 1]


def message(model: str, **parameters: Any) -> Any:
    """A ModelInferRequest of one element; parameters are `name=(kind, value)`."""
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="INPUT", datatype="INT32", shape=[1, 1])
    request.raw_input_contents.append(np.array([4], np.int32).tobytes())
    for key, (kind, value) in parameters.items():
        setattr(request.parameters[key], kind, value)
    return request


def ask(server: ServerProcess, *requests: Any) -> Any:
    """The answer over ModelInfer of the last request."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for request in requests:
            answer = stub.ModelInfer(request, timeout=60)
    return answer


def corrid(answer: Any) -> int:
    """The CORRID that the model was given."""
    return int(grpcclient.InferResult(answer).as_numpy("CORRID").flat[0])


BOTH = {"sequence_start": ("bool_param", True), "sequence_end": ("bool_param", True)}


@pytest.mark.parametrize("number", [5, *LARGE])
def test_an_id_as_uint64(server: ServerProcess, number: int) -> None:
    assert corrid(ask(server, message("direct", sequence_id=("uint64_param", number), **BOTH))) == number


def test_uint64_0_is_no_id(server: ServerProcess) -> None:
    with pytest.raises(grpc.RpcError, match="must specify a non-zero or non-empty correlation ID"):
        ask(server, message("direct", sequence_id=("uint64_param", 0), **BOTH))


def test_the_kinds_of_one_id_are_one_sequence(server: ServerProcess) -> None:
    """An id from 2^63 as uint64, as the negative int64 of the same bits and over HTTP goes to the same sequence."""
    number = (1 << 63) + 77
    start = message("direct", sequence_id=("uint64_param", number), sequence_start=("bool_param", True))
    more = message("direct", sequence_id=("int64_param", number - (1 << 64)))
    answer = ask(server, start, more)
    assert corrid(answer) == number
    body = {
        "parameters": {"sequence_id": number, "sequence_end": True},
        "inputs": [{"name": "INPUT", "shape": [1, 1], "datatype": "INT32", "data": [4]}],
    }
    status, reply = rest(server, "POST", "/v2/models/direct/infer", body)
    outputs = {output["name"]: output["data"] for output in reply["outputs"]}
    assert (status, outputs["CORRID"], outputs["OUTPUT"]) == (200, [number], [12])


def test_an_id_of_another_kind(server: ServerProcess) -> None:
    with pytest.raises(grpc.RpcError) as info:
        ask(server, message("direct", sequence_id=("double_param", 1.0), **BOTH))
    assert info.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert info.value.details() == (
        "invalid value type for 'sequence_id' parameter, expected int64_param, uint64_param or string_param."
    )


@pytest.mark.parametrize("number", LARGE)
def test_our_own_client_sends_uint64(number: int) -> None:
    request = service_pb2.ModelInferRequest.FromString(
        neptrio.client.client.encode("m", {}, parameters={"sequence_id": number})
    )
    assert request.parameters["sequence_id"].uint64_param == number


@pytest.mark.parametrize("flag", ["sequence_start", "sequence_end"])
@pytest.mark.parametrize("none", [None, 0, ""])
def test_a_flag_without_an_id(server: ServerProcess, flag: str, none: int | str | None) -> None:
    """Refused by a model without sequences too."""
    parameters: dict[str, Any] = {flag: True} if none is None else {flag: True, "sequence_id": none}
    tensor = {"name": "INPUT", "shape": [1, 1], "datatype": "INT32", "data": [4]}
    answer = rest(server, "POST", "/v2/models/plain/infer", {"parameters": parameters, "inputs": [tensor]})
    assert answer == (400, {"error": NO_ID})
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param"}
    request = message("plain", **{key: (kinds[type(value)], value) for key, value in parameters.items()})
    with pytest.raises(grpc.RpcError) as info:
        ask(server, request)
    assert (info.value.code(), info.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, NO_ID)
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        [streamed] = stub.ModelStreamInfer(iter([request]), timeout=60)
    assert streamed.error_message == NO_ID


def test_flags_that_are_false_need_no_id(server: ServerProcess) -> None:
    parameters = {"sequence_start": False, "sequence_end": False}
    tensor = {"name": "INPUT", "shape": [1, 1], "datatype": "INT32", "data": [4]}
    status, reply = rest(
        server, "POST", "/v2/models/plain/infer", {"parameters": parameters, "inputs": [tensor]}
    )
    assert (status, reply["outputs"][0]["data"]) == (200, [4])


def test_an_id_without_sequences_is_no_error(server: ServerProcess) -> None:
    """As on a Triton server: the model is given the id and has no use for it."""
    assert ask(server, message("plain", sequence_id=("uint64_param", 9), **BOTH)).model_name == "plain"
