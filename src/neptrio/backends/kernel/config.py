"""Reads how a model's configuration names its kernels.

    parameters { key: "kernels" value { string_value:
        "rows<<<batch, 256>>>(INPUT0, SUM, INPUT0.shape[1]);
         scale<<<(ceil_div(INPUT0.shape[1], 256), batch), 256, 0>>>(INPUT0, SUM, OUTPUT0)" } }
    parameters { key: "scratch" value { string_value: "SUM = FP32[batch]" } }
    parameters { key: "shapes"  value { string_value: "OUTPUT0 = [batch, INPUT0.shape[1]]" } }
    parameters { key: "zero"    value { string_value: "SUM" } }

Launches run in the order written. `cooperative` and `cluster(x, y, z)` may follow the shared memory: all blocks run at
once, or in clusters (on GPUs only). An argument is a tensor (input, output, scratch buffer or state) or an expression
(expressions.py), which becomes a scalar of the parameter's declared type. `shapes` is needed only for outputs with
a dimension of -1. `zero` names outputs and scratch buffers that are cleared before the first launch. All other
parameters are the model's own; expressions can read them as parameter.NAME.
"""

from __future__ import annotations

from typing import Any

from neptrio import datatypes
from neptrio.backends.kernel import expressions
from neptrio.backends.kernel.expressions import Expression, Scope, Tokens
from neptrio.backends.kernel.model_spec import Argument, Launch, ModelSpec, TensorSpec
from neptrio.backends.kernel.signature import OF_DATATYPE
from neptrio.config.sequence_config import VALUES
from neptrio.errors import InvalidArgument

OWN_PARAMETERS = ("kernels", "scratch", "shapes", "zero", "compile_options")


def read(config: Any) -> ModelSpec:
    """Reads the kernel part of a ModelConfig. Raises InvalidArgument that says where and what."""
    model = config.name
    parameters = {key: config.parameters[key].string_value for key in config.parameters}
    batching = config.max_batch_size > 0
    if not parameters.get("kernels", "").strip():
        raise InvalidArgument(
            f"model '{model}' has no parameter 'kernels'; expected for example "
            "'name<<<ceil_div(INPUT0.size, 256), 256>>>(INPUT0, OUTPUT0, INPUT0.size)'"
        )
    own = {k: v for k, v in parameters.items() if k not in OWN_PARAMETERS}
    inputs, declared = _declared(config, model, batching)
    ranks = {t.name: t.rank for t in inputs}
    sizes = {t.name: datatypes.ITEM_SIZE[t.dtype] for t in inputs}
    scope = Scope(ranks, sizes, own)
    shapes = _shapes(parameters.get("shapes", ""), scope, model)
    outputs = tuple(_output(spec, shapes.pop(spec.name, None), model) for spec in declared)
    if shapes:
        raise InvalidArgument(
            f"parameter 'shapes' of model '{model}' names '{next(iter(shapes))}', which is no output"
        )
    ranks |= {t.name: t.rank for t in outputs}
    scratch = _scratch(parameters.get("scratch", ""), scope, model)
    names = [t.name for t in (*inputs, *outputs, *scratch)]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(
                f"model '{model}' has two tensors named '{name}'; kernels need distinct names"
            )
    ranks |= {t.name: t.rank for t in scratch}
    launches = _launches(parameters["kernels"], scope, set(names), model)
    zero = frozenset(n.strip() for n in parameters.get("zero", "").replace(";", ",").split(",") if n.strip())
    for name in sorted(zero):
        if name not in {t.name for t in (*outputs, *scratch)}:
            raise InvalidArgument(
                f"parameter 'zero' of model '{model}' names '{name}', which is no output or scratch"
            )
    return ModelSpec(
        model,
        batching,
        config.max_batch_size,
        inputs,
        outputs,
        scratch,
        launches,
        zero,
        tuple(parameters.get("compile_options", "").split()),
    )


def _declared(config: Any, model: str, batching: bool) -> tuple[tuple[TensorSpec, ...], list[TensorSpec]]:
    inputs: list[TensorSpec] = []
    outputs: list[TensorSpec] = []
    for role, fields, into in (("input", config.input, inputs), ("output", config.output, outputs)):
        for f in fields:
            if f.HasField("reshape"):
                raise InvalidArgument(
                    f"{role} '{f.name}' of model '{model}': kernels take no 'reshape', use dims"
                )
            optional = role == "input" and f.optional
            into.append(TensorSpec(f.name, role, f.data_type, tuple(f.dims), batching, optional))
    for control in config.sequence_batching.control_input:
        for c in control.control:
            dtype = c.data_type or next((dtype for form, dtype in VALUES.items() if getattr(c, form)), 0)
            inputs.append(TensorSpec(control.name, "input", dtype, (1,), batching))
    for state in config.sequence_batching.state:
        inputs.append(TensorSpec(state.input_name, "input", state.data_type, tuple(state.dims), batching))
        # an output that is also listed is one that clients may see
        if all(spec.name != state.output_name for spec in outputs):
            outputs.append(
                TensorSpec(state.output_name, "output", state.data_type, tuple(state.dims), batching)
            )
    for spec in (*inputs, *outputs):
        if spec.dtype not in OF_DATATYPE:
            raise InvalidArgument(
                f"{spec.role} '{spec.name}' of model '{model}': kernels take tensors of fixed-size elements, got "
                f"{datatypes.CONFIG_NAME.get(spec.dtype, 'no data_type')}"
            )
    if not inputs or not outputs:
        raise InvalidArgument(f"model '{model}' must configure at least one input and one output")
    return tuple(inputs), outputs


