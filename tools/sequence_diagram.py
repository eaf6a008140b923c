"""Draws the life of a sequence in docs/sequences.md from its transition table, or checks that the drawing is current.

Usage: python tools/sequence_diagram.py [--check] [--page FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from neptrio.scheduling.sequence_transitions import EVENT_NAMES, GONE, STATE_NAMES, TRANSITIONS, WAITING

PAGE = Path(__file__).resolve().parent.parent / "docs" / "sequences.md"
BEGIN = "<!-- sequence diagram: begin, written by tools/sequence_diagram.py -->"
END = "<!-- sequence diagram: end -->"


def drawing() -> str:
    """A Mermaid state diagram, and the table with every row's actions."""
    arrows: dict[tuple[int, int], list[str]] = {}
    rows = []
    for (state, event), (following, actions) in sorted(TRANSITIONS.items()):
        arrows.setdefault((state, following), []).append(EVENT_NAMES[event])
        rows.append(
            f"| {STATE_NAMES[state]} | {EVENT_NAMES[event]} | {STATE_NAMES[following]} | {', '.join(actions)} |"
        )
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {STATE_NAMES[WAITING]}"]
    lines += [
        f"    {STATE_NAMES[state]} --> {STATE_NAMES[following]}: {', '.join(events)}"
        for (state, following), events in arrows.items()
    ]
    lines += [
        f"    {STATE_NAMES[GONE]} --> [*]",
        "```",
        "",
        "| in state | on | becomes | actions |",
        "|---|---|---|---|",
    ]
    return "\n".join(lines + rows)


def drawn(text: str) -> str:
    """The page's text with the drawing between its marks."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SystemExit(f"expected one line {BEGIN!r} and after it one line {END!r}")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{drawing()}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the page is not current"
    )
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    text = args.page.read_text(encoding="utf-8")
    current = drawn(text)
    if args.check:
        if current != text:
            print(f"{args.page} is not current: run python tools/sequence_diagram.py", file=sys.stderr)
        return int(current != text)
    args.page.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
