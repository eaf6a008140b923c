"""Puts the last run's results into docs/benchmarks.md, and six rows of them into the README.

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
from benchmarks.peers import PACKAGES
from neptrio import __version__

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


# the README's rows: section of the page, what ran on this server, case, concurrency. The same program in both servers
# comes first; what ours has built in is named so, because a Triton server has no counterpart of it.
SAME, BUILT_IN = "the same model.py", "built into this server"
LEADING = (
    ("### The same model.py in both servers", SAME, "HTTP binary", "32"),
    ("### The same model.py in both servers", SAME, "HTTP JSON", "32"),
    ("### The same model.py in both servers", SAME, "gRPC unary, one channel", "32"),
    ("### The same model.py in both servers", SAME, "dynamic batching, gRPC", "32"),
    ("### Kernel and built-in models", BUILT_IN, "HTTP binary", "32"),
    ("### Kernel and built-in models", BUILT_IN, "median latency, HTTP binary", "1"),
)


def summary(content: str) -> str:
    """What the README says of the page: when and where it was measured, which versions, and the rows of LEADING."""
    rows = [
        "| model here | case | requests at a time | neptrio | tritonserver | |",
        "|---|---|---|---|---|---|",
    ]
    for title, model, case, concurrency in LEADING:
        ours, theirs, ratio = _row(content, title, case, concurrency)
        unit = "" if ours.endswith("us") else "/s"
        factor = f"{float(ratio):.1f} times" if unit else f"{1 / float(ratio):.1f} times shorter"
        rows.append(f"| {model} | {case} | {concurrency} | {ours}{unit} | {theirs}{unit} | {factor} |")
    measured = next(line for line in content.split("\n") if line.startswith("Measured "))
    triton = PACKAGES["tritonserver"][0].replace("==", " ")
    return "\n".join(
        [
            f"{measured} neptrio {__version__}; the tritonserver that {triton} ships, with a Python model in every row.",
            "",
            *rows,
            "",
            f'The models add and subtract 16 integers. "{BUILT_IN}" is that sum as compiled code: what the server itself can '
            "do, not what your Python model would. Every row, and other servers: "
            "[docs/benchmarks.md](docs/benchmarks.md). How it was measured: [docs/performance.md](docs/performance.md#how-to-measure).",
        ]
    )


def _row(content: str, title: str, case: str, concurrency: str) -> list[str]:
    """A row's figures of both servers and their ratio. Raises ValueError when the page has no such row."""
    section = content.partition(title)[2].partition("\n### ")[0]
    for line in section.split("\n"):
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 6 and cells[1:3] == [case, concurrency]:
            return cells[3:6]
    raise ValueError(f"there is no row '{case}', {concurrency} at a time, below '{title}'")


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
