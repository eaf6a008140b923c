"""Which tensor of a configuration is which argument or result. These need no PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neptrio_backends import pytorch


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(pytorch.__file__).parent))
    from neptrio_backends.pytorch import torch_names

    yield torch_names


ARGUMENTS = (("x", "Tensor", True), ("scale", "Tensor", False), ("bias", "Tensor", False))


def arguments(names: Any, *rows: tuple[str, str, bool]) -> list[Any]:
    return [names.Argument(*row) for row in rows]


@pytest.mark.parametrize(
    ("inputs", "made"),
    [
        (("INPUT__0", "INPUT__1"), (["a", "b"], {})),
        (("INPUT__1", "INPUT__0"), (["b", "a"], {})),
        (("scale", "x"), (["b", "a"], {})),
        (("x", "bias"), ((), {"x": "a", "bias": "b"})),  # the one between has a default
        (("first", "second"), (["a", "b"], {})),
    ],
)
def test_arguments_have_a_place_or_a_name(names: Any, inputs: tuple[str, ...], made: Any) -> None:
    assert names.arrange(list(inputs), arguments(names, *ARGUMENTS))(["a", "b"]) == made


@pytest.mark.parametrize(
    ("kind", "inputs", "made"),
    [
        ("Dict[str, Tensor]", ("b", "a"), (({"b": 1, "a": 2},), {})),
        ("List[Tensor]", ("INPUT__1", "INPUT__0"), (([2, 1],), {})),
        ("List[Tensor]", ("p", "q"), (([1, 2],), {})),
        ("Tuple[Tensor, Tensor]", ("p", "q"), (((1, 2),), {})),
    ],
)
def test_one_argument_may_hold_all_inputs(names: Any, kind: str, inputs: tuple[str, ...], made: Any) -> None:
    assert names.arrange(list(inputs), arguments(names, ("xs", kind, True)))([1, 2]) == made


def test_results_by_number_by_key_and_in_order(names: Any) -> None:
    assert names.pick(["OUTPUT__1"], [])((1, 2)) == [2]  # what nobody asks for may be left out
    assert names.pick(["b"], [])({"a": 1, "b": 2}) == [2]
    assert names.pick(["p", "q"], ["Tensor", "Tensor", "int"])((1, 2, 3)) == [1, 2]
    assert names.pick(["p"], [])(["a", "b"]) == [["a", "b"]]  # a list of texts is one result


def test_what_cannot_be_is_refused_before_a_request_comes(names: Any) -> None:
    for inputs, reason in (
        (("INPUT__0", "other"), "must be numbered NAME__0, NAME__1, each once, or none of them"),
        (("INPUT__0", "INPUT__2"), "must be numbered NAME__0 to NAME__1"),
        (("scale", "bias"), "forward needs 'x', which the configuration has no input for"),
        (("a", "b", "c", "d"), r"forward takes 3 arguments \(x, scale, bias\), the configuration has 4"),
    ):
        with pytest.raises(ValueError, match=reason):
            names.arrange(list(inputs), arguments(names, *ARGUMENTS))
    for outputs, reason in (
        (("OUTPUT__0", "OUTPUT__5"), "'OUTPUT__5' is none of the module's results: it gives 2"),
        (("OUTPUT__0", "OUTPUT__0"), "each once"),
        (("OUTPUT__1",), "'OUTPUT__1' is no tensor: the module gives int"),
    ):
        with pytest.raises(ValueError, match=reason):
            names.pick(list(outputs), ["Tensor", "int"])
    with pytest.raises(ValueError, match="the module gives a and no 'b'"):
        names.pick(["b"], [])({"a": 1})
    with pytest.raises(ValueError, match="output 'q' is none of the module's results: it gives 1"):
        names.pick(["p", "q"], [])((1,))
