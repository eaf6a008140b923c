"""Builds a batch's tensors from its requests' tensors, and splits its outputs into their responses.

A backend that wants whole-batch tensors makes one Layout per model and calls inputs() and
respond() for each batch. Source: docs/protocol/features.md A4 (allow_ragged_batch, batch_input,
batch_output).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from neptrio.errors import Internal, InvalidArgument, Reason
from neptrio.execution.batch import Batch
from neptrio.execution.gather import gather, split
from neptrio.request.infer_request import InferRequest, InferResponse, Tensor

(
    ELEMENT_COUNT,
    ACCUMULATED,
    ACCUMULATED_WITH_ZERO,
    MAX_ELEMENT_COUNT_AS_SHAPE,
    ITEM_SHAPE,
    ITEM_SHAPE_FLATTEN,
) = range(6)


INT32 = 8
FP32 = 11


class Layout:
    """The rules of one model's batches. Raises InvalidArgument for a configuration that contradicts itself."""

    def __init__(self, config: Any) -> None:
        self._name = config.name
        self._batching = config.max_batch_size > 0
        self._inputs = [(i.name, i.allow_ragged_batch and self._batching) for i in config.input]
        names = {name for name, _ in self._inputs}
        self._batch_inputs: list[tuple[int, list[str], str, np.dtype[Any]]] = []
        self._scattered: dict[str, str] = {}
        for extra in config.batch_input:
            sources, targets = list(extra.source_input), list(extra.target_name)
            self._known("batch_input", sources, names)
            if extra.data_type not in (INT32, FP32):
                raise InvalidArgument(
                    f"batch_input {targets} of model '{config.name}' must be TYPE_INT32 or TYPE_FP32"
                )
            if len(sources) != 1 or not targets:
                raise InvalidArgument(
                    f"batch_input {targets} of model '{config.name}' needs one source_input and a target_name"
                )
            for target in targets:
                dtype = np.dtype(np.int32 if extra.data_type == INT32 else np.float32)
                self._batch_inputs.append((extra.kind, sources, target, dtype))
        for back in config.batch_output:
            sources, targets = list(back.source_input), list(back.target_name)
            self._known("batch_output", sources, names)
            if len(sources) != 1:
                raise InvalidArgument(
                    f"batch_output {targets} of model '{config.name}' needs one source_input"
                )
            for target in targets:
                self._scattered[target] = sources[0]

    def _known(self, field: str, sources: list[str], names: set[str]) -> None:
        for source in sources:
            if source not in names:
                raise InvalidArgument(
                    f"{field} of model '{self._name}' names source_input '{source}', which is no input of it"
                )

    def inputs(self, batch: Batch) -> list[Tensor]:
        """The batch's tensors: the inputs that are present, in the order of the configuration, then the batch inputs.

        The input of a lone request is that request's own memory; inputs of several requests are copied once.
        """
        requests = batch.requests
        found = [
            tensor for name, ragged in self._inputs if (tensor := gather(requests, name, ragged)) is not None
        ]
        for kind, sources, target, dtype in self._batch_inputs:
            array = _batch_input(kind, requests, sources[0]).astype(dtype)
            number = INT32 if dtype == np.int32 else FP32
            found.append(
                Tensor(target, number, array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            )
        return found

    def respond(self, batch: Batch, outputs: list[Tensor]) -> None:
        """Sets each request's response to its part of the outputs (views, no copy).

        Raises Internal when an output cannot be divided among the requests.
        """
        requests = batch.requests
        if len(requests) == 1 and not self._scattered:
            batch.responses[0] = InferResponse(outputs)
            return
        shares: list[list[Tensor]] = [[] for _ in requests]
        for tensor in outputs:
            for share, part in zip(
                shares, split(tensor, self._shapes(requests, tensor), self._what()), strict=True
            ):
                share.append(part)
        for i, share in enumerate(shares):
            batch.responses[i] = InferResponse(share)

    def _what(self) -> str:
        return f"model '{self._name}'"

    def _shapes(self, requests: list[InferRequest], tensor: Tensor) -> list[tuple[int, ...]]:
        source = self._scattered.get(tensor.name)
        if source is not None:
            shapes = []
            for request in requests:
                origin = request.input_named(source)
                if origin is None:
                    raise Internal(
                        f"output '{tensor.name}' of {self._what()} takes its shape from input '{source}', "
                        "which a request did not bring",
                        reason=Reason.BACKEND,
                    )
                shapes.append(origin.shape)
            return shapes
        total = sum(request.batch_size for request in requests)
        if not tensor.shape or tensor.shape[0] != total:
            raise Internal(
                f"{self._what()} returned output '{tensor.name}' with shape {list(tensor.shape)} for a batch of "
                f"{total}: the first dimension must be the batch",
                reason=Reason.BACKEND,
            )
        return [(request.batch_size, *tensor.shape[1:]) for request in requests]


def _batch_input(kind: int, requests: list[InferRequest], source: str) -> np.ndarray:
    """The values of one batch input, before conversion to its data type."""
    tensors = [request.input_named(source) for request in requests]
    counts = np.array([0 if t is None else t.count() for t in tensors], dtype=np.int64)
    if kind == ELEMENT_COUNT:
        return counts
    if kind == ACCUMULATED:
        return np.cumsum(counts)
    if kind == ACCUMULATED_WITH_ZERO:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    if kind == MAX_ELEMENT_COUNT_AS_SHAPE:
        return np.zeros(int(counts.max(initial=0)), np.int64)
    rows = [t.shape[1:] for t in tensors if t is not None for _ in range(t.shape[0])]
    if kind == ITEM_SHAPE_FLATTEN:
        return np.array([d for row in rows for d in row], dtype=np.int64)
    if len({len(row) for row in rows}) > 1:
        raise InvalidArgument(f"input '{source}' has different ranks in one batch")
    return np.array(rows, dtype=np.int64)
