"""What a kernel model's configuration says, as config.py reads it: its checks against the source, and plans of its launches."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from neptrio import datatypes
from neptrio.backends.kernel.expressions import Expression, Number, Values
from neptrio.backends.kernel.plan import KernelPlan
from neptrio.backends.kernel.signature import OF_DATATYPE, Parameter, Signature
from neptrio.errors import InvalidArgument
from neptrio.limits import OUTPUT_BYTES

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
