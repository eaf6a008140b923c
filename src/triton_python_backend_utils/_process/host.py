"""What the model of a process may ask of the server: inferences over the rings, the rest over the socket."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _host
from .._errors import TritonModelException
from . import kinds
from .reserved import sealed_memory

if TYPE_CHECKING:
    from .ring_child import RingChild


class _Handle:
    """A call to another model under way."""

    def __init__(self, child: RingChild, key: int) -> None:
        self._child = child
        self._key = key

    def took(self, response: Any) -> None:
        self._child.took(self._key)

    def cancel(self) -> None:
        self._child.end.post(kinds.CALL_CANCEL, self._key)

    def drop(self) -> None:
        self._child.end.post(kinds.CALL_CANCEL, self._key, 1)


class ChildHost(_host.Host):
    """See the module's text."""

    def __init__(self, child: RingChild) -> None:
        super().__init__()
        self._child = child
        self._begun: deque[tuple[int, int]] = deque(maxlen=64)  # executions: batch's number, when it was

    def _caller(self) -> RingChild:
        """The process, which has rings for calls. Raises TritonModelException where it has none."""
        if self._child.end is None:
            raise TritonModelException(
                "auto_complete_config() cannot send requests to other models: they are for initialize(), execute() and finalize()"
            )
        return self._child

    def infer(self, request: Any, decoupled: bool, deliver: Any, blocking: bool) -> Any:
        child = self._caller()
        key = next(child.numbers)
        trace = request._trace
        main = threading.get_ident() == child.main
        waits = blocking and main and child.loop is None
        if decoupled:
            child.decoupled_calls.add(key)
        child.calls[key] = deliver
        try:
            child.end.call(
                key,
                request,
                decoupled,
                waits,
                trace._key if trace is not None else None,
                child.batch if main and child.batch else 0,
            )
        except BaseException:
            child.calls.pop(key, None)
            child.decoupled_calls.discard(key)
            raise
        return _Handle(child, key)

    def infer_here(self, request: Any) -> Any:
        child = self._caller()
        if child.loop is not None or threading.get_ident() != child.main:
            return NotImplemented
        key = next(child.numbers)
        trace = request._trace
        child.end.call(key, request, False, True, None if trace is None else trace._key, child.batch or 0)
        return child.answer(key)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        made = self._child.end.empty(shape, dtype)
        return np.empty(shape, dtype) if made is None else made

    def log(self, level: int, message: str, file: str, line: int) -> None:
        self._child.send({"t": "log", "level": level, "text": message, "file": file, "line": line})

    def holds_memory(self, rows: list[tuple[str, int, int]]) -> None:
        self._child.send({"t": "memory", "rows": rows})

    def response_measured(self, place: int, outcome: int, computing_ns: int, output_ns: int) -> None:
        self._child.end.report(place, outcome, computing_ns, output_ns)

    def activity_reported(self, key: int, ns: int, name: str) -> None:
        self._child.end.activity(key, ns, name)

    def stated(self, request: tuple[int, ...]) -> None:
        self._child.end.state([request], [])

    def execution_begins(self) -> None:
        self._begun.append((self._child.batch or 0, time.monotonic_ns()))

    def execution_measured(self, execution: tuple[int, ...]) -> None:
        self._child.end.state([], [self._of_batch(execution)])

    def _of_batch(self, execution: tuple[int, ...]) -> tuple[int, ...]:
        """An execution behind its batch's number: the last that had begun when it did. 0: nobody knows."""
        for number, ns in reversed(self._begun):
            if ns <= execution[1]:
                return number, *execution
        return 0, *execution

    def stated_with_answers(self, requests: list[tuple[int, ...]], executions: list[tuple[int, ...]]) -> None:
        self._child.end.stated = requests, [self._of_batch(each) for each in executions]

    def answer_first(self, count: int, responses: Any) -> None:
        self._child.answer_first(count, responses)

    def acquire_initialize_lock(self) -> None:
        self._child.ask({"op": "initialize lock"})

    def load_model(self, name: str, files: dict[str, bytes], config: str) -> None:
        asked: dict[str, Any] = {"op": "load", "name": name, "config": config}
        asked["files"] = [[key, len(data)] for key, data in files.items()]
        size = sum(map(len, files.values()))
        if not size:
            self._child.ask(asked)
            return
        memory = sealed_memory("model-files", size)
        try:
            with mmap.mmap(memory, size) as mapped:
                for data in files.values():
                    mapped.write(data)
            self._child.ask(asked, [memory])
        finally:
            os.close(memory)

    def unload_model(self, name: str, unload_dependents: bool) -> None:
        self._child.ask({"op": "unload", "name": name, "dependents": unload_dependents})

    def is_model_ready(self, name: str, version: str) -> bool:
        return bool(self._child.ask({"op": "ready", "name": name, "version": version}))

    def described(self, subject: str, name: str, version: str) -> tuple[int, str]:
        code, text = self._child.ask({"op": "describe", "subject": subject, "name": name, "version": version})
        return code, text

    def is_model_decoupled(self, name: str, version: str) -> bool:
        return bool(self._child.ask({"op": "decoupled", "name": name, "version": version}))

    def metric_family(self, name: str, description: str, kind: int) -> Any:
        return _Metric(self._child, self._child.ask({"op": "family", "args": [name, description, kind]}))


class _Metric:
    """A family or metric that lives in the server."""

    def __init__(self, child: RingChild, id: int) -> None:
        self._child = child
        self._id = id

    def Metric(self, labels: dict[str, str], buckets: Any) -> _Metric:
        return _Metric(
            self._child, self._child.ask({"op": "metric", "id": self._id, "args": [labels, buckets]})
        )

    def _change(self, name: str, *args: float) -> Any:
        return self._child.ask({"op": "change", "id": self._id, "method": name, "args": list(args)})

    def increment(self, value: float) -> None:
        self._change("increment", value)

    def set(self, value: float) -> None:
        self._change("set", value)

    def observe(self, value: float) -> None:
        self._change("observe", value)

    def value(self) -> float:
        return float(self._change("value"))

    def __del__(self) -> None:
        self._child.finished.put(-self._id)
