"""The text a server prints when it starts: models and states, addresses, what was found."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

HEADS = ("Model", "Version", "State", "Reason")
REASON_WIDTH = 100


def table(rows: Iterable[Mapping[str, str]]) -> str:
    """Rows of the repository index as a table; long reasons continue on lines of their own."""
    cells: list[Sequence[str]] = []
    for row in rows:
        reason = []
        for text in row.get("reason", "").splitlines() or [""]:
            reason += textwrap.wrap(text, REASON_WIDTH, drop_whitespace=False) or [""]
        cells.append((row["name"], row.get("version", "-"), row.get("state", "not loaded"), reason[0]))
        cells += [("", "", "", more) for more in reason[1:] if more.strip()]
    widths = [max([len(c[i]) for c in cells] + [len(head)]) for i, head in enumerate(HEADS)]
    rule = "+" + "+".join("-" * (w + 2) for w in widths) + "+"

    def line(values: Sequence[str]) -> str:
        return "|" + "|".join(f" {v.ljust(w)} " for v, w in zip(values, widths, strict=True)) + "|"

    return "\n".join([rule, line(HEADS), rule, *map(line, cells), rule])


def address(sock_name: Sequence[object]) -> str:
    """host:port, with brackets around an IPv6 host."""
    host, port = sock_name[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
