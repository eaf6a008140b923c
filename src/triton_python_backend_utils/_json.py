"""Parameters as JSON, to the character what a Triton server gives: models compare and hash the text.

No blanks, no escapes beyond those that JSON demands, and of numbers with an exponent those from 1e-6 to
1e20 written out.
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
