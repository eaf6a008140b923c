"""ModelSequenceBatching -> a checked, frozen SequenceConfig.

Control inputs and states are tensors that the server makes: the metadata does not list them, and clients may
not send them. Everything that can be wrong with their configuration is refused when the model loads.
Source: docs/protocol/features.md A4, docs/protocol/rules.md E1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neptrio import datatypes
from neptrio.config import paths
from neptrio.errors import InvalidArgument

START, READY, END, CORRID = range(4)  # ModelSequenceBatching.Control.Kind
FREE_ON_DISCONNECT = "free_sequences_on_disconnect"

_INT32, _UINT32, _INT64, _UINT64, _FP32, _BOOL, _STRING = (
    datatypes.NUMBER[name] for name in ("INT32", "UINT32", "INT64", "UINT64", "FP32", "BOOL", "BYTES")
)
# a control's values for false and true, of which it has one kind, and their type
VALUES = {"int32_false_true": _INT32, "fp32_false_true": _FP32, "bool_false_true": _BOOL}
CORRID_TYPES = (_UINT64, _INT64, _UINT32, _INT32, _STRING)


@dataclass(frozen=True)
class Control:
    """One control tensor: START, READY or END with its values for false and true, or CORRID, the sequence's id."""

    name: str
    kind: int
    dtype: int
    false_true: tuple[float, float] = (0, 1)


@dataclass(frozen=True)
class State:
    """One implicit state: the output `output_name` of one request is the input `input_name` of the next."""

    input_name: str
    output_name: str
    dtype: int
    dims: tuple[int, ...]  # without the batch dimension, -1 = any
    initial_dims: tuple[int, ...]
    initial: bytes | None  # None = zeros
    same_buffer: bool
    listed: bool  # output_name is also listed as an output, so clients receive it


@dataclass(frozen=True)
class SequenceConfig:
    """What a model's configuration says about its sequences, checked."""

    direct: bool
    slots: int  # per instance (E1.6)
    max_batch_size: int
    idle_ns: int
    delay_ns: int
    minimum_slot_utilization: float = 0.0
    preferred_batch_sizes: frozenset[int] = frozenset()
    preserve_ordering: bool = False
    iterative: bool = False
    free_on_disconnect: bool = False
    controls: tuple[Control, ...] = ()
    states: tuple[State, ...] = ()
    ragged: frozenset[str] = field(default_factory=frozenset)  # inputs whose shapes may differ in a batch


def _controls(batching: Any, model: str) -> tuple[Control, ...]:
    made: list[Control] = []
    for tensor in batching.control_input:
        for control in tensor.control:
            if control.kind not in range(4):
                raise InvalidArgument(
                    f"sequence batching control tensor '{tensor.name}' for {model} has the unknown kind "
                    f"{control.kind}"
                )
            if any(other.name == tensor.name for other in made):
                raise InvalidArgument(
                    f"sequence batching control tensor '{tensor.name}' is specified for multiple control "
                    f"kinds for {model}"
                )
            made.append(_control(tensor.name, control))
    return tuple(made)


def _control(name: str, control: Any) -> Control:
    for form, dtype in VALUES.items():
        values = getattr(control, form)
        if values:
            return Control(name, control.kind, dtype, (values[0], values[1]))
    return Control(name, control.kind, control.data_type)


def _states(batching: Any, config: Any, model_dir: Path) -> tuple[State, ...]:
    model = config.name
    outputs = {o.name for o in config.output}
    made: list[State] = []
    for state in batching.state:
        names = f"'{state.input_name}' -> '{state.output_name}'"
        if not state.input_name or not state.output_name:
            raise InvalidArgument(f"sequence state {names} of {model} must have an input and an output name")
        if any(s.input_name == state.input_name or s.output_name == state.output_name for s in made):
            raise InvalidArgument(f"sequence state {names} of {model} repeats the name of another state")
        if state.data_type == 0:
            raise InvalidArgument(f"sequence state {names} of {model} must specify a data type")
        dims = tuple(state.dims)
        if any(d < 1 and d != -1 for d in dims):
            raise InvalidArgument(
                f"sequence state {names} of {model} has the dims {list(dims)}, expected integers >= 1 or -1"
            )
        initial_dims, initial = _initial(state, dims, names, model, model_dir)
        made.append(
            State(
                state.input_name,
                state.output_name,
                state.data_type,
                dims,
                initial_dims,
                initial,
                state.use_same_buffer_for_input_output,
                state.output_name in outputs,
            )
        )
    return tuple(made)


