"""config.pbtxt and config.json -> inference.ModelConfig, with the defaults a Triton server fills in.

The text form is parsed by protobuf's own parser, the JSON form by its JSON parser.
Source: spec/features.md A4, spec/observed.md 2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format

from neptrio import datatypes
from neptrio.descriptors import message_class
from neptrio.errors import InvalidArgument
from neptrio.model.core import InputSpec


def new_config() -> Any:
    """An empty inference.ModelConfig."""
    return message_class("inference.ModelConfig")()


def parse_text(text: str, where: str) -> Any:
    """A config.pbtxt's content. Raises InvalidArgument naming file and line."""
    config = new_config()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        raise InvalidArgument(f"failed to parse {where}: {error}") from None
    return config


def parse_json(text: str | bytes, where: str) -> Any:
    """A ModelConfig as JSON. Raises InvalidArgument with the parser's reason."""
    config = new_config()
    try:
        json_format.Parse(text, config)
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"failed to parse {where}: {error}") from None
    return config


def read(model_dir: Path) -> Any:
    """The configuration in a model's folder; an empty one when there is no file."""
    text = model_dir / "config.pbtxt"
    if text.is_file():
        return parse_text(text.read_text(encoding="utf-8"), str(text))
    json = model_dir / "config.json"
    if json.is_file():
        return parse_json(json.read_bytes(), str(json))
    return new_config()


def fill_defaults(config: Any, name: str) -> None:
    """Names, version policy, instance groups and batching defaults, in place."""
    if not config.name:
        config.name = name
    if config.name != name:
        raise InvalidArgument(
            f"unexpected directory name '{name}' for model '{config.name}', directory name must equal model name"
        )
    if config.WhichOneof("scheduling_choice") != "ensemble_scheduling" and not config.backend:
        config.backend = _BACKEND_OF_PLATFORM.get(config.platform, "")
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    if not config.instance_group and config.WhichOneof("scheduling_choice") != "ensemble_scheduling":
        config.instance_group.add()
    kinds = config.DESCRIPTOR.fields_by_name["instance_group"].message_type.enum_types_by_name["Kind"]
    cpu = kinds.values_by_name["KIND_CPU"].number
    for i, group in enumerate(config.instance_group):
        group.name = group.name or f"{name}_{i}"
        group.count = group.count or 1
        if group.kind == kinds.values_by_name["KIND_AUTO"].number:
            group.kind = cpu
    batching = config.HasField("dynamic_batching") and config.max_batch_size > 0
    if batching and not config.dynamic_batching.preferred_batch_size:
        config.dynamic_batching.preferred_batch_size.append(config.max_batch_size)


_BACKEND_OF_PLATFORM = {"onnxruntime_onnx": "onnxruntime"}


def input_specs(config: Any) -> list[InputSpec]:
    """What requests are validated against."""
    return [
        InputSpec(i.name, i.data_type, tuple(i.dims), i.optional, i.allow_ragged_batch) for i in config.input
    ]


def to_dict(config: Any) -> dict[str, Any]:
    """The config endpoint's JSON object: every field, snake_case names, int64 as numbers."""
    raw: dict[str, Any] = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    fixed: dict[str, Any] = _numbers(raw, config.DESCRIPTOR)
    return fixed


def _numbers(value: Any, descriptor: Any) -> Any:
    """json_format writes 64-bit integers as strings; the endpoint prints numbers."""
    out: dict[str, Any] = {}
    for key, item in value.items():
        field = descriptor.fields_by_name[key]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name["value"]
            out[key] = {
                k: _numbers(v, entry.message_type) if entry.message_type is not None else v
                for k, v in item.items()
            }
        elif field.message_type is not None:
            if isinstance(item, list):
                out[key] = [_numbers(v, field.message_type) for v in item]
            else:
                out[key] = _numbers(item, field.message_type)
        elif field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
            out[key] = [int(v) for v in item] if isinstance(item, list) else int(item)
        else:
            out[key] = item
    return out


def metadata_tensors(fields: Any, batching: bool) -> list[dict[str, Any]]:
    """inputs or outputs as the model metadata lists them."""
    return [
        {
            "name": f.name,
            "datatype": datatypes.NAME.get(f.data_type, "<invalid>"),
            "shape": ([-1] if batching else []) + list(f.dims),
        }
        for f in fields
    ]
