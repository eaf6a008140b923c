"""What a function's signature says of a model, and what it must say."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, NamedTuple, TypedDict, get_args, get_type_hints

import numpy as np
import numpy.typing as npt
import pytest

import neptrio
from neptrio import flags, serving
from neptrio.embedded.functions import FunctionModel
from neptrio.embedded.signature import TensorSpec
from neptrio.settings import Settings
from neptrio.testing import FakeModel

Matrix = Annotated[np.ndarray, TensorSpec("FP32", [-1, 4])]


class Named(NamedTuple):
    first: Matrix
    second: str


class Keyed(TypedDict):
    a: int
    b: npt.NDArray[np.bool_]


def tensors(of: list[dict[str, Any]]) -> list[tuple[str, str, list[int], bool]]:
    return [(t["name"], t["data_type"], t["dims"], t.get("optional", False)) for t in of]


def test_annotations() -> None:
    def model(
        a: Matrix, b: npt.NDArray[np.int8], c: str, d: bytes, e: int, f: float = 1.0, *, g: bool = False
    ) -> Matrix: ...

    config = FunctionModel(model).config()
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("model", "python", 0)
    assert tensors(config["input"]) == [
        ("a", "TYPE_FP32", [-1, 4], False),
        ("b", "TYPE_INT8", [-1], False),
        ("c", "TYPE_STRING", [1], False),
        ("d", "TYPE_STRING", [1], False),
        ("e", "TYPE_INT64", [1], False),
        ("f", "TYPE_FP64", [1], True),
        ("g", "TYPE_BOOL", [1], True),
    ]
    assert tensors(config["output"]) == [("OUTPUT", "TYPE_FP32", [-1, 4], False)]
    assert "dynamic_batching" not in config
    assert "model_transaction_policy" not in config


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (str, ["OUTPUT"]),
        (tuple[Matrix, str], ["OUTPUT0", "OUTPUT1"]),
        (Named, ["first", "second"]),
        (Keyed, ["a", "b"]),
    ],
    ids=["one", "tuple", "NamedTuple", "TypedDict"],
)
def test_results(result: Any, names: list[str]) -> None:
    def model(): ...  # type: ignore[no-untyped-def]

    model.__annotations__["return"] = result
    assert [t["name"] for t in FunctionModel(model).config()["output"]] == names


def test_generators_are_decoupled() -> None:
    def some(n: int) -> Iterator[Named]:
        yield Named(np.zeros((1, 4), np.float32), "")

    async def others(n: int) -> AsyncIterator[int]:
        yield 1

    for function, names in ((some, ["first", "second"]), (others, ["OUTPUT"])):
        config = FunctionModel(function).config()
        assert config["model_transaction_policy"] == {"decoupled": True}
        assert [t["name"] for t in config["output"]] == names


def test_what_the_caller_says_comes_first() -> None:
    def model(a, b=None, **more): ...  # type: ignore[no-untyped-def]

    made = FunctionModel(
        model,
        name="other",
        inputs={"a": np.float16, "b": ("BYTES", [2]), "more": TensorSpec("BF16", [3])},
        outputs=[TensorSpec("UINT8", [], "one")],
        max_batch_size=4,
        batching={"preferred_batch_size": [4]},
        instances=3,
        config={"response_cache": {"enable": True}},
    )
    config = made.config()
    assert config["name"] == "other"
    assert tensors(config["input"]) == [
        ("a", "TYPE_FP16", [-1], False),
        ("b", "TYPE_STRING", [2], True),
        ("more", "TYPE_BF16", [3], False),
    ]
    assert config["dynamic_batching"] == {"preferred_batch_size": [4]}
    assert config["instance_group"] == [{"kind": "KIND_CPU", "count": 3}]
    assert config["response_cache"] == {"enable": True}
    assert made.batched


def untyped(a): ...  # type: ignore[no-untyped-def]
def untyped_result(a: int): ...  # type: ignore[no-untyped-def]
def vague(a: np.ndarray) -> int: ...
def positional(a: int, /) -> int: ...
def scalar(a: int) -> int: ...
def unknown(a: "Nothing") -> int: ...  # type: ignore[name-defined]  # noqa: F821, UP037
def with_context(a: Matrix, context: neptrio.Context) -> Matrix: ...


class NoCall:
    pass


@pytest.mark.parametrize(
    ("function", "options", "error", "text"),
    [
        pytest.param(untyped, {}, TypeError, "parameter 'a' has no annotation; annotate it, or say inputs=", id="input"),
        pytest.param(untyped_result, {}, TypeError, "result has no annotation", id="output"),
        pytest.param(vague, {}, TypeError, "parameter 'a': .* does not say a datatype", id="no datatype"),
        pytest.param(positional, {}, TypeError, "'a' must not be positional-only", id="positional"),
        pytest.param(unknown, {}, TypeError, "cannot be resolved: name 'Nothing'", id="unknown name"),
        pytest.param(scalar, {"max_batch_size": 2}, TypeError, "stand for one element", id="scalars in a batch"),
        pytest.param(with_context, {"max_batch_size": 2}, TypeError, "a batch has no Context", id="context of a batch"),
        pytest.param(scalar, {"inputs": {"b": "FP32"}}, TypeError, "no parameter for input 'b'", id="extra input"),
        pytest.param(scalar, {"inputs": {}}, TypeError, "lacks the function's parameter 'a'", id="missing input"),
        pytest.param(scalar, {"inputs": {"a": "FLOAT"}}, TypeError, "'FLOAT' is no datatype, expected one of BOOL", id="datatype"),
        pytest.param(scalar, {"outputs": [TensorSpec("FP32")]}, TypeError, "needs a name", id="no name"),
        pytest.param(NoCall, {}, TypeError, "needs a method __call__", id="class"),
        pytest.param(3, {}, TypeError, "expected a function or a class, got 3", id="no function"),
        pytest.param(lambda: 1, {"inputs": {}, "outputs": {}, "name": "a/b"}, ValueError, "'a/b' cannot be the name", id="name"),
    ],
)  # fmt: skip
def test_what_is_no_model(function: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        FunctionModel(function, **options)


def test_a_configuration_that_is_none() -> None:
    with pytest.raises(neptrio.InvalidArgument, match=r"config= of model 'scalar'.*nonsense"):
        server = neptrio.Server()
        server.function(config={"nonsense": 1})(scalar)
        with server.running():
            pytest.fail("it started")


@pytest.mark.parametrize(
    ("result", "text"),
    [
        pytest.param({"nobody": 1}, "returned 'nobody', which is no output", id="unknown output"),
        pytest.param((1, 2, 3), "expected a result for 2 outputs .a, b., got tuple", id="number"),
        pytest.param({"a": np.zeros(1, np.float64), "b": [1]}, "output 'a' is INT32, the function returned float64", id="datatype"),
    ],
)  # fmt: skip
def test_results_that_do_not_fit(result: Any, text: str) -> None:
    server = neptrio.Server()
    server.function(name="wrong", inputs={}, outputs={"a": "INT32", "b": "INT32"}, config={})(lambda: result)
    with server.running() as running:
        with pytest.raises(neptrio.TritonError, match=text):
            running.model("wrong").infer({})


def test_a_batch_with_too_few_rows() -> None:
    server = neptrio.Server()
    server.function(name="short", inputs={"a": "INT32"}, outputs={"b": "INT32"}, max_batch_size=4)(
        lambda a: a[:-1]
    )
    with server.running() as running:
        with pytest.raises(neptrio.TritonError, match="'b' must have a row for each of the batch's 2"):
            running.model("short").infer({"a": [[1], [2]]})


def test_what_a_function_model_takes_is_in_every_signature() -> None:
    """Names, types and defaults, for help() and editors, wherever a function can be made a model."""
    said = inspect.signature(FunctionModel, eval_str=True).parameters.values()
    wanted = [p for p in said if p.kind is p.KEYWORD_ONLY]
    assert len(wanted) == 7
    for maker in (neptrio.Server.function, neptrio.Server.add, neptrio.RunningServer.add):
        given = inspect.signature(maker).parameters.values()
        assert [p for p in given if p.kind is p.KEYWORD_ONLY and p.name != "replace"] == wanted
        assert not any(p.kind is p.VAR_KEYWORD for p in given)


def test_a_fake_model_takes_what_a_function_model_takes() -> None:
    named = {"name", "inputs", "outputs"}  # which a fake model takes by their places
    wanted = keywords(FunctionModel)
    assert keywords(FakeModel) == {name: wanted[name] for name in wanted.keys() - named}


def keywords(of: Any) -> dict[str, Any]:
    """Name -> default of the parameters that are given by name."""
    parameters = inspect.signature(of).parameters.values()
    assert not any(p.kind is p.VAR_KEYWORD or p.annotation is p.empty for p in parameters if p.name != "self")
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_every_option_of_a_request_is_in_the_signatures_with_its_type_and_default() -> None:
    request = {"outputs": None, "timeout": None, "queue_timeout_us": 0, "priority": 0, "request_id": ""}
    request["parameters"] = None
    sequence = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
    for model in (neptrio.Model, neptrio.BlockingModel):
        for method in (model.infer, model.stream, model.infer_each):
            assert keywords(method) == {**request, **sequence}
    for members in (neptrio.Sequence, neptrio.BlockingSequence):
        for method in (members.infer, members.stream):
            assert keywords(method) == request
    assert inspect.signature(neptrio.Model.infer).parameters["timeout"].annotation == (float | None)


def test_every_setting_of_a_server_is_in_its_signature_as_the_flags_have_it() -> None:
    given_by_flags = set(vars(serving.parser().parse_args([])))
    settings = {each.name for each in dataclasses.fields(Settings)} & given_by_flags - {"model_repository"}
    assert set(keywords(neptrio.Server)) == settings
    assert set(keywords(neptrio.Server.preset)) == settings
    kinds = get_type_hints(neptrio.ServerSettings)
    assert get_args(kinds["model_control_mode"]) == flags.CONTROL_MODES
    assert get_args(kinds["access_log"]) == flags.ACCESS_LOGS
    given: dict[str, Any] = {"http_port": 0, "allow_metrics": False, "model_control_mode": "explicit"}
    assert keywords(neptrio.Server)["allow_http"] is False  # what a server in a program does differently
    assert keywords(neptrio.Server)["http_address"] == "127.0.0.1"
    with neptrio.Server(**given).running() as server:
        assert list(server.addresses) == ["http"]


def test_none_is_an_option_that_was_not_given() -> None:
    server = neptrio.Server()

    @server.function
    def twice(n: int) -> int:
        return 2 * n

    with server.running() as running:
        answer = running.model("twice").infer({"n": 4}, outputs=None, timeout=None, parameters=None)
    assert answer["OUTPUT"].tolist() == [8]


def test_finding_a_model_and_making_one_are_two_names() -> None:
    with pytest.raises(TypeError, match=r"@server\.function makes a function one"):
        neptrio.Server().model(scalar)  # type: ignore[arg-type]
    with pytest.raises(neptrio.Unavailable, match="not running"):
        neptrio.Server().model("simple")


def test_what_is_public_is_what_dir_shows() -> None:
    assert dir(neptrio) == sorted(neptrio.__all__)
    assert all(hasattr(neptrio, name) for name in neptrio.__all__)
