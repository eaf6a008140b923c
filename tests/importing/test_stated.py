"""Inputs that `--input` says."""

from __future__ import annotations

import pytest

from neptrio.errors import InvalidArgument
from neptrio.importing import stated


def test_a_flag_is_an_input() -> None:
    one = stated.parse("x:fp32:-1,4")
    assert one == stated.Stated("x", "TYPE_FP32", (-1, 4))
    assert stated.parse("ARGS[0][a:b]:BYTES:-1").kind == "TYPE_STRING"
    assert stated.parse("ARGS[0][a:b]:BYTES:-1").name == "ARGS[0][a:b]"
    assert stated.batches([one]) and not stated.batches([one, stated.parse("y:INT64:3")])
    assert not stated.batches([stated.parse("y:INT64:-1")])  # of whose batch nothing would be left
    assert stated.text([one], True) == (
        'max_batch_size: 64\ndynamic_batching { }\ninput { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }\n'
    )
    assert stated.text([one], False) == 'input { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }\n'


@pytest.mark.parametrize(
    "text", ["x", "x:FP32", "x:FP31:2", ":FP32:2", "x:FP32:", "x:FP32:2,-2", "x:FP32:two"]
)
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="must be NAME:TYPE:SHAPE, such as x:FP32:-1,4"):
        stated.parse(text)
