"""The sequence backend: outputs the running sum of each sequence's INT32 inputs.

The first output is the sum of the sequence's first input over its requests so far, element by element, or of all elements
where the configuration gives an input of several and an output of one. Other outputs are optional and show
what the batcher did: an output named like a control input returns that control, BATCH_SIZE is the number of requests
in the execution (null requests included) and POSITION the request's place in it; both are INT32. With an implicit
state configured (`state`) the sum is kept there, otherwise in the instance, by slot. Executing needs no GIL.

Parameters: `execute_delay_ms` makes every execution take that long; a request whose input begins with `fail_value`
fails; a request of an iterative sequence is rescheduled until it was executed `iterations` times; `creation_delay_sec` makes
every load take that long.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from typing import Any

from neptrio import datatypes
from neptrio.backends.accumulate import AccumulateBatch
from neptrio.backends.identity import creation_seconds
from neptrio.errors import InvalidArgument
from neptrio.execution.backend import Backend, BackendInstance, LoadContext
from neptrio.execution.batch import Batch
from neptrio.request.infer_request import InferRequest, InferResponse, Tensor

INT32 = datatypes.NUMBER["INT32"]
RESCHEDULE = 2


class SequenceBackend(Backend):
    """One loaded version of a model of this backend."""

    platform = "sequence"

    def __init__(self, context: LoadContext) -> None:
        super().__init__(context)
        config = context.config
        if config.WhichOneof("scheduling_choice") != "sequence_batching":
            raise InvalidArgument(f"model '{context.name}' of backend 'sequence' needs sequence_batching")
        if not config.input or not config.output:
            raise InvalidArgument(
                f"model '{context.name}' of backend 'sequence' needs an input and an output"
            )
        for tensor in (config.input[0], config.output[0]):
            if tensor.data_type != INT32:
                raise InvalidArgument(
                    f"'{tensor.name}' of model '{context.name}' must be TYPE_INT32, got "
                    f"{datatypes.CONFIG_NAME.get(tensor.data_type, 'none')}"
                )
        self.delay_ns = int(self._number("execute_delay_ms", 0) * 1e6)
        fail = self._number("fail_value", None)
        self.fail_value = None if fail is None else int(fail)
        self.iterations = int(self._number("iterations", 1))
        self.creation_seconds = creation_seconds(context)
        given, made = config.input[0].dims, config.output[0].dims
        self.whole = min(given, default=0) > 0 and math.prod(given) > 1 and all(n == 1 for n in made)

    def load(self) -> None:
        time.sleep(self.creation_seconds)

    @classmethod
    def examine(cls, context: LoadContext, report: Callable[[str], None]) -> None:
        cls(context)

    def _number(self, name: str, default: Any) -> Any:
        parameters = self.context.config.parameters
        if name not in parameters:
            return default
        text = parameters[name].string_value
        try:
            return float(text)
        except ValueError:
            raise InvalidArgument(
                f"parameter '{name}' of model '{self.context.name}' must be a number, got '{text}'"
            ) from None

    def create_instance(self, name: str, kind: str, device_id: int) -> BackendInstance:
        return SequenceInstance(self)


class SequenceInstance(BackendInstance):
    """Prepares batches of running sums on the trio thread."""

    native = True

    def __init__(self, backend: SequenceBackend) -> None:
        config = backend.context.config
        self._backend = backend
        self.expected_ns = float(backend.delay_ns)
        self._input = config.input[0].name
        self._output = config.output[0].name
        self._shows = [o.name for o in config.output[1:]]
        self._batched = config.max_batch_size > 0
        dims = tuple(config.output[0].dims)
        self._one = (1, *dims) if self._batched else dims  # the shape of a sum of all elements
        states = config.sequence_batching.state
        self._state_in = states[0].input_name if states else None
        self._state_out = states[0].output_name if states else ""
        self._sums: dict[int, bytearray] = {}  # slot -> sum, without an implicit state
        self._rounds: dict[int, int] = {}

    def prepare(self, batch: Batch) -> Batch:
        backend = self._backend
        made = AccumulateBatch.of(batch, backend.delay_ns, backend.fail_value)
        made.responses = [self._job(made, i, request) for i, request in enumerate(batch.requests)]
        return made

    def _job(self, batch: AccumulateBatch, i: int, request: InferRequest) -> InferResponse | None:
        tensor = request.input_named(self._input)
        assert tensor is not None  # every request was validated
        whole = self._backend.whole
        size = 4 if whole else tensor.nbytes
        output = bytearray(size)
        outputs = [Tensor(self._output, INT32, self._one if whole else tensor.shape, output)]
        if request.scheduler_data is None:  # a null request
            batch.job(i, tensor, None, output, output, whole)
            return InferResponse(outputs)
        slot = request.scheduler_data.slot
        before: Tensor | bytearray | None
        if self._state_in is None:
            sums = None if request.sequence_start else self._sums.get(slot)
            if sums is None or len(sums) < size:
                before, after = None, bytearray(size)
                self._sums[slot] = after
            else:
                before = after = sums
        else:
            state = before = request.input_named(self._state_in)
            assert state is not None  # the sequence batcher has added it
            after = bytearray(size)
            outputs.append(Tensor(self._state_out, INT32, state.shape, after))
        batch.job(i, tensor, before, after, output, whole)
        if backend_rounds := self._backend.iterations - 1:
            done = 0 if request.sequence_start else self._rounds.get(slot, 0)
            self._rounds[slot] = done + 1
            if done < backend_rounds:
                request.release_flags = RESCHEDULE
                return None
        outputs += [self._show(name, batch, i, request) for name in self._shows]
        return InferResponse(outputs)

    def _show(self, name: str, batch: Any, i: int, request: InferRequest) -> Tensor:
        if name in ("BATCH_SIZE", "POSITION"):
            value = len(batch.requests) if name == "BATCH_SIZE" else i
            return Tensor(name, INT32, (1, 1) if self._batched else (1,), struct.pack("<i", value))
        tensor = request.input_named(name)
        if tensor is None:
            raise InvalidArgument(f"there is no control input '{name}' to show")
        return tensor.renamed(name)

    def execute(self, batch: Batch) -> None:
        raise AssertionError("native instances do not execute in Python")
