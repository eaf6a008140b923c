"""Reads how a model's configuration names its kernels, and checks that against the source.

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

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neptrio import datatypes
from neptrio.backends.kernel import expressions
from neptrio.backends.kernel.expressions import Expression, Number, Scope, Tokens, Values
from neptrio.backends.kernel.plan import KernelPlan
from neptrio.backends.kernel.signature import OF_DATATYPE, Parameter, Signature
from neptrio.errors import InvalidArgument
from neptrio.limits import OUTPUT_BYTES

OWN_PARAMETERS = ("kernels", "scratch", "shapes", "zero", "compile_options")
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
MAX_CLUSTER = 8  # blocks of a thread block cluster that every GPU with clusters can run
ANY = "xv"  # kinds (signature.py) of declared types that fit every tensor


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that arguments can name. `role` is "input", "output" or "scratch"."""

    name: str
    role: str
    dtype: int
    dims: tuple[int, ...]
    batched: bool
    optional: bool = False
    shape: tuple[Expression, ...] | None = None  # of outputs and scratch buffers

    @property
    def rank(self) -> int:
        """The number of dimensions that a kernel sees, the batch dimension included."""
        return len(self.shape) if self.shape is not None else len(self.dims) + self.batched


@dataclass(frozen=True)
class Argument:
    """A kernel argument: a tensor by name, or a scalar."""

    tensor: str | None
    scalar: Expression | None

    @property
    def text(self) -> str:
        """The argument as the configuration wrote it."""
        return self.tensor or (self.scalar.text if self.scalar else "")


