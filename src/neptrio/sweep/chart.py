"""Line charts as inline SVG, coloured by the page's style sheet; the x axis is logarithmic, base 2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 260, 54, 44, 14, 40
COLOURS = 8
GAP = 12  # between labels, from one baseline to the next

Series = Mapping[str, Sequence[tuple[float, float]]]


def ticks(top: float, about: int = 4) -> list[float]:
    """Round numbers from 0 to at least `top`."""
    step = 10.0 ** math.floor(math.log10(max(top, 1e-9) / about))
    step *= next(m for m in (1, 2, 5, 10) if top / (step * m) <= about + 1e-9)
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


def short(value: float) -> str:
    """A number for an axis: 12k, 3.4M, 0.05."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:.3g}"


def spread(wanted: Mapping[str, float], top: float, bottom: float) -> dict[str, float]:
    """Heights for the labels in [top, bottom], in their order, GAP apart where there is room and each as near to the
    wanted one as its neighbours allow: labels too close share the height around their mean."""
    names = sorted(wanted, key=lambda name: wanted[name])
    gap = min(GAP, (bottom - top) / max(len(names) - 1, 1))
    groups: list[tuple[float, list[str]]] = []  # (height of the first label, labels)
    for name in names:
        first, group = wanted[name], [name]
        first = max(top, min(first, bottom))
        while groups and first < groups[-1][0] + gap * len(groups[-1][1]):
            group = groups.pop()[1] + group
            mean = sum(wanted[each] for each in group) / len(group)
            first = mean - gap * (len(group) - 1) / 2
            first = max(top, min(first, bottom - gap * (len(group) - 1)))
        groups.append((first, group))
    return {name: first + gap * at for first, group in groups for at, name in enumerate(group)}


def chart(title: str, across: str, series: Series) -> str:
    """One chart; `series` are points by the name that is written at the line's end."""
    points = [point for line in series.values() for point in line]
    xs = sorted({x for x, _ in points}) or [1.0]
    marks = ticks(max((y for _, y in points), default=1.0) or 1.0)
    low, high = math.log2(xs[0]), math.log2(xs[-1])

    def px(x: float) -> float:
        share = (math.log2(x) - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - y / marks[-1] * (HEIGHT - BOTTOM - TOP)

    out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for y in marks:
        out.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>'
            f'<text x="{LEFT - 6}" y="{py(y) + 4:.1f}" text-anchor="end">{short(y)}</text>'
        )
    out += [f'<text x="{px(x):.1f}" y="{HEIGHT - 22}" text-anchor="middle">{x:g}</text>' for x in xs]
    out.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 5}" text-anchor="end">{escape(across)}</text>')
    ends = spread({name: py(line[-1][1]) for name, line in series.items() if line}, TOP, HEIGHT - BOTTOM)
    for number, (name, line) in enumerate(series.items()):
        colour = f"s{number % COLOURS}"
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in line)
        out.append(f'<polyline class="{colour}" points="{path}"/>')
        out += [
            f'<circle class="{colour}" cx="{px(x):.1f}" cy="{py(y):.1f}" r="3"><title>{escape(name)} at {x:g}: {y:,.4g}'
            "</title></circle>"
            for x, y in line
        ]
        if line:
            out.append(
                f'<text class="label" x="{px(line[-1][0]) + 7:.1f}" y="{ends[name] + 4:.1f}">{escape(name)}</text>'
            )
    return "".join(out) + "</svg>"
