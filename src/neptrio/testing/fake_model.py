"""Models that do what the test says: answer, fail, take their time, hold, and keep records of what they were asked.

Rules:
 1. A script is a list of steps: each answers(), fails() ends one. Execution n does step n; the last one repeats.
 2. takes() and holds() belong to the step that follows. A script without a step answers zeros.
 3. A held execution waits for release(). When the server ends, or the test, every one is released; also when an error leaves
    the test while it is inside a context that waits for threads, which would wait for this model for ever.
 4. Times are those of the clock, so a jump ends a model's delay.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neptrio import datatypes
from neptrio.embedded.functions import FunctionModel
from neptrio.embedded.signature import Context, Tensors
from neptrio.testing.clock import Clock

Answer = Mapping[str, Any] | Callable[..., Mapping[str, Any]]
LOOK_SECONDS = 0.1
PATIENCE = 60.0  # seconds of real time that a test waits for its server, far more than it takes

JOINING = ("threading", "concurrent.futures.thread")  # modules whose join() and shutdown() wait for threads


@dataclass(frozen=True)
class Record:
    """What a model was asked in one execution."""

    inputs: dict[str, np.ndarray]
    request_id: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False


@dataclass
class _Step:
    answers: list[Answer] = field(default_factory=list)
    error: Exception | None = None
    seconds: float = 0
    holds: bool = False


class FakeModel:
    """A scripted model. For `TestServer` and the fixture `neptrio_serve`.

    `inputs`, `outputs`: name -> (datatype, shape), as for Server.function(); `decoupled`: answers() may give any number of
    responses; max_batch_size, batching, instances and config as for Server.function(). With max_batch_size the
    model is asked for whole batches, and records have no ids.
    """

    def __init__(
        self,
        inputs: Tensors,
        outputs: Tensors,
        name: str = "fake",
        decoupled: bool = False,
        *,
        max_batch_size: int = 0,
        batching: bool | Mapping[str, Any] = True,
        instances: int = 1,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.records: list[Record] = []
        self.clock = Clock()
        self.tester = 0  # the thread that runs the test
        self._decoupled = decoupled
        self._script: list[_Step] = []
        self._next = _Step()
        self._changed = threading.Condition()
        self._allowed = 0  # held executions that may go on
        self._over = False
        function: Callable[..., Any] = self._stream if decoupled else self._one
        if max_batch_size and not decoupled and batching is not False:
            function = self._batch
        self.model = FunctionModel(
            function,
            name=name,
            inputs=inputs,
            outputs=outputs,
            max_batch_size=max_batch_size,
            batching=batching,
            instances=instances,
            config=config,
        )

    # ---------------------------------------------------------------- the script

    def answers(self, *answers: Answer) -> FakeModel:
        """A step: a response with these outputs, or with what a function of the inputs (by name) returns.

        Of a decoupled model each is a response. Raises ValueError for more than one of another model.
        """
        if len(answers) != 1 and not self._decoupled:
            raise ValueError(
                f"model '{self.name}' gives one response; decoupled=True makes it give any number"
            )
        return self._add(answers=list(answers))

    def fails(self, error: Exception | str) -> FakeModel:
        """A step: the request fails with the error; text is an internal error. After the answers of a decoupled model."""
        return self._add(error=RuntimeError(error) if isinstance(error, str) else error)

    def takes(self, seconds: float) -> FakeModel:
        """The next step takes so long, of the clock's time."""
        self._next.seconds = seconds
        return self

    def holds(self) -> FakeModel:
        """The next step waits for release()."""
        self._next.holds = True
        return self

    def _add(self, **what: Any) -> FakeModel:
        with self._changed:
            self._script.append(_Step(seconds=self._next.seconds, holds=self._next.holds, **what))
            self._next = _Step()
        return self

    def release(self, executions: int = 1) -> None:
        """Lets so many held executions go on: those that wait, then later ones."""
        with self._changed:
            self._allowed += executions
            self._changed.notify_all()

    def release_all(self) -> None:
        """Lets all held executions go on, now and later, and ends delays. The kit does this when a test ends."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    # ---------------------------------------------------------------- the records

    def until_asked(self, times: int = 1) -> Record:
        """Waits until the model has begun `times` executions since it was made; returns that one's record.

        Raises TimeoutError after a minute of real time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.records) >= times, PATIENCE):
                raise TimeoutError(
                    f"model '{self.name}' was asked {len(self.records)} times, expected {times}"
                )
            return self.records[times - 1]

    # ---------------------------------------------------------------- execution, on the instances' threads

    def _one(self, context: Context, **inputs: Any) -> Any:
        return self._answer(self._begin(inputs, context), inputs)

    def _batch(self, **inputs: Any) -> Any:
        return self._answer(self._begin(inputs, None), inputs)

    def _stream(self, context: Context, **inputs: Any) -> Any:
        step = self._begin(inputs, context)
        for answer in step.answers:
            yield answer(**inputs) if callable(answer) else answer
        if step.error is not None:
            raise step.error

    def _begin(self, inputs: dict[str, Any], context: Context | None) -> _Step:
        """Records the execution, and waits as its step says."""
        record = Record(dict(inputs))
        if context is not None:
            record = Record(
                dict(inputs),
                context.request_id,
                context.parameters,
                context.sequence_id,
                context.sequence_start,
                context.sequence_end,
            )
        with self._changed:
            script = self._script or [_Step(seconds=self._next.seconds, holds=self._next.holds)]
            step = script[min(len(self.records), len(script) - 1)]
            self.records.append(record)
            self._changed.notify_all()
            if step.holds:
                while not self._over and self._allowed <= 0:
                    if not self._changed.wait(LOOK_SECONDS) and _fails(self.tester):
                        self._over = True  # rule 3
                self._allowed -= 1
            if step.seconds:
                self.clock.wait(self._changed, lambda: self._over, self.clock.now() + step.seconds)
        return step

    def _answer(self, step: _Step, inputs: dict[str, Any]) -> Any:
        if step.error is not None:
            raise step.error
        if not step.answers:
            rows = [len(next(iter(inputs.values())))] if self.model.batched and inputs else []
            return {
                spec.name: np.zeros(
                    (*rows, *(max(n, 1) for n in spec.shape)),
                    datatypes.NUMPY[spec.number],
                )
                for spec in self.model.signature.outputs
            }
        answer = step.answers[0]
        return answer(**inputs) if callable(answer) else answer


def _fails(thread: int) -> bool:
    """Whether an error is leaving that thread's code, and it waits for other threads on the way."""
    if sys._current_exceptions().get(thread) is None:
        return False
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name in ("join", "shutdown") and frame.f_globals.get("__name__") in JOINING:
            return True
        frame = frame.f_back
    return False
