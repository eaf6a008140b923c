"""Finds the line of a configuration file in which a field stands, for error messages that name it.

The text form is walked with protobuf's tokenizer after protobuf's parser has accepted it, so the walk need
not check anything: it only follows names and brackets. A JSON document is walked the same way.
"""

from __future__ import annotations

import bisect
import json
import re
from typing import Any

from google.protobuf import text_format

Path = tuple[str | int, ...]  # ("input", 1, "dims", 0)


def lines_of_text(text: str) -> dict[Path, int]:
    """Field path -> line (from 1) for every field of a text-format message."""
    tokens = text_format.Tokenizer(text.splitlines())
    found: dict[Path, int] = {}
    try:
        _message(tokens, (), "", found)
    except text_format.ParseError:
        pass  # the parser has accepted the text; lines found before the tokenizer's error still help
    return found


def _message(tokens: Any, prefix: Path, end: str, found: dict[Path, int]) -> None:
    seen: dict[str, int] = {}
    while not tokens.AtEnd() and tokens.token != end:
        name = tokens.token
        tokens.NextToken()
        tokens.TryConsume(":")
        if tokens.TryConsume("["):
            while not tokens.TryConsume("]") and not tokens.AtEnd():
                _value(tokens, prefix, name, seen, found)
                tokens.TryConsume(",")
        else:
            _value(tokens, prefix, name, seen, found)
        tokens.TryConsume(",") or tokens.TryConsume(";")


def _value(tokens: Any, prefix: Path, name: str, seen: dict[str, int], found: dict[Path, int]) -> None:
    index = seen.get(name, 0)
    seen[name] = index + 1
    line = tokens._line + 1
    found.setdefault((*prefix, name), line)
    found[(*prefix, name, index)] = line
    closing = {"{": "}", "<": ">"}.get(tokens.token)
    if closing is None:
        quoted = tokens.token[:1] in "\"'"
        tokens.NextToken()
        while quoted and tokens.token[:1] in ("'", '"'):
            tokens.NextToken()
        return
    tokens.NextToken()
    _message(tokens, (*prefix, name, index), closing, found)
    tokens.NextToken()


_JSON = re.compile(r'(?P<string>"(?:[^"\\]|\\.)*")|(?P<mark>[{}\[\],:])|(?P<word>[^\s{}\[\],:"]+)')


def lines_of_json(text: str) -> dict[Path, int]:
    """Path -> line (from 1) of every member and element of a JSON document, names as snake_case.

    The path of an element of a repeated field ends in its index; a value that is no list is also found as index 0.
    """
    lines = _JsonLines(text)
    try:
        lines.value(0, ())
    except (IndexError, ValueError, RecursionError, TypeError):
        pass  # the parser reports what is wrong; lines found before that place still help
    return lines.found


class _JsonLines:
    """Finds the lines of a document. No function in a function, which would refer to itself and to the document."""

    def __init__(self, text: str) -> None:
        self.found: dict[Path, int] = {}
        self._tokens = [(m.group(), m.start()) for m in _JSON.finditer(text)]
        self._breaks = [m.start() for m in re.finditer("\n", text)]

    def _line(self, at: int) -> int:
        return bisect.bisect_left(self._breaks, self._tokens[at][1]) + 1

    def value(self, at: int, path: Path) -> int:
        """Notes what is in the value that begins with the token `at`; returns the token behind it."""
        tokens, found = self._tokens, self.found
        token = tokens[at][0]
        if token == "{":
            at += 1
            while tokens[at][0] != "}":
                if tokens[at][0] == ",":
                    at += 1
                    continue
                name = re.sub("([A-Z])", lambda m: "_" + m[1].lower(), json.loads(tokens[at][0]))
                here = (*path, name)
                found.setdefault(here, self._line(at))
                found.setdefault((*here, 0), self._line(at))
                at = self.value(at + 2, here)
            return at + 1
        if token == "[":
            at += 1
            index = 0
            while tokens[at][0] != "]":
                if tokens[at][0] == ",":
                    at += 1
                    continue
                found[(*path, index)] = self._line(at)
                at = self.value(at, (*path, index))
                index += 1
            return at + 1
        return at + 1


def line_of(found: dict[Path, int], path: Path) -> int:
    """The line of the field at `path`, or of the nearest enclosing field that was found; 0 if there is none.

    `path` may give an index for a message field that is not repeated, and the file may leave out an index.
    """
    current: Path = ()
    line = 0
    for part in path:
        step = (*current, part)
        if step not in found and isinstance(part, str) and (*current, 0, part) in found:
            step = (*current, 0, part)
        if step not in found:
            break
        current, line = step, found[step]
    return line
