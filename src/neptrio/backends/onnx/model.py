"""Compares the inputs and outputs of an ONNX model with those of its configuration, and fills in missing ones.

Auto-completion (docs/protocol/features.md A4): missing inputs, outputs, types and dims are taken from the model. A
model supports batching when every input and output has a variable first dimension, and batches by itself when that is the same
symbol everywhere: then max_batch_size becomes `default-max-batch-size` of --backend-config (4), and if that is above 1 and no scheduler was chosen,
dynamic_batching is added.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from neptrio import datatypes
from neptrio.errors import InvalidArgument

log = logging.getLogger("neptrio.onnx")

_TYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64",
    "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16",
    "float": "FP32", "double": "FP64", "string": "BYTES", "bfloat16": "BF16",
}  # fmt: skip


def datatype(onnx_type: str) -> int:
    """The number of the datatype that ONNX Runtime calls `tensor(float)` and so on; 0 for types the protocol lacks."""
    return datatypes.NUMBER.get(_TYPES.get(onnx_type.removeprefix("tensor(").removesuffix(")"), ""), 0)


def dims(tensor: Any) -> list[int]:
    """The shape of a model's input or output, -1 where it is symbolic or unknown."""
    return [d if isinstance(d, int) and d >= 0 else -1 for d in tensor.shape]


def uncarried(who: str, kind: str, tensor: Any) -> str:
    """Why a tensor of a model cannot be served, "" for one that can."""
    if datatype(tensor.type):
        return ""
    if "map(" in tensor.type or tensor.type.startswith("map"):
        hint = "; convert the model without ZipMap (skl2onnx: options={'zipmap': False})"
    elif tensor.type.startswith(("seq", "optional")):
        hint = "; only tensors are carried"
    elif "float8" in tensor.type:
        hint = "; cast it to FP16 or FP32 in the model"
    else:
        hint = ""
    return f"{who}: {kind} '{tensor.name}' is a {tensor.type}, which the protocol cannot carry{hint}"


def complete(tensor: Any) -> bool:
    """True when the configuration of an input or output is complete."""
    return bool(tensor.name and tensor.data_type and tensor.dims)


def auto_complete(config: Any, session: Any, settings: dict[str, str]) -> None:
    """Fills in what `config` leaves open, in place. Raises InvalidArgument when that cannot be found out."""
    model_inputs, model_outputs = session.get_inputs(), session.get_outputs()
    tensors = (*model_inputs, *model_outputs)
    served = {o.name for o in config.output}
    for kind, found in (("input", model_inputs), ("output", model_outputs)):
        for tensor in found:
            reason = uncarried(f"unable to load model '{config.name}'", kind, tensor)
            if reason and (kind == "input" or not served or tensor.name in served):
                raise InvalidArgument(reason)
    # what has any number of dimensions says nothing about the first
    can_batch = all(t.shape is None or (len(t.shape) and dims(t)[0] == -1) for t in tensors)
    # with batch inputs the configuration says how the model batches
    can_batch = can_batch or bool(config.batch_input)
    if config.max_batch_size > 0 and not can_batch:
        raise InvalidArgument(
            f"autofill failed for model '{config.name}': model does not support batching while non-zero max_batch_size "
            f"({config.max_batch_size}) is specified; its inputs and outputs must have a variable first dimension: "
            + ", ".join(f"'{t.name}' {dims(t)}" for t in (*model_inputs, *model_outputs))
        )
    by_itself = can_batch and (bool(config.batch_input) or one_symbol(tensors))
    if by_itself and config.max_batch_size == 0 and not (config.input or config.output):
        config.max_batch_size = _default_batch_size(settings)
        if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
            config.dynamic_batching.SetInParent()
    elif can_batch and config.max_batch_size == 0 and not (config.input or config.output):
        log.warning(
            "model '%s' does not batch: the first dimensions of its inputs and outputs are not one symbol (%s); set "
            "max_batch_size in its configuration if they are the batch's (docs/onnx.md)",
            config.name,
            _first_dimensions(tensors),
        )
    batching = config.max_batch_size > 0
    controls = {c.name for c in config.sequence_batching.control_input}
    states = config.sequence_batching.state
    controls |= {s.input_name for s in states}
    controls |= {name for extra in config.batch_input for name in extra.target_name}
    state_outputs = {s.output_name for s in states}
    _fill(config.input, [t for t in model_inputs if t.name not in controls], batching)
    _fill(config.output, [t for t in model_outputs if t.name not in state_outputs], batching)