def _output(spec: TensorSpec, shape: tuple[Expression, ...] | None, model: str) -> TensorSpec:
    rank = len(spec.dims) + spec.batched
    if shape is None:
        if any(d < 0 for d in spec.dims):
            raise InvalidArgument(
                f"output '{spec.name}' of model '{model}' has a dimension of -1; parameter 'shapes' must say "
                f"how large it is, for example '{spec.name} = [{'batch, ' if spec.batched else ''}INPUT0.shape[1]]'"
            )
        batch = (Expression("batch", (("batch", None),)),) if spec.batched else ()
        shape = batch + tuple(expressions.constant(d) for d in spec.dims)
    if len(shape) != rank:
        raise InvalidArgument(
            f"output '{spec.name}' of model '{model}' has {rank} dimensions"
            f"{' (the batch included)' if spec.batched else ''}, parameter 'shapes' gives {len(shape)}"
        )
    return TensorSpec(spec.name, "output", spec.dtype, spec.dims, spec.batched, False, shape)


def _dims(tokens: Tokens, scope: Scope) -> tuple[Expression, ...]:
    tokens.expect("[")
    return tuple(tokens.several(lambda: expressions.parse_expression(tokens, scope), "]"))


def _shapes(text: str, scope: Scope, model: str) -> dict[str, tuple[Expression, ...]]:
    tokens = Tokens(text, f"parameter 'shapes' of model '{model}'")
    found: dict[str, tuple[Expression, ...]] = {}
    while tokens.peek():
        name = tokens.name("an output's name")
        if name in found:
            raise tokens.error(f"'{name}' is given twice")
        tokens.expect("=")
        found[name] = _dims(tokens, scope)
        if tokens.peek():
            tokens.expect(";")
    return found


def _scratch(text: str, scope: Scope, model: str) -> tuple[TensorSpec, ...]:
    tokens = Tokens(text, f"parameter 'scratch' of model '{model}'")
    found = []
    while tokens.peek():
        name = tokens.name("a scratch buffer's name")
        tokens.expect("=")
        kind = tokens.name("a datatype such as FP32")
        dtype = datatypes.NUMBER.get(kind, 0)
        if dtype not in OF_DATATYPE:
            raise tokens.error(f"expected a datatype such as FP32 or UINT8, got '{kind}'")
        shape = _dims(tokens, scope)
        found.append(TensorSpec(name, "scratch", dtype, (), False, False, shape))
        if tokens.peek():
            tokens.expect(";")
    return tuple(found)


def _geometry(tokens: Tokens, scope: Scope) -> tuple[Expression, ...]:
    """One expression, or (x, y) or (x, y, z)."""
    start = tokens.at
    if tokens.take("("):
        parts = [expressions.parse_expression(tokens, scope)]
        while tokens.take(","):
            parts.append(expressions.parse_expression(tokens, scope))
        if tokens.take(")") and tokens.peek() in (",", ">>>"):
            if len(parts) > 3:
                raise tokens.error(f"expected at most 3 dimensions, got {len(parts)}")
            return tuple(parts)
        tokens.at = start
    return (expressions.parse_expression(tokens, scope),)


def _extras(tokens: Tokens, scope: Scope) -> tuple[Expression, bool, tuple[Expression, ...]]:
    """What may follow a block: bytes of shared memory, then in any order `cooperative` and `cluster(x, y, z)`."""
    shared, cooperative, first = expressions.constant(0), False, True
    cluster: tuple[Expression, ...] = ()
    while tokens.take(","):
        if tokens.peek() == "cooperative":
            tokens.next()
            cooperative = True
        elif tokens.peek() == "cluster":
            tokens.next()
            if tokens.peek() != "(":
                tokens.expect("(")
            cluster = _geometry(tokens, scope)
        elif first:
            shared = expressions.parse_expression(tokens, scope)
        else:
            raise tokens.error(f"expected 'cooperative' or 'cluster(x, y, z)', got '{tokens.peek()}'")
        first = False
    return shared, cooperative, cluster


def _argument(tokens: Tokens, scope: Scope, tensors: set[str]) -> Argument:
    following = tokens.items[tokens.at + 1][1] if tokens.at + 1 < len(tokens.items) else ""
    if tokens.peek() in tensors and following in (",", ")"):
        return Argument(tokens.next(), None)
    return Argument(None, expressions.parse_expression(tokens, scope))


def _launches(text: str, scope: Scope, tensors: set[str], model: str) -> tuple[Launch, ...]:
    tokens = Tokens(text, f"parameter 'kernels' of model '{model}'")
    launches = []
    while tokens.peek():
        name = tokens.name("a kernel's name")
        tokens.expect("<<<")
        grid = _geometry(tokens, scope)
        tokens.expect(",")
        block = _geometry(tokens, scope)
        shared, cooperative, cluster = _extras(tokens, scope)
        tokens.expect(">>>")
        tokens.expect("(")
        arguments = tuple(tokens.several(lambda: _argument(tokens, scope, tensors), ")"))
        launches.append(Launch(name, grid, block, shared, arguments, cooperative, cluster))
        if tokens.peek():
            tokens.expect(";")
    return tuple(launches)
