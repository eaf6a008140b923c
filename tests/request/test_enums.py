"""The enums that Cython shares with Python, and the tables that have to say the same numbers."""

from __future__ import annotations

import pytest

from neptrio import datatypes
from neptrio._proto import inference
from neptrio.request.infer_request import (
    DataType,
    InferRequest,
    MemoryKind,
    Protocol,
    RequestState,
    Responder,
    Tensor,
    Timestamp,
)


def test_datatypes_have_one_number_each() -> None:
    """Cython, the datatypes' table and the protocol's model_config.proto."""
    ours = {member.name.removeprefix("DT_"): member.value for member in DataType if member.value}
    assert ours == datatypes.NUMBER
    proto = {member.name: member.value for member in inference.DataType if member.value}
    assert proto == datatypes.FROM_CONFIG_NAME
    assert DataType.DT_INVALID == inference.DataType.TYPE_INVALID == 0


def test_timestamps_are_the_places_of_the_requests_array() -> None:
    request = InferRequest()
    assert [stamp.value for stamp in Timestamp] == list(range(len(Timestamp)))
    for stamp in Timestamp:
        request.stamp(stamp, 1000 + stamp)
    assert [request.timestamp(stamp) for stamp in Timestamp] == [1000 + stamp for stamp in Timestamp]
    with pytest.raises(IndexError):
        request.timestamp(len(Timestamp))


def test_what_is_new_is_nobodys_and_on_the_host() -> None:
    assert InferRequest().state == RequestState.TAKEN
    assert Tensor("x", DataType.DT_BOOL, (1,), b"\0").memory_kind == MemoryKind.CPU_MEMORY
    assert Responder().protocol == Protocol.NO_PROTOCOL
