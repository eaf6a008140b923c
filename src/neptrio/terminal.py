"""What commands print, made safe for a terminal.

The problem: names, errors and ids come from trace files, servers and configurations, so from others, and a terminal obeys
some characters: it changes its title, answers as if somebody had typed, or shows lines in another order. The choice: all that
a command prints passes a stream that shows such characters as escapes, so that no print() can forget it.

Rules:
 1. Line feeds and tabs pass, as does every character that only is shown. Lone surrogates become escapes, too.
 2. What the terminal is to obey is written with command().
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# control characters except line feed and tab, the line ends of Unicode, what turns the direction of text, lone surrogates
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> str:
    """The text as a terminal shows it: characters that it would obey are escapes."""
    if text.isascii() and text.isprintable():
        return text
    return OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)  # as JSON has them


def counted(number: int, what: str) -> str:
    """`1 model`, `2 models`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


class ShownText:
    """A text stream that passes on what shown() makes of what is written."""

    def __init__(self, stream: Any) -> None:
        self.obeyed = stream  # where command() writes

    def write(self, text: str) -> int:
        """Writes the text; returns how many characters it has."""
        self.obeyed.write(shown(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Writes each of the lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.obeyed, name)


@contextmanager
def guarded() -> Iterator[None]:
    """Whatever is printed meanwhile is safe for a terminal."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = ShownText(sys.stdout), ShownText(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def command(text: str) -> None:
    """Writes what the terminal at standard output is to obey."""
    getattr(sys.stdout, "obeyed", sys.stdout).write(text)