def _initial(
    state: Any, dims: tuple[int, ...], names: str, model: str, model_dir: Path
) -> tuple[tuple[int, ...], bytes | None]:
    """(dims, data) of a state before its sequence's first request (E1.14)."""
    if len(state.initial_state) > 1:
        raise InvalidArgument(
            f"sequence state {names} of {model} has {len(state.initial_state)} initial states, expected at most 1"
        )
    if not state.initial_state:
        return tuple(1 if d < 0 else d for d in dims), None
    initial = state.initial_state[0]
    own = tuple(initial.dims) or tuple(1 if d < 0 else d for d in dims)
    if initial.data_type not in (0, state.data_type):
        raise InvalidArgument(
            f"the data type of the initial state '{initial.name}' of {model} differs from its state's, {names}"
        )
    if len(own) != len(dims) or any(
        d < 0 or (want >= 0 and d != want) for d, want in zip(own, dims, strict=True)
    ):
        raise InvalidArgument(
            f"the initial state '{initial.name}' of {model} has the dims {list(own)}, which do not fit "
            f"{list(dims)} of its state {names}"
        )
    if initial.WhichOneof("state_data") != "data_file":
        if initial.WhichOneof("state_data") is None:
            raise InvalidArgument(
                f"the initial state '{initial.name}' of {model} must specify 'zero_data' or 'data_file'"
            )
        return own, None
    path = paths.within(model_dir / "initial_state", initial.data_file)
    if path is None:
        raise InvalidArgument(
            f"the data file '{initial.data_file}' of the initial state '{initial.name}' of {model} must stay "
            "within the model's folder 'initial_state'"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(
            f"cannot read the initial state '{initial.name}' of {model} from {path}: {error.strerror}"
        ) from None
    if state.data_type != _STRING:
        expected = math.prod(own) * datatypes.ITEM_SIZE[state.data_type]
        if len(data) != expected:
            raise InvalidArgument(
                f"the initial state '{initial.name}' of {model} needs {expected} bytes for the dims {list(own)}, "
                f"'{initial.data_file}' has {len(data)}"
            )
    return own, data


def parse(config: Any, model_dir: Path) -> SequenceConfig:
    """Reads `config.sequence_batching`, which validate_config has checked, and checks what needs more than one field. Raises
    InvalidArgument.

    Reads the files of initial states, so it is called when a model loads.
    """
    batching = config.sequence_batching
    model = config.name
    size = config.max_batch_size
    controls = _controls(batching, model)
    states = _states(batching, config, model_dir)
    taken = [i.name for i in config.input]
    for name in [c.name for c in controls] + [s.input_name for s in states]:
        if name in taken:
            raise InvalidArgument(
                f"sequence batching input '{name}' of {model} is also an input of another kind; control and state "
                "inputs are made by the server and must have names of their own"
            )
        taken.append(name)
    if states and config.model_transaction_policy.decoupled:
        raise InvalidArgument(f"implicit state does not go with a decoupled model, {model} asks for both")
    direct = batching.WhichOneof("strategy_choice") != "oldest"
    text = (
        config.parameters[FREE_ON_DISCONNECT].string_value if FREE_ON_DISCONNECT in config.parameters else ""
    )
    if text.lower() not in ("", "true", "false"):
        raise InvalidArgument(
            f"parameter '{FREE_ON_DISCONNECT}' of model {model} must be true or false, got '{text}'"
        )
    common: dict[str, Any] = {
        "max_batch_size": size,
        "idle_ns": (batching.max_sequence_idle_microseconds or 1_000_000) * 1000,
        "iterative": batching.iterative_sequence,
        "free_on_disconnect": text.lower() == "true",
        "controls": controls,
        "states": states,
        "ragged": frozenset(i.name for i in config.input if i.allow_ragged_batch),
    }
    if direct:
        utilization = batching.direct.minimum_slot_utilization
        return SequenceConfig(
            direct=True,
            slots=max(1, size),
            delay_ns=batching.direct.max_queue_delay_microseconds * 1000,
            minimum_slot_utilization=round(utilization, 7),  # float32 -> the decimal that was written
            **common,
        )
    oldest = batching.oldest
    return SequenceConfig(
        direct=False,
        slots=oldest.max_candidate_sequences or max(1, size),
        delay_ns=oldest.max_queue_delay_microseconds * 1000,
        preferred_batch_sizes=frozenset(oldest.preferred_batch_size or [max(1, size)]),
        preserve_ordering=oldest.preserve_ordering,
        **common,
    )
