"""Random model configurations for tests: every field of ModelConfig, sensible and absurd values."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from neptrio.config.model_config import new_config

NUMBERS = (
    0,
    1,
    2,
    3,
    8,
    16,
    -1,
    -2,
    255,
    2**31 - 1,
    -(2**31),
    2**32 - 1,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
)
NAMES = (
    "INPUT0",
    "OUTPUT0",
    "X",
    "Y",
    "",
    "a" * 300,
    "../x",
    "/etc/passwd",
    "m",
    "é\u0000",
    " ",
    "1",
    "-1",
    "true",
)
LIMITS = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}
DEEPEST = 4


def _number(low: int, high: int) -> st.SearchStrategy[Any]:
    return st.sampled_from([n for n in NUMBERS if low <= n <= high])


def _scalar(field: Any) -> st.SearchStrategy[Any]:
    kinds = {
        field.CPPTYPE_INT32: "int32",
        field.CPPTYPE_INT64: "int64",
        field.CPPTYPE_UINT32: "uint32",
        field.CPPTYPE_UINT64: "uint64",
    }
    if field.cpp_type in kinds:
        return _number(*LIMITS[kinds[field.cpp_type]])
    if field.cpp_type == field.CPPTYPE_ENUM:
        return st.sampled_from([value.name for value in field.enum_type.values] * 3 + ["NO_SUCH"])
    if field.cpp_type == field.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return st.sampled_from([0.0, 0.5, -1.0, 1e30, "NaN", "Infinity"])
    if field.type == field.TYPE_BYTES:
        return st.sampled_from(["", "AAAA", "***"])
    return st.sampled_from(NAMES)


def _value(draw: Any, field: Any, depth: int) -> Any:
    if field.message_type is not None:
        return _message(draw, field.message_type, depth + 1)
    return draw(_scalar(field))


def _message(draw: Any, descriptor: Any, depth: int) -> dict[str, Any]:
    fields = [f for f in descriptor.fields if f.message_type is None or depth < DEEPEST]
    chosen = (
        draw(st.lists(st.sampled_from(fields), max_size=2 if depth else 3, unique_by=lambda f: f.name))
        if fields
        else []
    )
    made: dict[str, Any] = {}
    for field in chosen:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = field.message_type.fields_by_name["value"]
            key = field.message_type.fields_by_name["key"]
            made[field.name] = {str(draw(_scalar(key))): _value(draw, value, depth)}
        elif field.is_repeated:
            made[field.name] = [_value(draw, field, depth) for _ in range(draw(st.integers(0, 2)))]
        else:
            made[field.name] = _value(draw, field, depth)
    return made


@st.composite
def configurations(draw: Any, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """A ModelConfig as JSON, random fields over those of `base`."""
    made = {**(base or {}), **_message(draw, new_config().DESCRIPTOR, 0)}
    if draw(st.booleans()) and base:
        made.update(input=base["input"], output=base["output"])
    made["backend"] = draw(st.sampled_from(["identity", "identity", "sequence", "onnxruntime", "", "nosuch"]))
    made.pop("name", None)
    return made
