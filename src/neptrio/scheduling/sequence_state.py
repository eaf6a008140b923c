"""Implicit state: a state output of one request becomes the state input of the sequence's next request.

A sequence owns one tensor per configured state. Before an execution these are added to the request's inputs as
they are; after it, the response's state outputs replace them. They stay tensors throughout: bytes are copied
only where rule 3 or 4 says so.

Rules (docs/protocol/rules.md E1.14):
 1. START, and only START, resets a state: to the contents of its file, or to zeros.
 2. A response without the state output, and a failed execution or request, leave the state unchanged.
 3. A state never shares memory with what a client is sent: it is replaced, not overwritten. With
    `use_same_buffer_for_input_output` it is overwritten in place, so that its address never changes, but also
    then nothing is written before the execution has succeeded.
 4. The state output of a request executed alone is kept without a copy. One that is part of a batch's buffer is
    copied, so that an idle sequence does not keep the whole batch in memory. States in GPU memory are never copied.
 5. Null requests get the initial state; the state they produce is dropped.
"""

from __future__ import annotations

from neptrio import datatypes
from neptrio.config.sequence_config import SequenceConfig, State
from neptrio.errors import Internal, Reason
from neptrio.request.infer_request import InferResponse, MemoryKind, Tensor
from neptrio.scheduling.sequence_slots import Sequence

GPU = int(MemoryKind.GPU_MEMORY)


class ImplicitState:
    """Makes, keeps and replaces the states of one model's sequences."""

    def __init__(self, config: SequenceConfig, model_name: str) -> None:
        self._model = model_name
        self._states = config.states
        self._batched = config.max_batch_size > 0
        self.names = frozenset(s.input_name for s in config.states)
        self.output_names = tuple(s.output_name for s in config.states)
        self._index = {s.output_name: i for i, s in enumerate(config.states)}
        self._hidden = frozenset(s.output_name for s in config.states if not s.listed)
        self.initial = [self._first(s) for s in config.states]

    def __bool__(self) -> bool:
        return bool(self._states)

    def _first(self, state: State) -> Tensor:
        shape = ((1, *state.initial_dims)) if self._batched else state.initial_dims
        data = state.initial
        if data is None:
            size = datatypes.ITEM_SIZE[state.dtype] or 4
            for d in shape:
                size *= d
            data = bytes(size)
        return Tensor(state.input_name, state.dtype, shape, data)

    def inputs(self, sequence: Sequence, start: bool) -> list[Tensor]:
        """The state inputs of a request that is about to be executed; `start` resets them first."""
        if start or sequence.states is None:
            sequence.states = list(self.initial)
        return sequence.states

    def commit(self, sequence: Sequence | None, response: InferResponse | None, alone: bool) -> None:
        """Takes the state outputs out of a response. One of a wrong type or shape fails the request alone."""
        if response is None or response.error is not None or not response.outputs:
            return
        found: list[tuple[int, Tensor]] = []
        for tensor in response.outputs:
            i = self._index.get(tensor.name)
            if i is not None:
                if not self._fits(self._states[i], tensor):
                    self._refuse(response, self._states[i], tensor)
                    return
                found.append((i, tensor))
        if not found:
            return
        if self._hidden:
            response.outputs = [t for t in response.outputs if t.name not in self._hidden]
        if sequence is not None and sequence.states is not None:
            states = sequence.states = list(sequence.states)
            for i, tensor in found:
                states[i] = self._keep(self._states[i], states[i], tensor, alone)

    def _fits(self, state: State, tensor: Tensor) -> bool:
        dims = tensor.shape[1:] if self._batched else tensor.shape
        return (
            tensor.dtype == state.dtype
            and len(dims) == len(state.dims)
            and all(want in (-1, have) for want, have in zip(state.dims, dims, strict=True))
        )

    def _refuse(self, response: InferResponse, state: State, tensor: Tensor) -> None:
        dims = [1, *state.dims] if self._batched else list(state.dims)
        response.outputs = None
        response.error = Internal(
            f"model '{self._model}' returned the state '{state.output_name}' as "
            f"{datatypes.NAME.get(tensor.dtype)} {list(tensor.shape)}, expected {datatypes.NAME[state.dtype]} {dims}; "
            "the sequence keeps its previous state",
            reason=Reason.BACKEND,
        )

    def _keep(self, state: State, old: Tensor, new: Tensor, alone: bool) -> Tensor:
        if new.memory_kind == GPU:
            return new.renamed(state.input_name)
        if state.same_buffer:
            if old.nbytes == new.nbytes and old.shape == new.shape and type(old.owner) is bytearray:
                if old.address != new.address:
                    old.owner[:] = memoryview(new)
                return old
            return Tensor(state.input_name, state.dtype, new.shape, bytearray(memoryview(new)), True)
        if alone and not state.listed:
            return new.renamed(state.input_name)
        return Tensor(state.input_name, state.dtype, new.shape, new.tobytes())
