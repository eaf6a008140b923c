"""What a real Triton server was seen to answer over gRPC (docs/protocol/observed.md 2 and 5), asked of ours.

Parameters and contents of all types are in test_infer_messages.py, calls and streams in tests/transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.support.server import ServerProcess
from tests.transport.rest.refusals import NOTE, UNKNOWN
from tests.wire.conftest import LOST, STOL, TOO_LOW


@pytest.fixture(scope="module")
def stub(observed: ServerProcess) -> Iterator[Any]:
    with grpc.insecure_channel(observed.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.mark.parametrize(
    ("version", "ready"),
    [
        ("", True),
        ("1", True),
        ("01", True),
        ("9", False),
        ("0", TOO_LOW.format("0")),
        ("-1", TOO_LOW.format("-1")),
        *((text, STOL.format(text)) for text in ("abc", "1abc", "1_0", "1.0", "\u0661", "9" * 20)),
    ],
)
def test_versions(stub: Any, version: str, ready: bool | str) -> None:
    asked = pb.ModelReadyRequest(name="simple", version=version)
    if isinstance(ready, bool):
        assert stub.ModelReady(asked).ready is ready
        return
    with pytest.raises(grpc.RpcError) as info:
        stub.ModelReady(asked)
    assert (info.value.code().name, info.value.details()) == ("INVALID_ARGUMENT", ready)


def test_ready_models(stub: Any) -> None:
    asked = [("nope", ""), ("gone", ""), ("versions", "1"), ("versions", "2"), ("versions", "")]
    found = [
        stub.ModelReady(pb.ModelReadyRequest(name=name, version=version)).ready for name, version in asked
    ]
    assert found == [False, False, False, True, True]


def message(
    model: str = "simple",
    names: tuple[str, ...] = ("INPUT0", "INPUT1"),
    datatype: str = "INT32",
    shape: tuple[int, ...] = (1, 16),
    raw: tuple[bytes, ...] = (bytes(64), bytes(64)),
    change: Callable[[Any], Any] | None = None,
    **fields: str,
) -> Any:
    made = pb.ModelInferRequest(model_name=model, raw_input_contents=raw, **fields)
    for name in names:
        made.inputs.add(name=name, datatype=datatype, shape=shape)
    if change is not None:
        change(made)
    return made


def text(raw: bytes, count: int) -> Any:
    return message("text", ("INPUT0",), "BYTES", (1, count), (raw,))


HALF = message("half", ("INPUT0",), "FP16", (1, 1), ())
HALF.inputs[0].contents.fp32_contents.append(1)
MISSING = "but missing required input(s) {}. Please provide all required input(s)."
BYTES = "for inference input 'INPUT0' for model 'text'"
REFUSED: list[tuple[str, Any, str, str]] = [
    ("unknown", message("nope"), "NOT_FOUND", LOST + "'nope' is not found"),
    ("no-name", message(""), "NOT_FOUND", LOST + "'' is not found"),
    ("gone", message("gone"), "NOT_FOUND", LOST + "'gone' has no available versions"),
    ("version", message(model_version="7"), "NOT_FOUND", LOST + "'simple' version 7 is not found, it has 1"),
    (
        "version-not-ready",
        message("versions", model_version="1"),
        "UNAVAILABLE",
        LOST + "'versions' version 1 is not at ready state",
    ),
    ("version-text", message(model_version="abc"), "INVALID_ARGUMENT", STOL.format("abc")),
    (
        "decoupled",
        message("decoupled"),
        "UNIMPLEMENTED",
        "ModelInfer RPC doesn't support models with decoupled transaction policy; ModelStreamInfer does",
    ),
    *(
        (name, asked, "INVALID_ARGUMENT", error)
        for name, asked, error in (
            (
                "missing",
                message(names=("INPUT0",), id="r"),
                "[request id: r] expected 2 inputs but got 1 inputs for model 'simple'. Got input(s) ['INPUT0'], "
                + MISSING.format("['INPUT1']"),
            ),
            (
                "too-many",
                message(names=("INPUT0", "INPUT1", "INPUT2"), raw=(bytes(64),) * 3),
                UNKNOWN + "expected 2 inputs but got 3 inputs for model 'simple'. Got input(s) "
                "['INPUT0','INPUT1','INPUT2'], the model takes ['INPUT0','INPUT1'].",  # the real one: missing []
            ),
            (
                "name",
                message(names=("FOO", "INPUT1")),
                "unexpected inference input 'FOO' for model 'simple', the model takes ['INPUT0','INPUT1']",
            ),
            (
                "duplicate",
                message(names=("INPUT1", "INPUT1")),
                UNKNOWN + "input 'INPUT1' already exists in request",
            ),
            *(
                (
                    f"datatype-{given}",
                    message(datatype=given),
                    UNKNOWN
                    + f"inference input 'INPUT0' data-type is '{shown}', but model 'simple' expects 'INT32'",
                )
                for given, shown in (("FP32", "FP32"), ("FOO", "<invalid>"), ("int32", "<invalid>"))
            ),
            (
                "shape",
                message(shape=(1, 15), raw=(bytes(60),) * 2),
                UNKNOWN
                + f"unexpected shape for input 'INPUT0' for model 'simple'. Expected [-1,16], got [1,15]. {NOTE}",
            ),
            (
                "bytes",
                message(raw=(bytes(60),) * 2),
                UNKNOWN
                + "input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 64, got 60",
            ),
            (
                "batch",
                message(shape=(9, 16), raw=(bytes(576),) * 2),
                UNKNOWN + "inference request batch-size must be <= 8 for 'simple', got 9",
            ),
            (
                "no-shape",
                message(shape=()),
                UNKNOWN + "input 'INPUT0' has no shape but model requires batch dimension for 'simple'",
            ),
            (
                "no-data",
                message(raw=(bytes(64),)),
                "unable to find data for input tensor 'INPUT1' for model 'simple' in request.",
            ),
            (
                "both-kinds-of-data",
                message(change=lambda m: m.inputs[1].contents.int_contents.append(1)),
                "contents field must not be specified when using raw_input_contents for 'INPUT1' for model 'simple'",
            ),
            (
                "contents",
                HALF,
                "unexpected explicit tensor data for input tensor 'INPUT0' for model 'half' of type 'FP32', "
                "expected datatype 'FP16'",
            ),
            (
                "duplicate-output",
                message(
                    change=lambda m: m.outputs.extend([m.InferRequestedOutputTensor(name="OUTPUT0")] * 2)
                ),
                "Duplicate output name 'OUTPUT0' is not allowed in a request",
            ),
            (
                "output",
                message(change=lambda m: m.outputs.add(name="NOPE")),
                "unexpected inference output 'NOPE' for model 'simple', the model gives ['OUTPUT0','OUTPUT1']",
            ),
            ("strings-few", text(b"\1\0\0\0a", 3), UNKNOWN + f"expected 3 string elements {BYTES}, got 1"),
            (
                "strings-many",
                text(b"\1\0\0\0a" * 2, 1),
                UNKNOWN + f"unexpected number of string elements 2 {BYTES}, expecting 1",
            ),
            (
                "string-cut",
                text(b"\12\0\0\0ab", 1),
                "incomplete string data for inference input 'INPUT0', expecting string of length 10 but only 2 bytes "
                "available",
            ),
        )
    ),
]


@pytest.mark.parametrize(("asked", "code", "error"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_grpc_refusals(stub: Any, asked: Any, code: str, error: str) -> None:
    with pytest.raises(grpc.RpcError) as info:
        stub.ModelInfer(asked)
    assert (info.value.code().name, info.value.details()) == (code, error)


def add_output(**parameters: bool | int) -> Callable[[Any], Any]:
    def change(made: Any) -> None:
        output = made.outputs.add(name="OUTPUT1")
        for key, value in parameters.items():
            kind = "bool_param" if isinstance(value, bool) else "int64_param"
            setattr(output.parameters[key], kind, value)

    return change


def sequence_id(made: Any) -> None:
    made.parameters["sequence_id"].int64_param = -1


@pytest.mark.parametrize(
    ("asked", "outputs"),
    [
        (message(id="i"), [("OUTPUT0", bytes(64)), ("OUTPUT1", bytes(64))]),
        (message(raw=(bytes(64),) * 3), [("OUTPUT0", bytes(64)), ("OUTPUT1", bytes(64))]),
        (message(change=add_output(binary_data=False)), [("OUTPUT1", bytes(64))]),
        (message(change=add_output(classification=2)), [("OUTPUT1", b"\3\0\0\0000:0\3\0\0\0000:1")]),
        (message(change=sequence_id), [("OUTPUT0", bytes(64)), ("OUTPUT1", bytes(64))]),
    ],
    ids=["id", "more-raw-contents", "binary-data", "classification", "negative-sequence-id"],
)
def test_grpc_answers(stub: Any, asked: Any, outputs: list[tuple[str, bytes]]) -> None:
    answer = stub.ModelInfer(asked)
    assert (answer.id, answer.model_version, dict(answer.parameters)) == (asked.id, "1", {})
    assert [output.name for output in answer.outputs] == [name for name, _ in outputs]
    assert list(answer.raw_output_contents) == [raw for _, raw in outputs]
    assert not any(output.HasField("contents") for output in answer.outputs)


def test_the_highest_ready_version_answers(stub: Any) -> None:
    assert stub.ModelInfer(message("versions", ("INPUT0",), raw=(bytes(64),))).model_version == "10"


def test_unknown_methods_have_no_details(observed: ServerProcess) -> None:
    with grpc.insecure_channel(observed.grpc) as channel, pytest.raises(grpc.RpcError) as info:
        channel.unary_unary("/inference.GRPCInferenceService/Nope")(b"")
    assert (info.value.code(), info.value.details()) == (grpc.StatusCode.UNIMPLEMENTED, "")
