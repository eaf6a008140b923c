"""Which fields of a completed configuration the server has filled in."""

from __future__ import annotations

from neptrio.config.defaulted import defaulted
from neptrio.config.model_config import parse_text


def marks(written: str, completed: str) -> list[list[str | int]]:
    return defaulted(parse_text(written, ""), parse_text(completed, ""))


def test_what_nobody_wrote_is_marked_once() -> None:
    assert marks("max_batch_size: 8", "max_batch_size: 8 instance_group { count: 1 }") == [["instance_group"]]
    assert marks("", "") == []


def test_what_the_server_changed_is_marked() -> None:
    assert marks("max_batch_size: 8", "max_batch_size: 4") == [["max_batch_size"]]


def test_tensors_are_compared_by_their_names() -> None:
    written = 'input { name: "B" dims: [ 2 ] data_type: TYPE_FP32 }'
    completed = (
        'input { name: "A" dims: [ 1 ] data_type: TYPE_FP32 } '
        'input { name: "B" dims: [ 2 ] data_type: TYPE_FP32 format: FORMAT_NCHW }'
    )
    # A has no counterpart by name, and takes that of its place
    assert ["input", 1, "format"] in marks(written, completed)
    assert ["input", 1] not in marks(written, completed) and ["input", 1, "dims"] not in marks(
        written, completed
    )
    assert marks("", completed) == [["input"]]
    twice = 'instance_group { count: 1 } instance_group { count: 2 name: "x" }'
    assert marks("instance_group { count: 1 }", twice) == [["instance_group", 1]]


def test_entries_of_maps_are_marked_by_their_keys() -> None:
    written = 'parameters { key: "a.b" value { string_value: "1" } }'
    completed = written + ' parameters { key: "c" value { string_value: "2" } }'
    assert marks(written, completed) == [["parameters", "c"]]


def test_messages_are_looked_into() -> None:
    written = "dynamic_batching { max_queue_delay_microseconds: 5 }"
    completed = "dynamic_batching { max_queue_delay_microseconds: 5 preferred_batch_size: [ 4 ] }"
    assert marks(written, completed) == [["dynamic_batching", "preferred_batch_size"]]
