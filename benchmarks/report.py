"""Puts the last run's results into docs/benchmarks.md, and what has a target into the README.

    python -m benchmarks.report            rewrites docs/benchmarks.md and README.md between its marks
    python -m benchmarks.report --print    prints the text instead

Reads benchmarks/results/PART.json as `make bench` wrote them; parts that were not measured are left
out. The date and the class of the machine come from the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import run

README = run.ROOT / "README.md"
PAGE = run.ROOT / "docs" / "benchmarks.md"
TITLE = "# Benchmarks: the last run of `make bench`\n\n"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
HEADS = {
    "table": "",
    "open": "### Open loop at half of the saturation rate\n\n",
    "onnx": "### An ONNX model less its session's own time\n\n",
    "startup": "### Start-up\n\n",
    "scale": "### Scale\n\n",
}


def results(folder: Path, suffix: str = "") -> dict[str, Any]:
    """The parts that were measured."""
    found = {}
    for part in HEADS:
        path = folder / f"{part}{suffix}.json"
        if path.exists():
            found[part] = json.loads(path.read_text())
    return found


def text(found: dict[str, Any]) -> str:
    """Everything between the marks."""
    if not found:
        raise SystemExit("there are no results: run 'make bench' first")
    facts = next(iter(found.values()))["machine"]
    dates = sorted({part["machine"]["date"] for part in found.values()})
    lines = [
        f"Measured {' and '.join(dates)} with `make bench` on a virtual machine of {facts['cores']} cores "
        f"({facts['cpu']}, Linux {facts['kernel'].split('-')[0]}, Python {facts['python']}): servers on one "
        "core, the load generator on the other, medians of interleaved rounds, requests per second."
        "",
    ]
    return "\n".join(lines) + "\n" + "\n".join(HEADS[part] + found[part]["text"] for part in found)


def summary(content: str) -> str:
    """The page's first paragraph and, of its first table, the rows that have a target."""
    lines = content.split("\n")
    rows: list[str] = []
    for line in lines:
        if line.startswith("|"):
            rows.append(line)
        elif rows:
            break
    wanted = rows[:2] + [row for row in rows[2:] if row.split("|")[-2].strip()]
    missed = content.count("**missed**")
    note = (
        f"Everything that was measured, the {missed} missed targets included, is in "
        "[docs/benchmarks.md](docs/benchmarks.md); why in "
        "[docs/performance.md](docs/performance.md), and what was tried in [docs/performance-log.md](docs/performance-log.md)."
    )
    return "\n".join([lines[0], "", *wanted, "", note])


def filled(readme: str, content: str) -> str:
    """The README with `content` between its marks. Raises ValueError when they are missing."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(END) < readme.index(BEGIN):
        raise ValueError(f"the file must hold {BEGIN} and, below it, {END}, once each")
    head, rest = readme.split(BEGIN)
    return head + BEGIN + "\n" + content.rstrip("\n") + "\n" + END + rest.split(END)[1]


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", help="print instead of writing README.md")
    parser.add_argument("--unpinned", action="store_true", help="the results of --unpinned runs")
    options = parser.parse_args()
    content = text(results(run.RESULTS, "-unpinned" if options.unpinned else ""))
    if options.print:
        print(content)
    else:
        PAGE.write_text(TITLE + content.rstrip("\n") + "\n")
        README.write_text(filled(README.read_text(), summary(content)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
