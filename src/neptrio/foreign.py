"""Texts of objects that somebody else made: exceptions and values of models, functions and libraries.

The problem: an exception's `__str__` is code of whoever wrote its class. It may raise, and where an error is worded nothing
else waits for one, so the request is never answered. And what it returns may hold halves of surrogate pairs, which no JSON
and no UTF-8 can carry. The choice: such texts are made here, and nowhere else; triton_python_backend_utils, which stands
alone, has the same functions in its module `_foreign`.

Rules:
 1. Nothing here raises, whatever the object does.
 2. The texts are plain strings of valid Unicode: a half of a surrogate pair becomes its escape, as in "\\udc80".
 3. A text of more than LONGEST characters loses its end: who sends it on has limits.
"""

from __future__ import annotations

from typing import Any

LONGEST = 1 << 20
_name = type.__dict__["__name__"].__get__  # a metaclass may have another


def valid(text: str) -> str:
    """A text that UTF-8 can carry. Rules 2 and 3."""
    return str.encode(str.__getitem__(text, slice(LONGEST)), "utf-8", "backslashreplace").decode()


def type_name(value: Any) -> str:
    """The name of the object's type."""
    return valid(_name(type(value)))


def text_of(value: Any) -> str:
    """str(value), or which object it is whose text cannot be made."""
    try:
        return valid(str(value))
    except (
        BaseException
    ) as error:  # SystemExit, too, is an answer of the object's and no wish to end the server
        return f"<the text of this {type_name(value)} cannot be made: {type_name(error)}>"


def summary(error: BaseException) -> str:
    """An exception in one line or more: its type and its text."""
    return f"{type_name(error)}: {text_of(error)}"
