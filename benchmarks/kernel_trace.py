"""The kernel's own trace of what threads do (root, tracefs), and how its lines are read."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TRACING = Path("/sys/kernel/tracing")
_LINE = re.compile(r"\[(?P<cpu>\d+)\] \S+ +(?P<at>[\d.]+): (?P<event>\w+): (?P<rest>.*)$")
SWITCH = re.compile(
    r"prev_pid=(?P<prev>\d+) .*prev_state=(?P<state>\S+) .*next_comm=(?P<comm>.*) next_pid=(?P<next>\d+) "
)


@dataclass(frozen=True)
class Event:
    """One line: on which processor, when (microseconds), what, and its details as the kernel prints them."""

    cpu: int
    at: float
    name: str
    details: str


def events(text: str) -> Iterator[Event]:
    """The events of a trace, in their order."""
    for line in text.splitlines():
        found = _LINE.search(line)
        if found is not None:
            yield Event(int(found["cpu"]), float(found["at"]) * 1e6, found["event"], found["rest"])


def require() -> None:
    """Ends the program if there is no tracefs."""
    if not (TRACING / "trace").exists():
        sys.exit(f"{TRACING} is not there: mount -t tracefs none {TRACING}, as root")


@contextmanager
def traced(wanted: Mapping[str, str], kilobytes: int = 60_000) -> Iterator[list[str]]:
    """Inside, the events of `wanted` that match their filters ("": all) are traced, in a buffer of so many kilobytes per
    processor. Afterwards the list holds the trace's text. Raises OSError where that is not permitted."""
    made: list[str] = []
    (TRACING / "tracing_on").write_text("0")
    (TRACING / "buffer_size_kb").write_text(str(kilobytes))
    (TRACING / "trace_clock").write_text("mono")
    (TRACING / "trace").write_text("")
    try:
        for event, condition in wanted.items():
            (TRACING / "events" / event / "filter").write_text(condition or "0")
            (TRACING / "events" / event / "enable").write_text("1")
        (TRACING / "tracing_on").write_text("1")
        yield made
        (TRACING / "tracing_on").write_text("0")
        made.append((TRACING / "trace").read_text(errors="replace"))
    finally:
        for event in wanted:
            (TRACING / "events" / event / "enable").write_text("0")
            (TRACING / "events" / event / "filter").write_text("0")
        (TRACING / "trace").write_text("")
