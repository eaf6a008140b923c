"""The HTML page of a sweep: charts, tables of the same figures, recommendations. It has no script and loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files

from neptrio.sweep.advice import Advice, Point, Tuned, costs
from neptrio.sweep.chart import Series, chart

COLUMNS: tuple[tuple[str, Callable[[Point], str]], ...] = (
    ("rows per request", lambda p: str(p.batch)),
    ("concurrency", lambda p: str(p.concurrency)),
    ("requests", lambda p: f"{p.requests:,}"),
    ("requests/s", lambda p: f"{p.requests_per_s:,.1f}"),
    ("inferences/s", lambda p: f"{p.rows_per_s:,.1f}"),
    ("p50 ms", lambda p: f"{p.p50_ms:.3f}"),
    ("p90 ms", lambda p: f"{p.p90_ms:.3f}"),
    ("p99 ms", lambda p: f"{p.p99_ms:.3f}"),
    ("executions", lambda p: f"{p.executions:,}"),
    ("rows per execution", lambda p: f"{p.executed:.2f}"),
    ("queue us", lambda p: f"{p.queue_us:,.0f}"),
    ("compute us", lambda p: f"{p.compute_us:,.0f}"),
    ("cache hits", lambda p: f"{p.cache_hits:,}"),
    ("client CPU", lambda p: f"{100 * p.client_cpu:.0f} %"),
    ("machine CPU", lambda p: "-" if p.host_cpu is None else f"{100 * p.host_cpu:.0f} %"),
)


def notes(point: Point) -> str:
    """What is to be known about a point before its figures are believed; empty for most."""
    found = []
    if point.failures:
        found.append(f"{point.failures} failed: {point.failure}")
    if point.others > 0.01 * point.requests:
        found.append(f"{point.others} requests of other clients")
    if point.cache_hits:
        found.append("answered by the response cache")
    if point.client_bound:
        found.append("the clients were the limit")
    if not point.stable:
        found.append("not steady")
    return "; ".join(found)


def lines_of(points: Sequence[Point], value: Callable[[Point], float]) -> Series:
    """A line over the concurrency per size of request."""
    found: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        if point.requests:
            found.setdefault(str(point.batch), []).append((point.concurrency, value(point)))
    return {name: sorted(line) for name, line in found.items()}


def html(
    model: Tuned, version: str, points: Sequence[Point], advices: Sequence[Advice], how: Sequence[str]
) -> str:
    """The page. `how` are sentences about how it was measured."""
    style = (files("neptrio.sweep") / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    title = escape(f"{model.name}, version {version}" if version else model.name)
    return "".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Measured: {title}</title><style>{style}</style></head>\n<body><main><h1>{title}</h1>",
            *(f'<p class="muted">{escape(text)}</p>' for text in how),
            '<h2>Recommendations</h2><div class="cards">',
            *(_card(advice) for advice in advices),
            "</div>",
            _paste(advices),
            '<h2>Over the concurrency</h2><p class="muted">A line per number of rows in a request, which is written at '
            'its end.</p><div class="cards">',
            _figure("Inferences per second", "concurrency", lines_of(points, lambda p: p.rows_per_s)),
            _figure("Median latency, ms", "concurrency", lines_of(points, lambda p: p.p50_ms)),
            _figure("99th percentile of latency, ms", "concurrency", lines_of(points, lambda p: p.p99_ms)),
            _figure("Rows per execution", "concurrency", lines_of(points, lambda p: p.executed)),
            _figure("Time in the queue, us", "concurrency", lines_of(points, lambda p: p.queue_us)),
            "</div>",
            _costs(costs(points)),
            "<h2>All figures</h2>",
            _table(points),
            "</main></body></html>\n",
        )
    )


def config_lines(advices: Sequence[Advice]) -> list[str]:
    """The lines for config.pbtxt."""
    return [advice.config for advice in advices if advice.config]


def _card(advice: Advice) -> str:
    evidence = "".join(f"<li>{escape(text)}</li>" for text in advice.evidence)
    kind = "card change" if advice.config else "card"
    return (
        f'<section class="{kind}"><h3>{escape(advice.setting)}</h3><p>{escape(advice.text)}</p>'
        + (f"<ul>{evidence}</ul>" if evidence else "")
        + "</section>"
    )


def _paste(advices: Sequence[Advice]) -> str:
    lines = config_lines(advices)
    if not lines:
        return "<p>Nothing in config.pbtxt needs to change.</p>"
    return f"<p>For config.pbtxt, in place of what is there. Each was judged alone: measure again after a change.</p><pre>{escape(chr(10).join(lines))}</pre>"


def _figure(title: str, across: str, series: Series) -> str:
    return f"<figure><h3>{escape(title)}</h3>{chart(title, across, series)}</figure>"


def _costs(curve: dict[int, float]) -> str:
    if not curve:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{size}</th><td>{1e3 * cost:.4f}</td><td>{size / cost:,.1f}</td></tr>'
        for size, cost in curve.items()
    )
    return (
        '<h2>Over the rows of an execution</h2><p class="muted">As the server counted them, at every concurrency '
        'together.</p><div class="cards">'
        + _figure("An execution, ms", "rows", {"": [(size, 1e3 * cost) for size, cost in curve.items()]})
        + _figure("Rows per second of an instance", "rows", {"": [(s, s / c) for s, c in curve.items()]})
        + '</div><div class="scroll" role="region" aria-label="Cost of an execution" tabindex="0"><table><caption>Cost '
        'of an execution</caption><thead><tr><th scope="col">rows</th><th scope="col">ms</th><th scope="col">rows/s per '
        f"instance</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _table(points: Sequence[Point]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name, _ in COLUMNS)
    rows = "".join(
        "<tr>"
        + "".join(f"<td>{escape(show(point))}</td>" for _, show in COLUMNS)
        + f'<td class="text warn">{escape(notes(point))}</td></tr>'
        for point in points
    )
    return (
        '<div class="scroll" role="region" aria-label="All figures" tabindex="0"><table><caption>One row per point. '
        "Queue and compute are means per request, from the server's statistics.</caption>"
        f'<thead><tr>{head}<th scope="col">notes</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )
