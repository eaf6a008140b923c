"""What functions and methods of this package accept: as a Triton server's, which are compiled and check their arguments.

Rules:
 1. Whatever has the wrong type is a TypeError that says what was expected and what came.
 2. Where text is expected, bytes of UTF-8 are taken, too; numpy's strings are both. What comes out is a plain str.
 3. Constants are members of their enumerations: a plain number in the place of one is a TypeError.
"""

from __future__ import annotations

import operator
from typing import Any

from ._foreign import type_name


def wrong(what: str, expected: str, got: Any) -> TypeError:
    """The error of an argument of another type."""
    return TypeError(f"{what} must be {expected}, got {type_name(got)}")


def text(value: Any, what: str) -> str:
    """A text. Raises TypeError."""
    if type(value) is str:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "backslashreplace")
    raise wrong(what, "a str", value)


def number(value: Any, what: str, lowest: int, highest: int) -> int:
    """An integer. Raises TypeError, also for one that is out of range."""
    try:
        found = operator.index(value)
    except TypeError:
        raise wrong(what, "an int", value) from None
    if not lowest <= found <= highest:
        raise TypeError(f"{what} must be an int from {lowest} to {highest}, got {found}")
    return found


def real(value: Any, what: str) -> float:
    """A number with or without a fraction. Raises TypeError."""
    if not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        raise wrong(what, "a number", value)
    return float(value)


def member(value: Any, kind: Any, what: str, shown: str) -> Any:
    """A member of the enumeration `kind`, which models know as `shown`. Raises TypeError."""
    if not isinstance(value, kind):
        raise wrong(what, f"one of {', '.join(f'{shown}.{row.name}' for row in kind)}", value)
    return value


def sequence(value: Any, what: str, expected: str) -> Any:
    """A list, a tuple or another sequence that is no text. Raises TypeError."""
    if isinstance(value, (str, bytes, bytearray)) or not hasattr(value, "__iter__"):
        raise wrong(what, expected, value)
    return value
