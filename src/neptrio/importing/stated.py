"""Inputs that whoever imports a file says, because the file does not: `--input x:FP32:-1,4`.

Rules:
 1. A first size of -1 is a batch where all inputs have it; whether the module takes that is tried.
"""

from __future__ import annotations

from dataclasses import dataclass

from neptrio import datatypes
from neptrio.errors import InvalidArgument

ROWS = 64  # of a batch


@dataclass(frozen=True)
class Stated:
    """An input."""

    name: str
    kind: str  # its datatype in a configuration
    shape: tuple[int, ...]


def parse(text: str) -> Stated:
    """The input that a flag says. Raises InvalidArgument."""
    name, kind, shape, *_ = (*text.rsplit(":", 2), "", "")
    kinds = {word.removeprefix("TYPE_"): word for word in datatypes.FROM_CONFIG_NAME}
    kinds["BYTES"] = "TYPE_STRING"
    sizes = [size.strip() for size in shape.split(",")]
    whole = all(size.lstrip("-").isdecimal() and int(size) >= -1 for size in sizes)
    if not name or kind.upper() not in kinds or not whole:
        raise InvalidArgument(
            f"--input '{text}' must be NAME:TYPE:SHAPE, such as x:FP32:-1,4; types are {', '.join(sorted(kinds))}"
        )
    return Stated(name, kinds[kind.upper()], tuple(int(size) for size in sizes))


def batches(inputs: list[Stated]) -> bool:
    """Whether a batch may be meant."""
    return bool(inputs) and all(one.shape[:1] == (-1,) and len(one.shape) > 1 for one in inputs)


def text(inputs: list[Stated], batched: bool) -> str:
    """The inputs as lines of a configuration."""
    lines = [f"max_batch_size: {ROWS}\ndynamic_batching {{ }}\n"] if batched else []
    for one in inputs:
        dims = ", ".join(str(size) for size in one.shape[1 if batched else 0 :])
        name = one.name.replace("\\", "\\\\").replace('"', '\\"')
        lines.append(f'input {{ name: "{name}" data_type: {one.kind} dims: [ {dims} ] }}\n')
    return "".join(lines)