def one_symbol(tensors: Sequence[Any]) -> bool:
    """True when the first dimensions of all tensors are the same symbol: then it is the batch's in all of them.

    Another symbol (`detections` beside `batch`) or none at all may count something else, and a batch's output would be
    divided among requests that it does not belong to.
    """
    symbols = {t.shape[0] if t.shape else None for t in tensors}
    return len(symbols) == 1 and all(isinstance(symbol, str) and symbol for symbol in symbols)


def doubtful(config: Any, session: Any) -> str:
    """What a warning says of a model that batches, though its first dimensions are not one symbol; "" for others."""
    tensors = (*session.get_inputs(), *session.get_outputs())
    if config.max_batch_size == 0 or config.batch_input or config.batch_output or one_symbol(tensors):
        return ""
    return (
        f"model '{config.name}' has max_batch_size {config.max_batch_size}, and the first dimensions of its inputs and "
        f"outputs are not one symbol: {_first_dimensions(tensors)}; a result with other rows than the batch's fails"
    )


def _first_dimensions(tensors: Sequence[Any]) -> str:
    return ", ".join(f"'{t.name}' {(t.shape[0] if t.shape else None) or '?'}" for t in tensors)


def _default_batch_size(settings: dict[str, str]) -> int:
    text = settings.get("default-max-batch-size", "4")
    try:
        return max(0, int(text))
    except ValueError:
        raise InvalidArgument(
            f"--backend-config=onnxruntime,default-max-batch-size must be an integer, got '{text}'"
        ) from None


def _fill(configured: Any, found: Sequence[Any], batching: bool) -> None:
    by_name = {t.name: t for t in found}
    if not len(configured):
        for name in by_name:
            configured.add().name = name
    for entry in configured:
        tensor = by_name.get(entry.name)
        if tensor is None:
            continue  # compare() reports it
        if not entry.data_type:
            entry.data_type = datatype(tensor.type)
        if not entry.dims and tensor.shape is not None:
            shape = dims(tensor)[1 if batching else 0 :]
            if shape:
                entry.dims.extend(shape)
            else:  # a scalar, for which clients send a tensor with one element
                entry.dims.append(1)
                entry.reshape.SetInParent()


def compare(config: Any, session: Any) -> None:
    """Raises InvalidArgument for the first difference between configuration and model."""
    for difference in differences(config, session):
        raise InvalidArgument(difference)


