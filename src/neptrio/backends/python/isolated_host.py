"""What an isolated model asks of the server over its socket: loads and unloads, metrics, its log.

The child asks and gets the answer there; its calls of other models cross on rings (process_session.py). For a model in the server's
process, neptrio.backends.python.in_process_host does the same.

Rules:
 1. Questions that must wait for the trio thread (load, unload, readiness) are answered from there. So the reader thread
    never waits, and no question takes a thread.
 2. What a child can have the server keep is counted: unanswered questions, metrics. Beyond the limit a question is
    answered with an error.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Sequence
from typing import Any

from neptrio.backends.python.in_process_host import Answer, Failure, InProcessHost, failure_of
from neptrio.backends.python.process import Process
from neptrio.errors import Unavailable
from neptrio.execution.model_host import ModelHost
from neptrio.rings.message import Violation
from neptrio.rings.ring import is_sealed

MOST_QUESTIONS = 1_000  # to the repository, at once
MOST_METRICS = 10_000  # families and metrics, which stay until the child lets go of them
# what a model may do with a metric of its own
CHANGES = ("increment", "set", "observe", "value")


class IsolatedHost:
    """Answers what an instance's child asks; it outlives a child and then serves the next."""

    def __init__(self, name: str, model_name: str, services: ModelHost) -> None:
        self._services = services
        self._host = InProcessHost(name, model_name, services)
        self._numbers = itertools.count(1)
        self._metrics: dict[int, Any] = {}
        self._questions: set[object] = set()  # that the trio thread has not answered

    def message(self, process: Process, message: dict[str, Any]) -> bool:
        """Handles a message that asks the server for something; returns False for another. Reader thread."""
        kind = message["t"]
        if kind == "log":
            self._host.log(message["level"], message["text"], message["file"], message["line"])
        elif kind == "ask":
            self._ask(process, message)
        elif kind == "forget":
            self._metrics.pop(message["id"], None)
        else:
            return False
        return True

    def forget(self) -> None:
        """Forgets the metrics of a child that has ended."""
        self._metrics.clear()

    def _ask(self, process: Process, message: dict[str, Any]) -> None:
        key = message["k"]
        question = object()  # a child may give several the same key

        def answer(value: Any, failure: Failure | None) -> None:
            self._questions.discard(question)
            process.post_message({"t": "reply", "k": key, "value": value, "failure": failure})

        try:
            if message["op"] not in ("load", "unload", "ready", "decoupled", "describe"):
                answer(self._asked_for(message), None)
            elif len(self._questions) >= MOST_QUESTIONS:
                raise Unavailable(f"{MOST_QUESTIONS} questions of this process are not answered yet")
            else:
                self._questions.add(question)
                self._ask_repository(process, message, answer)
        except Violation:
            raise
        except Exception as error:
            answer(None, failure_of(error))

    def _ask_repository(self, process: Process, message: dict[str, Any], answer: Answer) -> None:
        op, name = message["op"], message["name"]
        if op == "load":
            files = model_files(message["files"], message.get("descriptors", ()))
            self._host.ask_load(name, files, message["config"], answer)
        elif op == "unload":
            self._host.ask_unload(name, message["dependents"], answer)
        elif op == "describe":
            self._host.ask_described(message["subject"], name, message["version"], answer)
        elif op == "decoupled":
            self._host.ask_decoupled(name, message["version"], answer)
        else:
            self._host.ask_ready(name, message["version"], answer)

    def _asked_for(self, message: dict[str, Any]) -> Any:
        op = message["op"]
        if op == "change":
            if message["method"] not in CHANGES:
                raise Violation(f"a metric has no '{message['method']}'")
            return getattr(self._metrics[message["id"]], message["method"])(*message["args"])
        if len(self._metrics) >= MOST_METRICS:
            raise Unavailable(f"a process has at most {MOST_METRICS} metrics and families of them")
        if op == "family":
            made = self._host.metric_family(*message["args"])
        else:
            made = self._metrics[message["id"]].Metric(*message["args"])
        id = next(self._numbers)
        self._metrics[id] = made
        return id


def model_files(rows: Any, descriptors: Sequence[int]) -> dict[str, bytes]:
    """The files of a model, whose (name, size) are `rows`: they lie one behind the other in memory that came along.

    Raises Violation, or what rows that are none make Python raise.
    """
    sizes = [(name, size) for name, size in rows if type(name) is str and type(size) is int and size >= 0]
    total = sum(size for _, size in sizes)
    if len(sizes) != len(rows) or len(descriptors) != bool(total):
        raise Violation("files that cannot be")
    if not total:
        return {name: b"" for name, _ in sizes}
    if not is_sealed(descriptors[0], total):
        raise Violation("files in memory that is not sealed or too small")
    with mmap.mmap(descriptors[0], total, prot=mmap.PROT_READ) as mapped:
        return {name: mapped.read(size) for name, size in sizes}
