"""Writes families of samples in the Prometheus text format, version 0.0.4.

Labels keep the order in which they are given; the server's own are in alphabetical order, which scripts rely on.
They are passed as text made by pairs(), because most lines of a document have the labels of one of a few models.
Source: the public description of the text exposition format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

Labels = Sequence[tuple[str, str]]

PACKED_LINES = 1000  # lines joined at once; takes well below a millisecond


def number(value: float) -> str:
    """A value as text: whole numbers without a fraction, infinities and NaN as `+Inf`, `-Inf` and `NaN`."""
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if value == int(value) and abs(value) < 1 << 53:
        return str(int(value))
    return repr(value)


@lru_cache(64)
def _texts(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(number(bound) for bound in bounds)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def pairs(labels: Labels) -> str:
    """Labels as text: `a="b",c="d"`, with special characters in the values escaped."""
    return ",".join([key + '="' + _escape(value).replace('"', '\\"') + '"' for key, value in labels])


class Family:
    """One metric name with its help text, its kind and its samples, in the order in which they are printed.

    `labels` arguments are texts made by pairs(), "" for no labels.
    """

    def __init__(self, name: str, help: str, kind: str) -> None:
        """`kind`: counter, gauge, histogram or summary."""
        self.name = name
        self.kind = kind
        self._help = help
        self.lines: list[str] = []  # not packed yet; an element may be several lines
        self._packed: list[bytes] = []

    def sample(self, labels: str, value: float) -> None:
        """Adds one line."""
        shown = value if type(value) is int else number(value)
        self.lines.append(f"{self.name}{{{labels}}} {shown}" if labels else f"{self.name} {shown}")

    def _totals(self, labels: str, count: int, total: float) -> None:
        where = f"{{{labels}}}" if labels else ""
        self.lines.append(f"{self.name}_count{where} {count}")
        self.lines.append(f"{self.name}_sum{where} {number(total)}")

    def histogram(
        self, labels: str, bounds: Sequence[float], cumulative: Sequence[int], count: int, total: float
    ) -> None:
        """Adds a histogram: `cumulative[i]` is the number of values at or below `bounds[i]`, `count` that of all."""
        self._totals(labels, count, total)
        head = f"{self.name}_bucket{{{labels}" + (',le="' if labels else 'le="')
        for bound, below in zip(_texts(tuple(bounds)), cumulative, strict=True):
            self.lines.append(f'{head}{bound}"}} {below}')
        self.lines.append(f'{head}+Inf"}} {count}')

    def summary(
        self, labels: str, quantiles: Sequence[tuple[float, float]], count: int, total: float
    ) -> None:
        """Adds a summary: (quantile, value) pairs, and the count and sum of all values."""
        self._totals(labels, count, total)
        head = f"{self.name}{{{labels}" + (',quantile="' if labels else 'quantile="')
        for quantile, value in quantiles:
            self.lines.append(f'{head}{number(quantile)}"}} {number(value)}')

    def pack(self, least: int = PACKED_LINES) -> None:
        """Joins the lines so far if there are at least `least` of them, so that less is left to do in render()."""
        if len(self.lines) >= least:
            self._packed.append(("\n".join(self.lines) + "\n").encode())
            self.lines.clear()

    def render(self) -> list[bytes]:
        """The family's part of the document, in pieces; [] when it has no samples."""
        self.pack(1)
        if not self._packed:
            return []
        head = f"# HELP {self.name} {_escape(self._help)}\n# TYPE {self.name} {self.kind}\n"
        return [head.encode(), *self._packed]
