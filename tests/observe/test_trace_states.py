"""A trace's state, event by event: every way through its table that a few events can take."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from neptrio.errors import Overloaded
from neptrio.execution.admission import Admission
from neptrio.execution.batch import complete
from neptrio.loop.loop_pass import LoopPass
from neptrio.observe import trace as trace_module
from neptrio.observe.counters import ModelCounters
from neptrio.observe.trace import Trace
from neptrio.observe.trace_options import TraceOptions
from neptrio.observe.tracer import Tracer
from neptrio.request.infer_request import InferRequest, InferResponse, ModelCore, Protocol, monotonic_ns
from tests.support.fronts import Answers, Directory

STATES = ("PASS", "TRANSPORT", "WORKER")
LONGEST = 4  # events of a walk
Cells = dict[tuple[str, str], set[str]]


def table() -> Cells:
    """(state, event) -> the states that may follow, as the module's docstring has it."""
    text = trace_module.__doc__ or ""
    lines = text.partition("    event               PASS")[2].partition("\n\n")[0].splitlines()[2:]
    cells: Cells = {}
    for line in lines:
        event, *row = re.split(r" {2,}", line.strip())
        assert len(row) == len(STATES), line
        for state, cell in zip(STATES, row, strict=True):
            cells[state, event] = set(cell.split(", ")) - {"-"}
    return cells


class Life:
    """One traced request, to which things happen."""

    def __init__(self, tracer: Tracer, loop_pass: LoopPass) -> None:
        directory = Directory()
        directory.latest["echo"].decoupled = True
        admission = Admission(directory, tracer)
        answers = Answers()
        answers.protocol = Protocol.HTTP_PROTOCOL
        self.loop_pass = loop_pass
        self.request = InferRequest()
        self.request.model_name, self.request.inputs = "echo", []
        admission.find(self.request, None)
        self.request.responder = answers
        admission.received(self.request, monotonic_ns())
        admission.submit(self.request)
        assert type(self.request.trace) is Trace
        self.trace: Trace = self.request.trace
        self.held = self.answers = 0
        self.final = self.given_up = False

    def may(self, event: str) -> bool:
        """Whether callers do that now. Everything but this may happen at any time."""
        if event == "release":
            return self.held > 0
        if event in ("answered", "answered final"):
            return not self.final
        if event in ("answered_by_front", "refused"):
            return not self.answers and not self.final
        return True

    def does(self, event: str) -> None:
        if event in ("answered", "answered final"):
            self.final = event != "answered"
            self.answers += 1
            complete(self.request, InferResponse([]), self.final)
        elif event == "flushed":
            self.loop_pass.end()
        elif event == "refused":
            self.final = True
            self.trace.refused(Overloaded("no"))
        elif event == "sent_one":
            self.trace.send_one()
            self.trace.sent_one()
        else:
            self.held += {"hold": 1, "release": -1}.get(event, 0)
            getattr(self.trace, event)()


@contextmanager
def tracing(folder: Path) -> Iterator[Callable[[], Life]]:
    loop_pass = LoopPass()
    tracer = Tracer(
        TraceOptions(file=str(folder / "traces"), level=("TIMESTAMPS",), rate="1"), loop_pass, None
    )
    try:
        yield lambda: Life(tracer, loop_pass)
    finally:
        trio.run(tracer.close)


def after(life: Life, way: tuple[str, ...]) -> Life:
    for event in way:
        life.does(event)
    return life


def test_every_cell_of_the_table(tmp_path: Path) -> None:
    """All ways of a few events are walked: each ends in a state of its cell, and each state of each cell is met."""
    cells = table()
    events = [event for state, event in cells if state == "PASS"]
    events.insert(1, "answered final")
    met: Cells = {}
    with tracing(tmp_path) as begin:
        ways: list[tuple[str, ...]] = [()]
        while ways:
            way = ways.pop()
            life = after(begin(), way)
            before = life.trace.state
            for event in filter(life.may, events):
                cell = (before, "answered" if event == "answered final" else event)
                if not cells[cell]:
                    continue
                life = after(begin(), (*way, event))
                then = life.trace.state
                assert then in cells[cell], (way, event, before, then)
                assert then != "CLOSED" or life.final, (way, event)
                met.setdefault(cell, set()).add(then)
                if len(way) + 1 < LONGEST and then != "CLOSED":
                    ways.append((*way, event))
    assert met == {cell: states for cell, states in cells.items() if states}


@pytest.mark.parametrize("state", STATES)
def test_a_part_that_was_abandoned_closes_with_its_final_answer(tmp_path: Path, state: str) -> None:
    before: dict[str, tuple[str, ...]] = {
        "PASS": (),
        "TRANSPORT": ("defer",),
        "WORKER": ("hold",),
    }
    with tracing(tmp_path) as begin:
        life = after(begin(), before[state])
        assert life.trace.state == state
        life.does("abandon")
        life.does("answered final")
        life.does("flushed")
        assert life.trace.state == "CLOSED"


def test_every_event_is_in_the_table() -> None:
    """What transports and the pass may call."""
    readers = {"activities", "context", "copy", "drop_tensors", "slow_or_failed", "text", "when_copied"}
    methods = {name for name in vars(Trace) if not name.startswith("_") and callable(getattr(Trace, name))}
    events = {event for _, event in table()}
    assert methods - readers - {"send_one"} == events - {"answered", "flushed"}


def test_a_refused_request_is_traced_with_the_model_that_refused_it(tmp_path: Path) -> None:
    """It is given back to the stand-in that it waited with, which has no version, and counts for all of them."""
    with tracing(tmp_path) as begin:
        life = begin()
        life.trace.refused(Overloaded("no"))
        life.request.model = ModelCore("stand-in", "")
        life.request.model.counters = ModelCounters()
        life.loop_pass.end()
    (row,) = json.loads((tmp_path / "traces").read_bytes())
    assert (row["model_name"], row["model_version"]) == ("echo", 1)
