"""Parameters as JSON, in exactly the characters that a Triton server gives, because models compare and hash the text.

There are no blanks and no escapes that JSON does not require. Numbers from 1e-6 to 1e20 are written without an exponent.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

FIRST_WRITTEN_OUT, LAST_WRITTEN_OUT = -6, 20  # powers of ten


def parameters_text(parameters: dict[str, Any] | None) -> str:
    """A JSON object, "{}" for None."""
    if not parameters:
        return "{}"
    if any(isinstance(v, float) and "e" in float.__repr__(v) for v in parameters.values()):
        return "{" + ",".join(f"{_text(k)}:{_value(v)}" for k, v in parameters.items()) + "}"
    return _text(parameters)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _value(value: Any) -> str:
    if not isinstance(value, float):
        return _text(value)
    text = float.__repr__(value)
    digits, _, power = text.partition("e")
    if not power:
        return _text(value)
    if FIRST_WRITTEN_OUT <= int(power) <= LAST_WRITTEN_OUT:
        plain = format(Decimal(text), "f")
        return plain if "." in plain else plain + ".0"
    return f"{digits}e{int(power)}"
