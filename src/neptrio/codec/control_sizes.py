"""Checks the sizes inside of a control message, between protobuf's parser and the generated classes.

The problem: an element of a list or map can be two bytes of a message, and becomes half a kilobyte of Python objects in
the generated classes, which nobody can stop. The choice: protobuf, which needs a few bytes for each, reads the message
first; its elements are counted and its texts measured there.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from neptrio.codec.descriptors import is_list
from neptrio.errors import InvalidArgument
from neptrio.limits import LONGEST_NAME, LONGEST_VALUE, most_entries, shown

VALUES = ("value", "string_param")  # fields that have settings; others have names
FREE = frozenset(("inference.ModelRepositoryParameter.string_param",))  # a configuration


def check_sizes(path: bytes, message: Any) -> None:
    """Raises InvalidArgument for a message (of protobuf) of an rpc with too many elements or too long a text."""
    _walk(message, 0, most_entries(path))


def _walk(message: Any, count: int, most: int) -> int:
    for field in message.DESCRIPTOR.fields:
        if is_list(field):
            value = getattr(message, field.name)
        elif field.type == FieldDescriptor.TYPE_BYTES or (
            field.has_presence and not message.HasField(field.name)
        ):
            continue  # reading a field of bytes copies it, and a model's file is one
        else:
            value = getattr(message, field.name)
            if field.message_type is not None:
                count = _walk(value, count, most)
            elif field.type == FieldDescriptor.TYPE_STRING:
                _text(field, value)
            continue
        if not value:
            continue
        count += len(value)
        if count > most:
            raise InvalidArgument(
                f"the lists and maps of the message have more than {most} elements, the most that are allowed; "
                f"'{field.name}' has {len(value)}"
            )
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            for key in value:
                _text(entry.fields_by_name["key"], key)
                count = _walk(value[key], count, most)
        elif entry is not None:
            for each in value:
                count = _walk(each, count, most)
        elif field.type == FieldDescriptor.TYPE_STRING:
            for each in value:
                _text(field, each)
    return count


def _text(field: Any, text: str) -> None:
    most = LONGEST_VALUE if field.name in VALUES else LONGEST_NAME
    if len(text) > most and field.full_name not in FREE:
        raise InvalidArgument(
            f"'{field.name}' has {len(text)} characters, the most is {most}: '{shown(text)}'"
        )
