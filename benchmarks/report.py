"""Puts the last run's results into the README, between its benchmark marks.

    python -m benchmarks.report            rewrites README.md
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
        "core, the load generator on the other, medians of interleaved rounds, requests per second. "
        "Everything else is in [docs/performance.md](docs/performance.md).",
        "",
    ]
    return "\n".join(lines) + "\n" + "\n".join(HEADS[part] + found[part]["text"] for part in found)


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
        README.write_text(filled(README.read_text(), content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
