"""Inputs that are made up from a model's metadata, or read from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neptrio import datatypes
from neptrio.errors import InvalidArgument
from neptrio.sweep.inputs import Inputs, rows_of


def metadata(**tensors: tuple[str, list[int]]) -> dict[str, Any]:
    return {"inputs": [{"name": n, "datatype": d, "shape": s} for n, (d, s) in tensors.items()]}


BATCHING = {"max_batch_size": 8}


def test_every_datatype_can_be_made_up() -> None:
    for name in datatypes.NUMBER:
        made = Inputs(metadata(A=(name, [-1, 3])), BATCHING, {}, []).make(2)["A"]
        assert made.shape == (2, 3) and datatypes.NAME[datatypes.from_numpy(made.dtype)] == name
        assert set(made.reshape(-1)) == {b"0"} if name == "BYTES" else (made >= 0).all() and (made <= 1).all()
    unbatched = Inputs(metadata(A=("FP32", [3])), {"max_batch_size": 0}, {}, []).make(1)["A"]
    assert unbatched.shape == (3,)


def test_variable_dims_are_asked_for() -> None:
    model = metadata(A=("FP32", [-1, -1, 4]))
    with pytest.raises(InvalidArgument, match=r"variable dims \[-1,4\]: choose them with --shape A:N,4"):
        Inputs(model, BATCHING, {}, [])
    assert Inputs(model, BATCHING, {"A": (7, 4)}, []).make(1)["A"].shape == (1, 7, 4)
    with pytest.raises(InvalidArgument, match=r"--shape A:7,5 does not fit the model's \[-1,4\]"):
        Inputs(model, BATCHING, {"A": (7, 5)}, [])
    with pytest.raises(InvalidArgument, match="'B' is no input of the model, which has 'A'"):
        Inputs(model, BATCHING, {"B": (7,)}, [])


def test_what_cannot_be_made_up_is_refused_and_optional_inputs_are_left_out() -> None:
    model = metadata(A=("INT32", [-1, 2]), B=("INT32", [-1, -1]))
    config = {**BATCHING, "input": [{"name": "A", "is_shape_tensor": True}, {"name": "B", "optional": True}]}
    with pytest.raises(InvalidArgument, match="the values of input 'A' are a shape"):
        Inputs(model, config, {}, [])
    given = Inputs(model, config, {}, [{"A": np.array([3, 4], np.int32)}])
    assert given.left_out == ["B"] and given.make(2)["A"].tolist() == [[3, 4], [3, 4]]


def test_rows_of_a_file(tmp_path: Path) -> None:
    model = metadata(A=("INT32", [-1, 2]), T=("BYTES", [-1, -1]))
    file = tmp_path / "data.json"
    file.write_text(
        json.dumps(
            {
                "data": [
                    {"A": [1, 2], "T": {"content": ["x", "y"], "shape": [2]}},
                    {"A": [3, 4], "T": ["u", "v"]},
                ]
            }
        )
    )
    made = Inputs(model, BATCHING, {}, rows_of(file, model, True)).make(3)
    assert made["A"].tolist() == [[1, 2], [3, 4], [1, 2]]
    assert made["T"].tolist() == [[b"x", b"y"], [b"u", b"v"], [b"x", b"y"]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "expected"),
        ('{"data": []}', "at least one entry"),
        ('{"data": [{"B": [1]}]}', "entry 0, input 'B': the model has 'A'"),
        ('{"data": [{"A": [1, 2, 3]}]}', "cannot reshape"),
        ('{"data": [{"A": {"b64": "AA=="}}]}', "entry 0, input 'A': expected a list or"),
        ('{"data": [{"A": ["x", "y"]}]}', "entry 0, input 'A'"),
        ('{"data": [{"A": [1, 99999999999]}]}', "entry 0, input 'A'"),
    ],
)
def test_wrong_files_are_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "data.json"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=said):
        rows_of(file, metadata(A=("INT32", [-1, 2])), True)


def test_entries_must_agree() -> None:
    model = metadata(A=("INT32", [-1, -1]))
    rows = [{"A": np.zeros(2, np.int32)}, {"A": np.zeros(3, np.int32)}]
    assert Inputs(model, BATCHING, {}, rows).make(1)["A"].shape == (1, 2)
    with pytest.raises(InvalidArgument, match="rows of different shapes"):
        Inputs(model, BATCHING, {}, rows).make(2)
    with pytest.raises(InvalidArgument, match="in some entries and not in others"):
        Inputs(model, BATCHING, {}, [rows[0], {}])
