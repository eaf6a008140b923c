"""The config endpoint's view of a configuration, and the metadata's of its tensors (docs/protocol/observed.md 2)."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format

from neptrio import datatypes


def to_dict(config: Any) -> dict[str, Any]:
    """The config endpoint's JSON object: every field, snake_case names, int64 as numbers.

    Keys come in the order in which model_config.proto declares them, which is a Triton server's.
    """
    raw: dict[str, Any] = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _ordered(raw, config.DESCRIPTOR)


def _ordered(value: Any, descriptor: Any) -> dict[str, Any]:
    """Keys in declaration order; and 64-bit integers, which json_format writes as strings, as numbers."""
    out: dict[str, Any] = {}
    for field in descriptor.fields:
        if field.name not in value:
            continue
        item = value[field.name]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name["value"].message_type
            out[field.name] = {k: _ordered(v, entry) if entry is not None else v for k, v in item.items()}
        elif field.message_type is not None:
            if isinstance(item, list):
                out[field.name] = [_ordered(v, field.message_type) for v in item]
            else:
                out[field.name] = _ordered(item, field.message_type)
        elif field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
            out[field.name] = [int(v) for v in item] if isinstance(item, list) else int(item)
        else:
            out[field.name] = item
    return out


def metadata_tensors(fields: Any, batching: bool) -> list[dict[str, Any]]:
    """The inputs or outputs as the model metadata lists them: names, datatypes, and dims without any reshape."""
    return [
        {
            "name": f.name,
            "datatype": datatypes.NAME.get(f.data_type, "<invalid>"),
            "shape": ([-1] if batching else []) + list(f.dims),
        }
        for f in fields
    ]
