"""The tensors that the server adds to a sequence's requests: controls, and the inputs of null requests.

A model has few distinct control tensors (START, END and READY are each true or false), so they are made once and
shared by all requests; a sequence's CORRID is made once per sequence. They are never written to after that.
Source: docs/protocol/rules.md E1.9 and E1.11, docs/protocol/observed.md 8.
"""

from __future__ import annotations

import struct
from typing import Any

from neptrio import datatypes
from neptrio.codec.text import text_bytes
from neptrio.config.sequence_config import CORRID, END, READY, START, Control, SequenceConfig
from neptrio.errors import InvalidArgument
from neptrio.limits import shown
from neptrio.request.infer_request import InferRequest, ModelCore, Responder, Tensor

_INTEGER_BYTES = {
    datatypes.NUMBER[name]: size for name, size in (("INT32", 4), ("UINT32", 4), ("INT64", 8), ("UINT64", 8))
}


def corrid_bytes(sequence_id: int | str, dtype: int) -> bytes:
    """The bytes of a CORRID element: the low bytes of an integer id, or a string with its length in front."""
    if dtype == datatypes.BYTES:
        text = text_bytes(sequence_id) if isinstance(sequence_id, str) else b""
        return struct.pack("<I", len(text)) + text
    size = _INTEGER_BYTES[dtype]
    value = sequence_id if isinstance(sequence_id, int) else 0
    return (value & ((1 << (8 * size)) - 1)).to_bytes(size, "little")


class Controls:
    """Makes the control tensors of one model and adds them to requests."""

    def __init__(self, config: SequenceConfig) -> None:
        self._shape = (1, 1) if config.max_batch_size > 0 else (1,)
        flags = [c for c in config.controls if c.kind != CORRID]
        self._corrid: Control | None = next((c for c in config.controls if c.kind == CORRID), None)
        self.names = frozenset(c.name for c in config.controls)
        # index: START + 2 * END; the last entry is for null requests
        self._flags = [
            [self._flag(c, {START: start, END: end, READY: 1}[c.kind]) for c in flags]
            for end in (0, 1)
            for start in (0, 1)
        ]
        self.null = [self._flag(c, 0) for c in flags]
        if self._corrid is not None:
            self.null.append(self._corrid_tensor(0))

    def _flag(self, control: Control, value: int) -> Tensor:
        code = {"INT32": "<i", "FP32": "<f", "BOOL": "<?"}[datatypes.NAME[control.dtype]]
        return Tensor(control.name, control.dtype, self._shape, struct.pack(code, control.false_true[value]))

    def _corrid_tensor(self, sequence_id: int | str) -> Tensor:
        assert self._corrid is not None
        data = corrid_bytes(sequence_id, self._corrid.dtype)
        return Tensor(self._corrid.name, self._corrid.dtype, self._shape, data)

    def id_of(self, number: int) -> int | str:
        """The id that the server gives to sequence `number` of its own: a string where ids must be strings."""
        text = self._corrid is not None and self._corrid.dtype == datatypes.BYTES
        return str(number) if text else number

    def distinct(self, sequence_id: int | str) -> int | str:
        """What a model that is given the id can tell it by: an integer cut to CORRID's size, otherwise the id."""
        if self._corrid is None or isinstance(sequence_id, str):
            return sequence_id
        return sequence_id & ((1 << (8 * _INTEGER_BYTES[self._corrid.dtype])) - 1)

    def check_id(self, request: InferRequest) -> None:
        """Raises InvalidArgument when the id's type differs from CORRID's; without CORRID any type will do."""
        corrid = self._corrid
        if corrid is not None and isinstance(request.sequence_id, str) != (corrid.dtype == datatypes.BYTES):
            got = "BYTES" if isinstance(request.sequence_id, str) else "UINT64"
            raise InvalidArgument(
                f"[request id: {shown(request.id) or '<id_unknown>'}] sequence batching control '{corrid.name}' data-type "
                f"is '{got}', but model '{request.model.name}' expects '{datatypes.NAME[corrid.dtype]}'"
            )

    def attach(self, request: InferRequest, sequence: Any) -> None:
        """Adds the controls of a request that is about to be executed."""
        request.inputs += self._flags[request.sequence_start + 2 * request.sequence_end]
        if self._corrid is not None:
            if sequence.corrid is None:
                sequence.corrid = self._corrid_tensor(request.sequence_id)
            request.inputs.append(sequence.corrid)


def same_inputs(a: InferRequest, b: InferRequest, ragged: frozenset[str]) -> bool:
    """True when two requests fit into one batch: same inputs, same shapes (except those of `ragged` inputs)."""
    mine, other = a.inputs, b.inputs
    if len(mine) == len(other):
        for x, y in zip(mine, other, strict=True):
            if x.name != y.name or (x.shape != y.shape and x.name not in ragged):
                break
        else:
            return True
    return _signature(a, ragged) == _signature(b, ragged)


def _signature(request: InferRequest, ragged: frozenset[str]) -> dict[str, Any]:
    return {t.name: () if t.name in ragged else t.shape for t in request.inputs}


class _Nobody(Responder):
    """The responder of null requests: drops the response. `open` counts null requests under way."""

    def __init__(self) -> None:
        self.open = 0

    def respond(self, request: InferRequest, response: Any, final: bool) -> None:
        self.open -= final


class NullRequests:
    """Makes null requests, which fill empty slots: READY=0, and zeros in the shapes of a real request's inputs.

    They are executed like others, but only the batch size counts them (E1.9).
    """

    def __init__(self, model: ModelCore, controls: Controls) -> None:
        self._model = model
        self._controls = controls
        self._zeros: dict[tuple[str, int, tuple[int, ...]], Tensor] = {}
        self._nobody = _Nobody()
        self.made = 0

    @property
    def open(self) -> int:
        """Null requests under way; the model's count of accepted requests includes them."""
        return self._nobody.open

    def make(self, like: list[Tensor], states: list[Tensor]) -> InferRequest:
        """A null request for a batch whose other requests have inputs shaped like `like`."""
        request = InferRequest()
        request.model = self._model
        request.model_name = self._model.name
        request.responder = self._nobody
        self._nobody.open += 1
        request.collect_statistics = False
        request.inputs = [self._zero(t) for t in like]
        request.inputs += self._controls.null
        request.inputs += states
        self._model.inflight += 1
        self.made += 1
        return request

    def _zero(self, tensor: Tensor) -> Tensor:
        key = (tensor.name, tensor.dtype, tensor.shape)
        made = self._zeros.get(key)
        if made is None:
            # a BYTES element that is empty is 4 bytes of length 0
            size = datatypes.ITEM_SIZE[tensor.dtype] or 4
            if len(self._zeros) > 64:
                self._zeros.clear()
            made = self._zeros[key] = Tensor(*key, bytes(size * tensor.count()))
        return made