@dataclass(frozen=True)
class Launch:
    """One kernel launch: grid, block, shared memory, arguments, and whether its blocks run at once or in clusters."""

    kernel: str
    grid: tuple[Expression, ...]
    block: tuple[Expression, ...]
    shared: Expression
    arguments: tuple[Argument, ...]
    cooperative: bool = False
    cluster: tuple[Expression, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """The contents of a kernel model's configuration."""

    model: str
    batching: bool
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    scratch: tuple[TensorSpec, ...]
    launches: tuple[Launch, ...]
    zero: frozenset[str]
    compile_options: tuple[str, ...]
    max_output_bytes: int = OUTPUT_BYTES  # of an output or a scratch buffer

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Inputs, outputs and scratch buffers, in the order in which plans number them."""
        return self.inputs + self.outputs + self.scratch

    # ------------------------------------------------------------ plans

    def plan(
        self,
        shapes: Sequence[tuple[int, ...] | None],
        batch: int,
        order: Mapping[str, int],
        signatures: Mapping[str, Signature],
    ) -> KernelPlan:
        """The plan of an execution with these input shapes. `order` gives the number of each kernel.

        `shapes` are the inputs' shapes in order, None for an optional input that is absent; the first dimension is the
        size of the whole batch. Raises InvalidArgument for shapes or values that cannot be launched.
        """
        values: dict[str, Sequence[int]] = {
            spec.name: (shape if shape is not None else ())
            for spec, shape in zip(self.inputs, shapes, strict=True)
        }
        sizes = {t.name: max(datatypes.ITEM_SIZE[t.dtype], 1) for t in self.tensors()}
        scope = Values(batch, values, sizes)
        slots: dict[str, int] = {t.name: i for i, t in enumerate(self.inputs)}
        plan = KernelPlan(len(self.inputs), len(self.outputs), len(self.scratch), batch)
        for spec in self.outputs + self.scratch:
            shape = self._shape(spec, scope, batch)
            values[spec.name] = shape
            slots[spec.name] = len(slots)
            nbytes = math.prod(shape) * sizes[spec.name]
            if nbytes > self.max_output_bytes:
                raise InvalidArgument(
                    f"{spec.role} '{spec.name}' of model '{self.model}' would take {nbytes} bytes, expected at most "
                    f"{self.max_output_bytes} (--max-output-bytes)"
                )
            plan.set_tensor(slots[spec.name], spec.name, spec.dtype, shape, nbytes, spec.name in self.zero)
        for spec, given in zip(self.inputs, shapes, strict=True):
            size = math.prod(given) * sizes[spec.name] if given is not None else 0
            plan.set_tensor(slots[spec.name], spec.name, spec.dtype, given or (), size, False)
        written = self._written(signatures)
        for spec in self.inputs:
            if spec.name in written:
                plan.copy(slots[spec.name])
        for spec in self.outputs:
            if spec.name not in written:
                plan.clear(slots[spec.name])
        for launch in self.launches:
            grid = self._dimensions(launch, "grid", launch.grid, MAX_GRID, 0, scope)
            block = self._dimensions(launch, "block", launch.block, MAX_BLOCK, 1, scope)
            if math.prod(block) > MAX_THREADS:
                raise InvalidArgument(
                    f"{self._where(launch)}: a block has at most {MAX_THREADS} threads, got {block} = "
                    f"{math.prod(block)}"
                )
            shared = _whole(launch.shared.evaluate(scope), f"{self._where(launch)}: shared memory")
            if not 0 <= shared < 2**31:
                raise InvalidArgument(f"{self._where(launch)}: shared memory of {shared} bytes")
            if (
                0 in grid
            ):  # as for empty tensors: nothing to launch, and nobody writes what it would have written
                for argument in launch.arguments:
                    if argument.tensor is not None and slots[argument.tensor] >= len(self.inputs):
                        plan.clear(slots[argument.tensor])
                continue
            cluster = self._cluster(launch, grid, scope)
            plan.add_launch(order[launch.kernel], grid, block, shared, launch.cooperative, cluster)
            declared = signatures[launch.kernel].parameters
            for i, argument in enumerate(launch.arguments):
                if argument.tensor is not None:
                    plan.add_tensor_argument(slots[argument.tensor])
                else:
                    assert argument.scalar is not None
                    value = argument.scalar.evaluate(scope)
                    plan.add_scalar_argument(pack(value, declared[i], f"{self._where(launch)}: argument {i}"))
        return plan

    def _written(self, signatures: Mapping[str, Signature]) -> set[str | None]:
        """The tensors to which a kernel may write: those given for pointers that are not const, and all of compiled
        code."""
        return {
            argument.tensor
            for launch in self.launches
            if launch.kernel in signatures
            for argument, parameter in zip(
                launch.arguments, signatures[launch.kernel].parameters, strict=False
            )
            if parameter.pointer and not parameter.const
        }

    def _cluster(self, launch: Launch, grid: tuple[int, int, int], scope: Values) -> tuple[int, int, int]:
        """The size of a cluster in blocks, zeros for none."""
        if not launch.cluster:
            return 0, 0, 0
        cluster = self._dimensions(launch, "cluster", launch.cluster, (MAX_CLUSTER,) * 3, 1, scope)
        if math.prod(cluster) > MAX_CLUSTER:
            raise InvalidArgument(
                f"{self._where(launch)}: a cluster has at most {MAX_CLUSTER} blocks, got {cluster} = "
                f"{math.prod(cluster)}"
            )
        if any(blocks % size for blocks, size in zip(grid, cluster, strict=True)):
            raise InvalidArgument(
                f"{self._where(launch)}: a grid of {grid} blocks cannot be divided into clusters of {cluster}"
            )
        return cluster

    def _where(self, launch: Launch) -> str:
        return f"kernel '{launch.kernel}' of model '{self.model}'"

    def _shape(self, spec: TensorSpec, scope: Values, batch: int) -> tuple[int, ...]:
        assert spec.shape is not None
        what = f"{spec.role} '{spec.name}' of model '{self.model}'"
        shape = tuple(_whole(e.evaluate(scope), what) for e in spec.shape)
        if any(n < 0 for n in shape):
            raise InvalidArgument(f"{what}: the shape {list(shape)} has a negative dimension")
        if spec.role == "output":
            expected = ((batch,) if spec.batched else ()) + spec.dims
            if any(e not in (-1, n) for e, n in zip(expected, shape, strict=True)):
                raise InvalidArgument(
                    f"{what}: the config's dims say {list(expected)}, the shape expression gives {list(shape)}"
                )
        return shape

    def _dimensions(
        self,
        launch: Launch,
        what: str,
        given: tuple[Expression, ...],
        limits: tuple[int, int, int],
        least: int,
        scope: Values,
    ) -> tuple[int, int, int]:
        made = [1, 1, 1]
        for i, expression in enumerate(given):
            n = _whole(expression.evaluate(scope), f"{self._where(launch)}: {what}")
            if not least <= n <= limits[i]:
                raise InvalidArgument(
                    f"{self._where(launch)}: {what}.{'xyz'[i]} = {expression.text} is {n}, expected "
                    f"{least} to {limits[i]}"
                )
            made[i] = n
        return made[0], made[1], made[2]

    # ------------------------------------------------------------ checks at load

    def check(self, signatures: Mapping[str, Signature], where: str) -> None:
        """Checks kernels, argument counts and types against the source. Raises InvalidArgument."""
        written = self._written(signatures)
        for launch in self.launches:
            signature = signatures.get(launch.kernel)
            if signature is None:
                known = ", ".join(signatures) or "none"
                raise InvalidArgument(
                    f"model '{self.model}' launches kernel '{launch.kernel}', which {where} does not "
                    f"define (it defines: {known})"
                )
            if signature.template:
                raise InvalidArgument(
                    f"kernel '{launch.kernel}' ({where}:{signature.line}) is a template; write a __global__ "
                    "function that calls it with concrete types"
                )
            if len(launch.arguments) != len(signature.parameters):
                raise InvalidArgument(
                    f"kernel '{launch.kernel}' ({where}:{signature.line}) takes {len(signature.parameters)} "
                    f"arguments, the config of model '{self.model}' gives {len(launch.arguments)}"
                )
            for i, (argument, parameter) in enumerate(
                zip(launch.arguments, signature.parameters, strict=True)
            ):
                problem = self._mismatch(argument, parameter, written)
                if problem:
                    raise InvalidArgument(
                        f"kernel '{launch.kernel}' ({where}:{signature.line}), argument {i} "
                        f"('{parameter.text}'): {problem}"
                    )
        order = {name: i for i, name in enumerate(signatures)}
        if all(d >= 0 for t in self.inputs for d in t.dims):
            for batch in sorted({1, max(self.max_batch_size, 1)}):
                shapes = [((batch,) if t.batched else ()) + t.dims for t in self.inputs]
                self.plan(shapes, batch, order, signatures)

    def _mismatch(self, argument: Argument, parameter: Parameter, written: set[str | None]) -> str:
        if argument.tensor is None:
            assert argument.scalar is not None
            if parameter.pointer:
                return f"expected a tensor, got the scalar '{argument.text}'"
            if parameter.type is None or parameter.type.kind in "vhBq":
                return f"expected a parameter of an integer, floating or bool type for '{argument.text}'"
            if argument.scalar.constant():
                pack(argument.scalar.evaluate(Values(1, {}, {})), parameter, f"'{argument.text}'")
            return ""
        spec = next(t for t in self.tensors() if t.name == argument.tensor)
        (kind, size), expected = OF_DATATYPE[spec.dtype]
        name = datatypes.NAME[spec.dtype]
        if not parameter.pointer:
            return f"expected a scalar, got the tensor '{spec.name}' ({name}), which needs a pointer '{expected}*'"
        if parameter.type is None:
            return f"the pointer's type is not known to the checker; {spec.role} '{spec.name}' is {name}, use '{expected}*'"
        if (
            parameter.const and spec.role == "output" and spec.name not in written
        ):  # a later kernel may read what this one writes
            return f"output '{spec.name}' can't be written through a const pointer"
        declared = parameter.type
        raw = declared.size == size and declared.kind in "iu" and kind in "bhB"
        raw |= declared.kind == "q" and size == 1 and kind in "iu"  # the protocol has no floats of eight bits
        if declared.kind not in ANY and (declared.kind, declared.size) != (kind, size) and not raw:
            return f"expected '{declared.name}*' data, got {spec.role} '{spec.name}' of type {name} ('{expected}*')"
        return ""


def _whole(value: Number, what: str) -> int:
    if isinstance(value, float):
        if not value.is_integer():
            raise InvalidArgument(f"{what}: expected a whole number, got {value}")
        return int(value)
    return value


def pack(value: Number, parameter: Parameter, what: str) -> bytes:
    """A scalar as the bytes of a kernel parameter. Raises InvalidArgument when it does not fit."""
    kind = parameter.type.kind if parameter.type else "x"
    size = parameter.size
    if kind == "x":  # compiled code has no type information: the value decides
        kind = "f" if isinstance(value, float) else "i"
    declared = parameter.text
    if kind == "f":
        try:
            return struct.pack("<f" if size == 4 else "<d", value)
        except OverflowError:
            raise InvalidArgument(f"{what}: {value} does not fit '{declared}'") from None
    if isinstance(value, float):
        if not value.is_integer():
            raise InvalidArgument(f"{what}: expected a whole number for '{declared}', got {value}")
        value = int(value)
    if kind == "b":
        return struct.pack("<?", bool(value))
    signed = kind == "i"
    low, high = (-(1 << (8 * size - 1)), (1 << (8 * size - 1)) - 1) if signed else (0, (1 << (8 * size)) - 1)
    if not low <= value <= high:
        raise InvalidArgument(f"{what}: {value} does not fit '{declared}' ({low} to {high})")
    return value.to_bytes(size, "little", signed=signed)


# ---------------------------------------------------------------- reading


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
            false_true = [
                8
                if len(c.int32_false_true)
                else 11
                if len(c.fp32_false_true)
                else 1
                if len(c.bool_false_true)
                else 0
            ]
            inputs.append(TensorSpec(control.name, "input", c.data_type or false_true[0], (1,), batching))
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
    dims = []
    if not tokens.take("]"):
        while True:
            dims.append(expressions.parse_expression(tokens, scope))
            if not tokens.take(","):
                break
        tokens.expect("]")
    return tuple(dims)


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
        arguments: list[Argument] = []
        if not tokens.take(")"):
            while True:
                following = tokens.items[tokens.at + 1][1] if tokens.at + 1 < len(tokens.items) else ""
                if tokens.peek() in tensors and following in (",", ")"):
                    arguments.append(Argument(tokens.next(), None))
                else:
                    arguments.append(Argument(None, expressions.parse_expression(tokens, scope)))
                if not tokens.take(","):
                    break
            tokens.expect(")")
        launches.append(Launch(name, grid, block, shared, tuple(arguments), cooperative, cluster))
        if tokens.peek():
            tokens.expect(";")
    return tuple(launches)
