"""The identity backend: each output is the input of the same position.

Outputs alias the inputs' memory; nothing is copied and the GIL is not needed. The parameter
`execute_delay_ms` makes every execution take that long, for testing schedulers.
"""

from __future__ import annotations

from collections.abc import Callable

from neptrio.backends.identity_batch import DelayBatch, IdentityBuilder
from neptrio.errors import InvalidArgument
from neptrio.execution.backend import Backend, BackendInstance, LoadContext
from neptrio.execution.batch import Batch


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
        return IdentityInstance(inputs, outputs, self.delay_ns)


class IdentityInstance(BackendInstance):
    """Makes the responses on the trio thread; only the delay runs on the instance's thread."""

    native = True
    batch_type = DelayBatch

    def __init__(self, inputs: list[str], outputs: list[str], delay_ns: int) -> None:
        self._builder = IdentityBuilder(list(zip(inputs, outputs, strict=False)), delay_ns)
        self.expected_ns = float(delay_ns)

    @property
    def prepare(self) -> Callable[[DelayBatch], Batch]:  # type: ignore[override]
        # every batch passes there: a call of a compiled method costs a fifth of one through Python
        return self._builder.prepare

    def execute(self, batch: Batch) -> None:
        raise AssertionError("native instances do not execute in Python")
