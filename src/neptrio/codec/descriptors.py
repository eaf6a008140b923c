"""The protocol's message descriptors, in a protobuf pool that nothing else uses.

protobuf's text and JSON parsers need message classes. They are built from the compiled
descriptor set that `make proto` writes, in a private pool, so that a process which also imports
tritonclient (whose generated modules claim the default pool) never sees a conflict.
"""

from __future__ import annotations

import pkgutil
import threading
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


@cache
def file_set() -> Any:
    """The FileDescriptorSet of proto/ (used by gRPC reflection too)."""
    data = pkgutil.get_data("neptrio._proto", "descriptors.binpb")
    assert data is not None
    return descriptor_pb2.FileDescriptorSet.FromString(data)


@cache
def pool() -> Any:
    """The private descriptor pool."""
    made = descriptor_pool.DescriptorPool()
    for file in file_set().file:
        made.Add(file)
    return made


# functools.cache alone would let two loader threads make two pools, whose classes do not mix
_making = threading.Lock()


def message_class(name: str) -> Any:
    """The protobuf class of a full message name such as `inference.ModelConfig`. Any thread."""
    with _making:
        return _message_class(name)


@cache
def _message_class(name: str) -> Any:
    return _class_of(pool().FindMessageTypeByName(name))


def is_list(field: Any) -> bool:
    """Whether a field is a list or a map, with every version of protobuf."""
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)


# Each class with those of its fields. protobuf holds none of them: it would make a class again for each message that
# is read, and leave it, as every class refers to itself, to the collector.
_classes: dict[str, Any] = {}


def _class_of(descriptor: Any) -> Any:
    made = _classes.get(descriptor.full_name)
    if made is None:
        made = _classes[descriptor.full_name] = message_factory.GetMessageClass(descriptor)
        for field in descriptor.fields:
            if field.message_type is not None:
                _class_of(field.message_type)
    return made
