"""The `reshape` of an input or output: one shape for clients, another for the backend.

A client's tensor has `dims`; the backend sees `reshape.shape`. Both hold the same elements, so a
reshape is another view of the same memory. Variable dimensions correspond in order: the first -1
of one side is the first -1 of the other. Validation (config/validate_config.py) made sure that the
fixed dimensions between them multiply to the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neptrio.request.infer_request import InferRequest, Tensor

Shape = tuple[int, ...]


class Reshape:
    """Converts shapes from one configured form to the other; with `batching` the first dimension stays as it is."""

    def __init__(self, before: Sequence[int], after: Sequence[int], batching: bool) -> None:
        self._skip = 1 if batching else 0
        self._rank = len(before) + self._skip
        variable = [i for i, d in enumerate(before) if d < 0]
        steps: list[tuple[bool, int]] = []
        for d in after:
            steps.append((True, variable.pop(0) + self._skip) if d < 0 else (False, d))
        self._steps = steps

    def __call__(self, shape: Shape) -> Shape | None:
        """The converted shape, or None when `shape` does not have the configured number of dimensions."""
        if len(shape) != self._rank:
            return None
        return shape[: self._skip] + tuple(shape[d] if variable else d for variable, d in self._steps)


def of_inputs(config: Any) -> dict[str, Reshape]:
    """Input name -> the Reshape that turns a client's shape into the backend's."""
    batching = config.max_batch_size > 0
    return {i.name: Reshape(i.dims, i.reshape.shape, batching) for i in config.input if i.HasField("reshape")}


def undone_of_inputs(config: Any) -> dict[str, Reshape]:
    """Input name -> the Reshape that turns the backend's shape back into a client's."""
    batching = config.max_batch_size > 0
    return {i.name: Reshape(i.reshape.shape, i.dims, batching) for i in config.input if i.HasField("reshape")}


def of_outputs(config: Any) -> dict[str, Reshape]:
    """Output name -> the Reshape that turns the backend's shape into a client's."""
    batching = config.max_batch_size > 0
    return {
        o.name: Reshape(o.reshape.shape, o.dims, batching) for o in config.output if o.HasField("reshape")
    }


def reshape_inputs(request: InferRequest, reshapes: dict[str, Reshape]) -> None:
    """Gives a validated request's inputs the shapes that the backend expects, or those of its client again."""
    request.inputs = [_reshaped(tensor, reshapes) for tensor in request.inputs]


def output_reshaper(reshapes: dict[str, Reshape]) -> Any:
    """A function from a response's outputs to the same in clients' shapes, for ModelCore.reshape_outputs."""
    return lambda outputs: [_reshaped(tensor, reshapes) for tensor in outputs]


def _reshaped(tensor: Tensor, reshapes: dict[str, Reshape]) -> Tensor:
    reshape = reshapes.get(tensor.name)
    shape = reshape(tensor.shape) if reshape is not None else None
    if shape is None or shape == tensor.shape:
        return tensor
    made: Tensor = tensor.reshaped(shape)
    # an output whose shape is not the configured one passes unchanged
    return made if made.count() == tensor.count() else tensor
