"""Where in a configuration file a field stands: for error messages that name the line.

The text form is walked with protobuf's own tokenizer after protobuf's own parser has accepted it,
so the walk only follows names and brackets. Lines of a JSON file are found by looking for the
field's name, which is exact unless the same name occurs earlier in another object.
"""

from __future__ import annotations

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
        pass  # the parser accepted it; whatever was found so far helps
    return found


def _message(tokens: Any, prefix: Path, end: str, found: dict[Path, int]) -> None:
    seen: dict[str, int] = {}
    while not tokens.AtEnd() and tokens.token != end:
        name = tokens.token
        tokens.NextToken()
        tokens.TryConsume(":")
        if tokens.TryConsume("["):
            while not tokens.TryConsume("]"):
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


def line_in_json(text: str, path: Path) -> int:
    """The line of a JSON document on which the field at `path` probably stands, 0 if unknown."""
    names = [part for part in path if isinstance(part, str)]
    if not names:
        return 0
    match = re.search(re.escape(json.dumps(names[-1])), text)
    return text.count("\n", 0, match.start()) + 1 if match else 0


def text_line(found: dict[Path, int], path: Path) -> int:
    """The line of the field at `path`, or of the nearest enclosing field; 0 if there is none.

    A singular message field may be written with or without an index in `path`.
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
