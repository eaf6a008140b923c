"""Throughput and latency over concurrency as SVG, drawn without a plotting library."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 360, 80, 50, 40
COLOURS = ("#0b6e4f", "#d1495b", "#00798c", "#edae49", "#5c4d7d")


def draw(cases: list[Any], found: dict[str, Any], names: list[str], folder: Path) -> None:
    """One file per title and quantity that has more than one concurrency."""
    folder.mkdir(parents=True, exist_ok=True)
    titles: dict[str, list[Any]] = {}
    for case in cases:
        if not case.latency:
            titles.setdefault(case.title, []).append(case)
    for title, group in titles.items():
        if len(group) < 2:
            continue
        for key, label in (("per_second", "requests per second"), ("p50_us", "median latency, us")):
            series = {}
            for name in names:
                points = [
                    (case.concurrency, statistics.median(r[key] for r in found[case.key][name]))
                    for case in group
                    if found.get(case.key, {}).get(name)
                ]
                if points:
                    series[name] = points
            if series:
                slug = "".join(c if c.isalnum() else "-" for c in title.lower())
                (folder / f"{slug}-{key}.svg").write_text(chart(f"{title}: {label}", series))


def chart(title: str, series: dict[str, list[tuple[float, float]]]) -> str:
    """A line chart, concurrency on a logarithmic axis."""
    top = max(y for points in series.values() for _, y in points) * 1.1 or 1.0
    xs = sorted({x for points in series.values() for x, _ in points})
    low, high = math.log2(xs[0]), max(math.log2(xs[-1]), math.log2(xs[0]) + 1)

    def px(x: float) -> float:
        return LEFT + (math.log2(x) - low) / (high - low) * (WIDTH - LEFT - 150)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - BOTTOM - TOP)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{title}</text>',
    ]
    for i in range(5):
        y = top * i / 4
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 150}" y1="{py(y):.1f}" y2="{py(y):.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 6}" y="{py(y) + 4:.1f}" text-anchor="end">{y:,.0f}</text>'
        )
    out += [f'<text x="{px(x):.1f}" y="{HEIGHT - 28}" text-anchor="middle">{x:g}</text>' for x in xs]
    out.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">concurrency</text>')
    for i, (name, points) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3" fill="{colour}"/>' for x, y in points]
        out.append(f'<text x="{WIDTH - 140}" y="{TOP + 18 * i}" fill="{colour}">{name}</text>')
    return "\n".join(out) + "\n</svg>\n"
