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


def bars(title: str, rows: dict[str, dict[str, float]]) -> str:
    """Rows of horizontal bars, one for each name in a row, on a logarithmic axis."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    values = [value for row in rows.values() for value in row.values()] or [1.0]
    low, high = math.floor(math.log10(max(min(values), 1e-3))), math.ceil(math.log10(max(max(values), 2e-3)))
    left, thick = 220, 12
    tall = thick * len(names) + 10
    height = 70 + tall * len(rows)

    def px(value: float) -> float:
        at = (math.log10(max(value, 1e-3)) - low) / max(high - low, 1)
        return left + at * (WIDTH - left - 60)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{title}</text>',
    ]
    for i, name in enumerate(names):
        out.append(f'<text x="{left + 150 * i}" y="38" fill="{COLOURS[i % len(COLOURS)]}">{name}</text>')
    for power in range(low, high + 1):
        x = px(10.0**power)
        out.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="46" y2="{height - 18}" stroke="#ddd"/>'
            f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">{10.0**power:g}</text>'
        )
    for i, (label, row) in enumerate(rows.items()):
        y = 50 + tall * i
        out.append(f'<text x="{left - 8}" y="{y + tall / 2 + 2:.1f}" text-anchor="end">{label}</text>')
        for j, name in enumerate(names):
            if name in row:
                end, at = px(row[name]), y + thick * j
                colour = COLOURS[j % len(COLOURS)]
                out.append(
                    f'<rect x="{left}" y="{at}" width="{end - left:.1f}" height="{thick - 2}" fill="{colour}"/>'
                    f'<text x="{end + 4:.1f}" y="{at + 9}">{row[name]:.1f}</text>'
                )
    return "\n".join(out) + "\n</svg>\n"
