"""Sequences over HTTP, gRPC and streams with the real clients: values, controls and error texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.sequences.models import Caller, Stream, rest, tensors
from tests.support.server import ServerProcess


@pytest.fixture(params=["http", "grpc"])
def call(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Caller]:
    with Caller(server, request.param) as caller:
        yield caller


def test_a_sequence_is_summed(call: Caller) -> None:
    assert call("direct", 7, "s", 1)["OUTPUT"] == 1
    assert call("direct", 7, "", 2)["OUTPUT"] == 3
    assert call("direct", 7, "e", 3)["OUTPUT"] == 6
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        call("direct", 7, "", 1)


def test_controls(call: Caller) -> None:
    got = call("direct", 11, "s", 5)
    assert (got["START"], got["END"], got["READY"], got["CORRID"]) == (1, 0, 1, 11)
    got = call("direct", 11, "", 5)
    assert (got["START"], got["END"], got["READY"]) == (0, 0, 1)
    got = call("direct", 11, "e", 5)
    assert (got["START"], got["END"], got["READY"]) == (0, 1, 1)
    got = call("direct", 12, "se", 5)
    assert (got["START"], got["END"], got["READY"], got["OUTPUT"]) == (1, 1, 1, 5)


@pytest.mark.parametrize(
    ("model", "wire", "true"),
    [("corrid_int32", np.float32, 1.0), ("corrid_uint32", np.bool_, True), ("corrid_int64", np.int32, 1)],
)
def test_control_types_and_truncated_ids(server: ServerProcess, model: str, wire: Any, true: Any) -> None:
    big = (1 << 40) + 5
    with grpcclient.InferenceServerClient(server.grpc) as client:
        result = client.infer(
            model, tensors(grpcclient, 1), sequence_id=big, sequence_start=True, sequence_end=True
        )
        start = result.as_numpy("START")
        assert start.dtype == wire and start.shape == (1, 1) and start[0, 0] == true
        assert result.as_numpy("CORRID")[0, 0] == (big if model == "corrid_int64" else 5)


def test_shape_of_controls_without_batching(server: ServerProcess) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        result = client.infer(
            "nobatch", tensors(grpcclient, 1, False), sequence_id=5, sequence_start=True, sequence_end=True
        )
        assert result.as_numpy("CORRID").shape == (1,) and result.as_numpy("READY").shape == (1,)


@pytest.mark.parametrize("length", [1, 3, 4, 8, 36, 127, 128])
def test_string_ids_of_every_length(call: Caller, length: int) -> None:
    sequence = ("x" * length)[: length - 1] + "é"[: 1 if length < 128 else 0] + ("y" if length == 128 else "")
    for text, value, total in (("s", 1, 1), ("", 2, 3), ("e", 3, 6)):
        got = call("string_id", sequence, text, value)
        assert got["OUTPUT"] == total and got["CORRID"] == sequence.encode()


def test_largest_integer_id(server: ServerProcess) -> None:
    with Caller(server, "http") as call:
        assert call("direct", (1 << 64) - 1, "se", 4)["CORRID"] == (1 << 64) - 1


def test_ids_are_typed(call: Caller) -> None:
    # without a CORRID control any type of id will do; 1 is not "1"
    assert call("untyped", 1, "s", 1)["OUTPUT"] == 1
    with pytest.raises(
        InferenceServerException, match="sequence 1 to model 'untyped' must specify the START flag"
    ):
        call("untyped", "1", "", 1)
    assert call("untyped", "1", "s", 10)["OUTPUT"] == 10
    assert call("untyped", 1, "e", 1)["OUTPUT"] == 2
    assert call("untyped", "1", "e", 10)["OUTPUT"] == 20


ERRORS = [
    ("direct", 100, "", "inference request for sequence 100 to model 'direct' must specify the START flag on the first request of the sequence"),
    ("direct", 0, "", "inference request to model 'direct' must specify a non-zero or non-empty correlation ID"),
    ("direct", "", "", "inference request to model 'direct' must specify a non-zero or non-empty correlation ID"),
    ("untyped", "abc", "", "inference request for sequence abc to model 'untyped' must specify the START flag on the first request of the sequence"),
    ("direct", "abc", "s", "[request id: <id_unknown>] sequence batching control 'CORRID' data-type is 'BYTES', but model 'direct' expects 'UINT64'"),
    ("string_id", 5, "s", "[request id: <id_unknown>] sequence batching control 'CORRID' data-type is 'UINT64', but model 'string_id' expects 'BYTES'"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "sequence", "text", "message"), ERRORS)
def test_error_texts(call: Caller, model: str, sequence: Any, text: str, message: str) -> None:
    with pytest.raises(InferenceServerException) as info:
        call(model, sequence, text, 1)
    assert info.value.message() == message
    assert info.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


def test_error_texts_over_a_stream(server: ServerProcess) -> None:
    """The same texts, each as a message; the stream goes on."""
    with Stream(server) as stream:
        for model, sequence, text, message in ERRORS:
            stream.send(model, sequence, text, 1)
            with pytest.raises(InferenceServerException) as info:
                stream.receive()
            assert info.value.message() == message
        stream.send("direct", 4000, "se", 1)
        assert stream.receive()["OUTPUT"] == 1


def test_batch_size_text(call: Caller) -> None:
    module = call.module
    tensor = module.InferInput("INPUT", [2, 1], "INT32")
    tensor.set_data_from_numpy(np.zeros((2, 1), np.int32))
    with pytest.raises(InferenceServerException) as info:
        call.client.infer("direct", [tensor], sequence_id=3, sequence_start=True)
    assert info.value.message() == (
        "inference request to model 'direct' must specify batch-size 1 due to requirements of sequence batcher"
    )


def test_too_long_string_id(call: Caller) -> None:
    with pytest.raises(InferenceServerException) as info:
        call("string_id", "x" * 129, "s", 1)
    assert info.value.message() == "string correlation ID cannot be longer than 128 characters"
    assert info.value.status() in ("501", "StatusCode.UNIMPLEMENTED")


def test_wrong_types_over_http(server: ServerProcess) -> None:
    body = {"inputs": [{"name": "INPUT", "shape": [1, 1], "datatype": "INT32", "data": [1]}]}
    for parameters, message in (
        ({"sequence_id": -1}, "Unable to parse 'sequence_id': attempt to access JSON non-string as string, expected 0 to 18446744073709551615, got: -1"),
        ({"sequence_id": 1.5}, "Unable to parse 'sequence_id': attempt to access JSON non-string as string"),
        ({"sequence_id": 1, "sequence_start": 1}, "Unable to parse 'sequence_start': attempt to access JSON non-boolean as boolean"),
    ):  # fmt: skip
        status, reply = rest(server, "POST", "/v2/models/direct/infer", {**body, "parameters": parameters})
        assert (status, reply) == (400, {"error": message})


def test_a_rejected_request_does_not_disturb_the_sequence(call: Caller) -> None:
    assert call("direct", 21, "s", 1)["OUTPUT"] == 1
    module = call.module
    wrong = module.InferInput("INPUT", [1, 1], "FP32")
    wrong.set_data_from_numpy(np.zeros((1, 1), np.float32))
    with pytest.raises(InferenceServerException, match="data-type is 'FP32'"):
        call.client.infer("direct", [wrong], sequence_id=21)
    assert call("direct", 21, "e", 2)["OUTPUT"] == 3


def test_start_on_a_live_id_restarts(call: Caller, server: ServerProcess) -> None:
    assert call("direct", 31, "s", 5)["OUTPUT"] == 5
    assert call("direct", 31, "s", 1)["OUTPUT"] == 1
    assert call("direct", 31, "e", 1)["OUTPUT"] == 2
    server.until_logged("sequence 31 of model 'direct' has a conflict")


def test_control_and_state_tensors_are_not_the_clients(call: Caller) -> None:
    metadata = call.client.get_model_metadata("state")
    if isinstance(metadata, dict):
        inputs = [row["name"] for row in metadata["inputs"]]
        outputs = [row["name"] for row in metadata["outputs"]]
    else:
        inputs, outputs = [row.name for row in metadata.inputs], [row.name for row in metadata.outputs]
    assert inputs == ["INPUT"] and "SUM_OUT" not in outputs
    module = call.module
    extra = module.InferInput("START", [1, 1], "INT32")
    extra.set_data_from_numpy(np.zeros((1, 1), np.int32))
    with pytest.raises(
        InferenceServerException, match="expected 1 inputs but got 2 inputs for model 'state'"
    ):
        call.client.infer("state", [*tensors(module, 1), extra], sequence_id=1, sequence_start=True)


def test_server_metadata_and_defaults(server: ServerProcess) -> None:
    _, metadata = rest(server, "GET", "/v2")
    assert {"sequence", "sequence(string_id)"} <= set(metadata["extensions"])
    _, config = rest(server, "GET", "/v2/models/defaults/config")
    assert config["sequence_batching"]["max_sequence_idle_microseconds"] == 1_000_000
    _, config = rest(server, "GET", "/v2/models/oldest/config")
    assert config["sequence_batching"]["oldest"]["preferred_batch_size"] == [4]


def test_streams_interleave_sequences_in_request_order(server: ServerProcess) -> None:
    with Stream(server) as stream:
        totals = dict.fromkeys(range(101, 106), 0)
        expected = []
        for step in range(6):
            for sequence in totals:
                text = "s" if step == 0 else "e" if step == 5 else ""
                totals[sequence] += sequence + step
                expected.append((f"{sequence}-{step}", totals[sequence]))
                stream.send("oldest", sequence, text, sequence + step, request_id=f"{sequence}-{step}")
        got = [stream.receive() for _ in expected]
    assert [(g["id"], g["OUTPUT"]) for g in got] == expected


def test_end_then_start_at_once(server: ServerProcess) -> None:
    """The same id starts again while its predecessor still waits: both run, in slots of their own."""
    with Stream(server) as stream:
        for _ in range(20):
            stream.send("direct", 51, "s", 1)
            stream.send("direct", 51, "e", 2)
        got = [stream.receive()["OUTPUT"] for _ in range(40)]
    assert got == [1, 3] * 20


def test_statistics_count_no_null_requests(server: ServerProcess) -> None:
    with Stream(server) as stream:
        for sequence in (61, 62):
            stream.send("delay_direct", sequence, "s", 1)
        for _ in range(2):
            stream.receive()
        for sequence in (61, 62):
            stream.send("delay_direct", sequence, "e", 1)
        for _ in range(2):
            assert stream.receive()["BATCH_SIZE"] == 2
    _, stats = rest(server, "GET", "/v2/models/delay_direct/stats")
    stats = stats["model_stats"][0]
    assert stats["inference_count"] == 4 and stats["inference_stats"]["success"]["count"] == 4
    assert [b["batch_size"] for b in stats["batch_stats"]] == [2] and stats["execution_count"] == 2
    assert json.dumps(stats)
