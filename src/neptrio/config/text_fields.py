"""Finds the fields of a text-format message as spans of the text, without knowing the message's type.

The problem: protobuf's parser stops at the first error, and an operator wants to see all errors at once.
The choice: the field that the parser refuses is replaced by blanks, newlines kept so that line numbers stay
right, and the text is parsed again. This module finds where that field begins and ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<word>[A-Za-z_0-9.+-]+)
      | (?P<mark>.)""",
    re.VERBOSE | re.DOTALL,
)
_CLOSING = {"{": "}", "<": ">"}
DEEPEST = 100


class Unbalanced(Exception):
    """The brackets of the text do not match, so no field can be blanked without making it worse."""


@dataclass(frozen=True)
class Span:
    """One field of the text, from the first letter of its name to the end of its value."""

    start: int
    end: int


def spans(text: str) -> list[Span]:
    """Every field at every depth; an outer field comes before those inside it. Raises Unbalanced."""
    tokens = [
        (m.lastgroup or "", m.group(), m.start(), m.end())
        for m in _TOKEN.finditer(text)
        if m.lastgroup != "skip"
    ]
    found: list[Span] = []
    at = _fields(tokens, 0, "", found, 0)
    if at != len(tokens):
        raise Unbalanced
    return sorted(found, key=lambda span: (span.start, -span.end))


_Tokens = list[tuple[str, str, int, int]]


def _fields(tokens: _Tokens, at: int, end: str, found: list[Span], depth: int) -> int:
    """Reads fields up to the closing bracket `end`; returns the index of the token after the last one read."""
    if depth > DEEPEST:
        raise Unbalanced
    while at < len(tokens) and tokens[at][1] != end:
        kind, _, start, _ = tokens[at]
        if kind != "word":
            raise Unbalanced
        at += 1
        if at < len(tokens) and tokens[at][1] == ":":
            at += 1
        if at < len(tokens) and tokens[at][1] == "[":
            at += 1
            while at < len(tokens) and tokens[at][1] != "]":
                at = _value(tokens, at, found, depth)
                if at < len(tokens) and tokens[at][1] == ",":
                    at += 1
            at += 1
        else:
            at = _value(tokens, at, found, depth)
        if at > len(tokens):
            raise Unbalanced
        found.append(Span(start, tokens[at - 1][3]))
        if at < len(tokens) and tokens[at][1] in ",;":
            at += 1
    return at


def _value(tokens: _Tokens, at: int, found: list[Span], depth: int) -> int:
    if at >= len(tokens):
        raise Unbalanced
    kind, token, _, _ = tokens[at]
    if token in _CLOSING:
        at = _fields(tokens, at + 1, _CLOSING[token], found, depth + 1)
        if at >= len(tokens):
            raise Unbalanced
        return at + 1
    if kind == "mark":
        raise Unbalanced
    at += 1
    while kind == "string" and at < len(tokens) and tokens[at][0] == "string":
        at += 1
    return at


def innermost(found: list[Span], offset: int) -> Span | None:
    """The smallest field that contains the character at `offset`."""
    around = [span for span in found if span.start <= offset < span.end]
    return min(around, key=lambda span: span.end - span.start) if around else None


def blanked(text: str, span: Span) -> str:
    """The text with a field replaced by blanks; line numbers stay as they were."""
    hole = re.sub(r"[^\n]", " ", text[span.start : span.end])
    return text[: span.start] + hole + text[span.end :]


def offset_of(text: str, line: int, column: int) -> int:
    """The index in the text of a line and column, both counted from 1."""
    start = 0
    for _ in range(line - 1):
        start = text.find("\n", start) + 1
    return start + column - 1
