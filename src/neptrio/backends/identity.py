"""The identity backend: each output is the input of the same position.

Outputs alias the inputs' memory; nothing is copied and the GIL is not needed. The parameter
`execute_delay_ms` makes every execution take that long, for testing schedulers, and `creation_delay_sec` every load. The
output of an optional input that a request leaves out is zeros, as of a Triton server's test backend of this name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from neptrio import datatypes
from neptrio.backends.identity_batch import DelayBatch, IdentityBuilder
from neptrio.errors import InvalidArgument
from neptrio.execution.backend import Backend, BackendInstance, LoadContext
from neptrio.execution.batch import Batch
from neptrio.request.infer_request import Tensor


class IdentityBackend(Backend):
    """One loaded version of an identity model."""

    platform = "identity"

    def __init__(self, context: LoadContext) -> None:
        super().__init__(context)
        parameters = context.config.parameters
        text = (
            parameters["execute_delay_ms"].string_value if "execute_delay_ms" in parameters else ""
        ) or "0"
        try:
            self.delay_ns = int(float(text) * 1e6)
        except ValueError:
            raise InvalidArgument(
                f"parameter 'execute_delay_ms' of model '{context.name}' must be a number, got '{text}'"
            ) from None
        self.creation_seconds = creation_seconds(context)

    def load(self) -> None:
        time.sleep(self.creation_seconds)

    @classmethod
    def examine(cls, context: LoadContext, report: Callable[[str], None]) -> None:
        cls(context).create_instance("check", "CPU", 0)

    def create_instance(self, name: str, kind: str, device_id: int) -> BackendInstance:
        outputs = [o.name for o in self.context.config.output]
        inputs = [i.name for i in self.context.config.input]
        if len(outputs) > len(inputs):
            raise InvalidArgument(
                f"model '{self.context.name}' has {len(outputs)} outputs but only {len(inputs)} inputs to "
                "copy them from"
            )
        return IdentityInstance(inputs, outputs, self.delay_ns, self._absent())

    def _absent(self) -> list[Callable[[int], Tensor] | None]:
        """For each output with an optional input: what makes its zeros for a batch size."""
        config = self.context.config

        def zeros(output: Any) -> Callable[[int], Tensor]:
            dims = tuple(1 if d < 0 else d for d in output.dims)
            empty = datatypes.ITEM_SIZE[output.data_type] or 4  # a BYTES element without bytes is its length

            def make(rows: int) -> Tensor:
                shape = (rows, *dims) if config.max_batch_size else dims
                return Tensor(output.name, output.data_type, shape, bytes(empty * math.prod(shape)))

            return make

        pairs = zip(config.input, config.output, strict=False)
        return [zeros(output) if given.optional else None for given, output in pairs]


def creation_seconds(context: LoadContext) -> float:
    """The parameter `creation_delay_sec` of a model. Raises InvalidArgument."""
    parameters = context.config.parameters
    text = parameters["creation_delay_sec"].string_value if "creation_delay_sec" in parameters else "0"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise InvalidArgument(
            f"parameter 'creation_delay_sec' of model '{context.name}' must be a number of seconds, got '{text}'"
        )
    return seconds


class IdentityInstance(BackendInstance):
    """Makes the responses on the trio thread; only the delay runs on the instance's thread."""

    native = True
    batch_type = DelayBatch

    def __init__(
        self,
        inputs: list[str],
        outputs: list[str],
        delay_ns: int,
        absent: list[Callable[[int], Tensor] | None],
    ) -> None:
        self._builder = IdentityBuilder(list(zip(inputs, outputs, strict=False)), delay_ns, absent)
        self.expected_ns = float(delay_ns)

    @property
    def prepare(self) -> Callable[[DelayBatch], Batch]:  # type: ignore[override]
        # every batch passes there: a call of a compiled method costs a fifth of one through Python
        return self._builder.prepare

    def execute(self, batch: Batch) -> None:
        raise AssertionError("native instances do not execute in Python")
