"""Reads a model configuration in JSON as protobuf's parser in C++ does, which Triton servers use.

The problem: clients send configurations that are no JSON by the letter, and real servers take them. The choice: what
protobuf's strict parser refuses is read here once more, into what the strict parser takes.

Rules:
 1. Keys and texts may stand in single quotes, and keys without any. A comma may follow the last member or element.
 2. One value stands for a list with that element. A member that is repeated adds to a list, goes into the same message, or
    replaces the value before it.
 3. Names of enumerations are taken in any case, and "true" and "false" in quotes.
 4. Everything else stays as it is: the strict parser judges it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from neptrio.codec.descriptors import is_list

BLANKS = re.compile(r"\s*")
KEY = re.compile(r"[A-Za-z_$][\w$.]*")
WORD = re.compile(r"[-+\w.]+")
DEEPEST = 100  # messages in each other, as protobuf allows
WORDS = {"true": True, "false": False, "null": None}


class Refused(ValueError):
    """It is no JSON even so; `line` says where, from 1."""

    def __init__(self, text: str, at: int, expected: str) -> None:
        self.line = text.count("\n", 0, at) + 1
        super().__init__(f"expected {expected}, got {_got(text, at)}")


def _got(text: str, at: int) -> str:
    return repr(text[at : at + 20]) if at < len(text) else "the end"


class Members(list[tuple[str, Any]]):
    """The members of an object, in their order, repeated ones included."""


def parse(text: str, descriptor: Any) -> dict[str, Any]:
    """The object in `text`, in a form for json_format.ParseDict into a message of `descriptor`. Raises Refused."""
    reader = _Reader(text)
    found = reader.value(0)
    reader.end()
    if not isinstance(found, Members):
        raise Refused(text, 0, "an object")
    return _message(found, descriptor)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._skip()

    def _skip(self) -> None:
        self._at = BLANKS.match(self._text, self._at).end()  # type: ignore[union-attr]

    def _take(self, character: str) -> bool:
        if not self._text.startswith(character, self._at):
            return False
        self._at += 1
        self._skip()
        return True

    def _refuse(self, expected: str) -> Refused:
        return Refused(self._text, self._at, expected)

    def end(self) -> None:
        if self._at < len(self._text):
            raise self._refuse("the end")

    def value(self, depth: int) -> Any:
        if depth > DEEPEST:
            raise self._refuse(f"at most {DEEPEST} objects in each other")
        if self._take("{"):
            return self._members(depth)
        if self._take("["):
            return self._elements(depth)
        if self._text[self._at : self._at + 1] in ("'", '"'):
            return self._quoted()
        found = WORD.match(self._text, self._at)
        if found is None:
            raise self._refuse("a value")
        if found[0] in WORDS:
            value = WORDS[found[0]]
        else:
            try:
                value = json.loads(found[0])
            except ValueError:
                raise self._refuse("a value") from None
        self._at = found.end()
        self._skip()
        return value

    def _members(self, depth: int) -> Members:
        found = Members()
        while not self._take("}"):
            if found and not self._between("}"):
                break
            if self._text[self._at : self._at + 1] in ("'", '"'):
                key = self._quoted()
            else:
                bare = KEY.match(self._text, self._at)
                if bare is None:
                    raise self._refuse("a key or '}'")
                key, self._at = bare[0], bare.end()
                self._skip()
            if not self._take(":"):
                raise self._refuse(f"':' behind the key '{key}'")
            found.append((key, self.value(depth + 1)))
        return found

    def _elements(self, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._take("]"):
            if found and not self._between("]"):
                break
            found.append(self.value(depth + 1))
        return found

    def _between(self, closing: str) -> bool:
        """Takes the comma before the next member; False where the comma was the last."""
        if not self._take(","):
            raise self._refuse(f"',' or '{closing}'")
        return not self._take(closing)

    def _quoted(self) -> str:
        quote, start = self._text[self._at], self._at
        at = start + 1
        while at < len(self._text) and self._text[at] != quote:
            at += 2 if self._text[at] == "\\" else 1
        if at >= len(self._text):
            raise Refused(self._text, start, f"a text that ends with {quote}")
        inside = self._text[start + 1 : at]
        if quote == "'":  # the same text in double quotes
            inside = re.sub(
                r'\\.|"', lambda m: {"\\'": "'", '"': '\\"'}.get(m[0], m[0]), inside, flags=re.DOTALL
            )
        try:
            value: str = json.loads(f'"{inside}"', strict=False)
        except ValueError:
            raise Refused(self._text, start, "a text with valid escapes") from None
        self._at = at + 1
        self._skip()
        return value


def _message(members: Members, descriptor: Any) -> dict[str, Any]:
    made: dict[str, Any] = {}
    known = {field.json_name: field for field in descriptor.fields} | dict(descriptor.fields_by_name)
    for name, field, values in _by_field(members, known):
        if field is None:
            made[name] = _plain(values[-1])
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name["value"]
            rows = [value for value in values if isinstance(value, Members)]
            grouped: dict[str, list[Any]] = {}
            for key, value in _all(rows):
                grouped.setdefault(key, []).append(value)
            made[name] = (
                {key: _single(found, entry) for key, found in grouped.items()}
                if len(rows) == len(values)
                else _plain(values[-1])
            )
        elif is_list(field):
            elements = [e for value in values for e in (value if type(value) is list else [value])]
            made[name] = None if elements == [None] else [_single([e], field) for e in elements]
        else:
            made[name] = _single(values, field)
    return made


def _by_field(members: Members, known: dict[str, Any]) -> list[tuple[str, Any, list[Any]]]:
    """The values of each field: a field has two names in JSON."""
    found: dict[str, tuple[str, Any, list[Any]]] = {}
    for key, value in members:
        field = known.get(key)
        name = key if field is None else field.name
        found.setdefault(name, (name, field, []))[2].append(value)
    return list(found.values())


def _all(rows: list[Members]) -> list[tuple[str, Any]]:
    return [pair for row in rows for pair in row]


def _single(values: list[Any], field: Any) -> Any:
    """One value of a field, of all that were given."""
    last = values[-1]
    if field.message_type is not None:
        if not all(isinstance(value, Members) for value in values):
            return _plain(last)
        return _message(Members(_all(values)), field.message_type)
    if isinstance(last, str) and field.enum_type is not None:
        names = field.enum_type.values_by_name
        return last if last in names or last.upper() not in names else last.upper()
    if isinstance(last, str) and field.cpp_type == field.CPPTYPE_BOOL:
        return WORDS.get(last, last)
    return _plain(last)


def _plain(value: Any) -> Any:
    """What is no part of a known message, as the strict parser would have seen it."""
    if isinstance(value, Members):
        return {key: _plain(inner) for key, inner in value}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
