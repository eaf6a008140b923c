"""Answers that are made without the generated classes."""

from __future__ import annotations


class Encoded:
    """A message that is bytes already."""

    def __init__(self, text: bytes) -> None:
        self._text = text

    def __bytes__(self) -> bytes:
        return self._text