def differences(config: Any, session: Any) -> Iterator[str]:
    """Every difference between configuration and model. `session` may be a signature.Signature."""
    inputs = {t.name: t for t in session.get_inputs()}
    initializers = {t.name: t for t in session.get_overridable_initializers()}
    outputs = {t.name: t for t in session.get_outputs()}
    sequences = config.sequence_batching
    given = {i.name for i in config.input}
    given |= {c.name for c in sequences.control_input} | {s.input_name for s in sequences.state}
    given |= {name for extra in config.batch_input for name in extra.target_name}
    configured = {i.name for i in config.input}
    scattered = {name for extra in config.batch_output for name in extra.target_name}
    who = f"unable to load model '{config.name}'"
    for tensor in inputs.values():
        if tensor.name not in configured and uncarried(who, "input", tensor):
            yield uncarried(who, "input", tensor)
    missing = [name for name in inputs if name not in given]
    if missing:
        yield (
            f"{who}: the model has {len(inputs)} inputs, the configuration gives {len(given)}; missing are "
            + ", ".join(f"'{name}'" for name in missing)
        )
    for entry in config.input:
        tensor = inputs.get(entry.name) or initializers.get(entry.name)
        if tensor is None:
            yield _unexpected(who, "input", entry.name, [*inputs, *initializers])
            continue
        if entry.optional and entry.name in inputs:
            yield (
                f"{who}: input '{entry.name}' is optional in the configuration but the model requires it (only inputs "
                "with an initializer are optional)"
            )
        yield from _disagreement(config, entry, tensor, "input", who)
    for entry in config.output:
        if entry.name not in outputs:
            yield _unexpected(who, "output", entry.name, list(outputs))
            continue
        # a batch output's shape is that of one request, the model gives all requests' rows
        yield from _disagreement(
            config, entry, outputs[entry.name], "output", who, entry.name not in scattered
        )
    for kind, name, data_type in _added(config):
        known = outputs if kind == "state output" else inputs | initializers
        if name not in known:
            yield _unexpected(who, kind.split()[-1], name, list(known))
        elif datatype(known[name].type) != data_type:
            yield _other_type(who, kind, name, data_type, datatype(known[name].type))


def _added(config: Any) -> Iterator[tuple[str, str, int]]:
    """(kind, name, datatype) of the tensors that the server makes: controls, states and batch inputs."""
    for control in config.sequence_batching.control_input:
        for c in control.control:
            if c.data_type:
                yield "control input", control.name, c.data_type
            elif len(c.int32_false_true):
                yield "control input", control.name, datatypes.NUMBER["INT32"]
            elif len(c.fp32_false_true):
                yield "control input", control.name, datatypes.NUMBER["FP32"]
            elif len(c.bool_false_true):
                yield "control input", control.name, datatypes.NUMBER["BOOL"]
    for state in config.sequence_batching.state:
        yield "state input", state.input_name, state.data_type
        yield "state output", state.output_name, state.data_type
    for extra in config.batch_input:
        for name in extra.target_name:
            yield "batch input", name, extra.data_type


def _other_type(who: str, kind: str, name: str, got: int, wanted: int) -> str:
    return (
        f"{who}: unexpected datatype {datatypes.CONFIG_NAME[got]} for {kind} '{name}', expecting "
        f"{datatypes.CONFIG_NAME[wanted] if wanted else 'a type that the protocol lacks'}"
    )


def _unexpected(who: str, kind: str, name: str, allowed: list[str]) -> str:
    names = ", ".join(f"'{n}'" for n in allowed)
    return f"{who}: unexpected inference {kind} '{name}', allowed {kind}s are: {names}"


def _disagreement(
    config: Any, entry: Any, tensor: Any, kind: str, who: str, shaped: bool = True
) -> Iterator[str]:
    wanted = datatype(tensor.type)
    if not wanted:
        yield uncarried(who, kind, tensor)
        return
    if entry.data_type != wanted:
        yield _other_type(who, kind, entry.name, entry.data_type, wanted)
    if not shaped or tensor.shape is None or (kind == "input" and entry.allow_ragged_batch):
        return  # a ragged input: the model gets all requests' elements in one dimension
    shape = list(entry.reshape.shape) if entry.HasField("reshape") else list(entry.dims)
    full = [-1, *shape] if config.max_batch_size > 0 else shape
    model = dims(tensor)
    fits = len(full) == len(model) and all(a == b or -1 in (a, b) for a, b in zip(full, model, strict=True))
    # a model with a fixed batch dimension cannot take batches of other sizes
    if fits and config.max_batch_size > 0 and model[0] != -1:
        fits = False
    if not fits:
        note = (
            " (the batch dimension, because max_batch_size is above 0, and the dims)"
            if config.max_batch_size
            else ""
        )
        yield (
            f"{who}: {kind} '{entry.name}' has the shape {model} in the model, but the configuration says {full}{note}"
        )
