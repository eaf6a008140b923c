"""Says where in a JSON text an error is, for who has written that text by hand.

The problem: rapidjson's texts, which clients know, name an offset and nothing else ("Missing a comma or '}' after an object
member. at 41"). The choice: they are kept, and what stands around the offset follows in brackets: the line, the member
that came before or that is being read, and the mistake where it is one that people make often (a comma too many,
a quotation mark or a line break inside a string, single quotes, a form).

Rules:
 1. Only the beginning of a text is looked at (LOOKED_AT), as clients may send any number of bad ones.
 2. The text before the error is right: it was read.
"""

from __future__ import annotations

import re

from neptrio.codec.text import bytes_text
from neptrio.limits import shown

LOOKED_AT = 16 << 10  # bytes: about a millisecond
DEEPEST = 16  # levels of a path that is shown
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*("?)|[{}\[\]:,]|[^\s{}\[\]:,"]+', re.S)
_WORD = re.compile(rb"[\w<]")


class _Level:
    """An object or an array that is open: the name of its latest member, or the number of its latest element."""

    def __init__(self, array: bool) -> None:
        self.array = array
        self.name = b""
        self.number = 0
        self.value = array  # a value comes next, or is being read


def place(text: bytes, at: int) -> str:
    """What to append to an error at `at`: ` (line 3, after "parameters")`, or nothing where there is nothing to say."""
    before = text[:at]
    if at > LOOKED_AT:
        return ""
    said = []
    lines = before.count(b"\n")
    if lines:
        said.append(f"line {lines + 1}")
    levels, inside = _levels(before)
    path = _path(levels)
    if path:
        reading = levels[-1].value
        said.append(f"{'in' if reading else 'after'} {path}")
    mistake = _mistake(before, text[at : at + 1], inside)
    if not levels and before.rstrip()[-1:] in (b"}", b"]"):
        mistake = f": tensors as bytes behind the JSON need the header Inference-Header-Content-Length: {at}"
    told = (", ".join(said) + mistake).removeprefix(": ")
    return f" ({told})" if told else ""


def _levels(before: bytes) -> tuple[list[_Level], bool]:
    """What is open at the end of the text, and whether a string is."""
    levels: list[_Level] = []
    inside = False
    for found in _TOKEN.finditer(before):
        token = found.group()
        if token in (b"{", b"["):
            levels.append(_Level(token == b"["))
            continue
        if token in (b"}", b"]"):
            levels.pop()
        if not levels:
            continue
        here = levels[-1]
        if token == b":":
            here.value = True
        elif token == b",":
            here.value = here.array
            here.number += here.array
        elif token[:1] == b'"':
            inside = not found.group(1)
            if not here.value:
                here.name = token[1:] if inside else token[1:-1]
            here.value = here.value and inside
        else:  # a number or a word, which may be the one with the error, or what is behind a bracket
            here.value = token not in (b"}", b"]") and found.end() == len(before)
    return levels, inside


def _path(levels: list[_Level]) -> str:
    """Names and numbers of what is open, as `"outputs[0].name"`; "" where there are none, or too many to be read."""
    if len(levels) > DEEPEST:
        return ""
    made = ""
    for level in levels:
        if level.array:
            made += f"[{level.number}]"
        elif level.name:
            made += ("." if made else "") + bytes_text(level.name)
    return f'"{shown(made)}"' if made else ""


def _mistake(before: bytes, here: bytes, inside: bool) -> str:
    """What is wrong, where it is one of the usual mistakes."""
    if inside and here in (b"\n", b"\r", b"\t"):
        return r": a line break or tab inside a string is written \n or \t"
    if here == b"-" and before == b"-":
        return ": it looks like a form, send the JSON itself as the body"
    last = before.rstrip()[-1:]
    if here in (b"}", b"]") and last == b",":
        return ": no comma may stand before a closing bracket"
    if last == b'"' and before[-1:] == b'"' and _WORD.match(here):
        return r": a quotation mark inside a string is written \""
    if here == b"'" and not inside:
        return ': names and texts stand in double quotes, "like this"'
    return ""
