"""The Prometheus text format, version 0.0.4: families of samples -> text.

Labels keep the order they are given in; the server's own are alphabetical, as scripts expect.
Source: the public description of the text exposition format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

Labels = Sequence[tuple[str, str]]


def number(value: float) -> str:
    """A sample value: whole numbers without a fraction, `+Inf`, `-Inf` and `NaN` by name."""
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


def _pairs(labels: Labels) -> str:
    return ",".join([key + '="' + _escape(value).replace('"', '\\"') + '"' for key, value in labels])


@dataclass
class Family:
    """One metric name: its help text, its kind and its samples, in the order they are printed."""

    name: str
    help: str
    kind: str  # counter, gauge, histogram, summary
    lines: list[str] = field(default_factory=list)

    def sample(self, labels: Labels, value: float, suffix: str = "") -> None:
        """One line."""
        where = f"{{{_pairs(labels)}}}" if labels else ""
        self.lines.append(f"{self.name}{suffix}{where} {number(value)}")

    def histogram(
        self, labels: Labels, bounds: Sequence[float], cumulative: Sequence[int], count: int, total: float
    ) -> None:
        """A histogram: `cumulative[i]` values at or below `bounds[i]`, `count` in all."""
        self.sample(labels, count, "_count")
        self.sample(labels, total, "_sum")
        # the bulk of a document, so the labels are put together once
        head = f"{self.name}_bucket{{{_pairs(labels)}" + (',le="' if labels else 'le="')
        for bound, below in zip(_texts(tuple(bounds)), cumulative, strict=True):
            self.lines.append(f'{head}{bound}"}} {below}')
        self.lines.append(f'{head}+Inf"}} {count}')

    def summary(
        self, labels: Labels, quantiles: Sequence[tuple[float, float]], count: int, total: float
    ) -> None:
        """A summary: (quantile, value) pairs, and the count and sum of everything."""
        self.sample(labels, count, "_count")
        self.sample(labels, total, "_sum")
        for quantile, value in quantiles:
            self.sample([*labels, ("quantile", number(quantile))], value)


def render(families: Iterable[Family]) -> bytes:
    """The document. Families without samples are left out."""
    parts: list[str] = []
    for family in families:
        if family.lines:
            parts.append(f"# HELP {family.name} {_escape(family.help)}")
            parts.append(f"# TYPE {family.name} {family.kind}")
            parts += family.lines
    return ("\n".join(parts) + "\n").encode() if parts else b""
