"""An ensemble's graph: which step needs which tensors, checked against the models of the steps.

No I/O: it turns a configuration and the models' tensors into a graph, or raises InvalidArgument.
Source: docs/protocol/features.md A4 and A5, docs/protocol/rules.md E4.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from neptrio import datatypes
from neptrio.errors import InvalidArgument
from neptrio.scheduling.waits import Wait


@dataclass(frozen=True)
class Step:
    """One model call. `inputs` and `outputs` are (the model's name, the ensemble's name) pairs."""

    index: int
    model_name: str
    model_version: str  # "" = the latest ready one
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    decoupled: bool

    @property
    def needs(self) -> frozenset[str]:
        """The ensemble tensors that the step waits for."""
        return frozenset(tensor for _, tensor in self.inputs)


def _matches(dims: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(dims) == len(shape) and all(x == y or x < 0 or y < 0 for x, y in zip(dims, shape, strict=True))


@dataclass(frozen=True)
class Fit:
    """How a tensor gets from a model with batches to one without, or back: as on a Triton server by a leading 1."""

    adds: bool  # to where there are batches
    dims: tuple[int, ...]  # as the reader's configuration has them

    def __call__(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape for the reader; one that does not fit stays as it is, and is refused there."""
        if self.adds:
            return (1, *shape) if _matches(self.dims, shape) else shape
        return shape[1:] if shape[:1] == (1,) and not _matches(self.dims, shape) else shape


@dataclass(frozen=True)
class Graph:
    """The steps in the order of the configuration, and which step makes which tensor."""

    steps: tuple[Step, ...]
    inputs: frozenset[str]
    outputs: tuple[str, ...]  # in configuration order
    maker: dict[str, int]  # tensor -> index of the step that makes it
    below: dict[int, frozenset[int]]  # step -> the steps that depend on it, directly or not
    level: tuple[int, ...]  # per step: how many decoupled steps it depends on
    fits: dict[tuple[int, str], Fit]  # (step, its model's input); and (-1, the ensemble's output)
    waits: dict[int, Wait] = field(
        default_factory=dict
    )  # what it means when the sender of a decoupled step waits

    def fitted(self, step: int, name: str, tensor: Any) -> Any:
        """A tensor as its reader wants it, see `fits`; None for None."""
        fit = self.fits.get((step, name)) if self.fits else None
        if fit is None or tensor is None:
            return tensor
        shape = fit(tensor.shape)
        return tensor if shape == tensor.shape else tensor.reshaped(shape)

    @property
    def decoupled(self) -> bool:
        """True when a step may answer any number of times."""
        return any(step.decoupled for step in self.steps)

    def depth(self, needed: frozenset[int]) -> int:
        """The most decoupled steps that follow one another among the steps `needed`."""
        return sum(1 for step in self.steps if step.decoupled and step.index in needed)

    def needed_for(self, outputs: Iterable[str]) -> frozenset[int]:
        """The indices of the steps without which these outputs cannot be made."""
        found: set[int] = set()
        todo = [self.maker[name] for name in outputs if name in self.maker]
        while todo:
            index = todo.pop()
            if index not in found:
                found.add(index)
                todo += [self.maker[name] for name in self.steps[index].needs if name in self.maker]
        return frozenset(found)


@dataclass(frozen=True)
class _Use:
    """Where a tensor is used, with its datatype and shape: for error messages, and to compare it with other uses."""

    where: str
    data_type: int
    dims: tuple[int, ...]
    batching: bool

    @property
    def full(self) -> tuple[int, ...]:
        """The dimensions with that of the batch, if there is one."""
        return (-1, *self.dims) if self.batching else self.dims


def child_names(config: Any) -> list[str]:
    """The models an ensemble is composed of, each once, in configuration order."""
    return list(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))


Report = Callable[[Sequence[str | int], str], None]
STEP = ("ensemble_scheduling", "step")


def _refuse(path: Sequence[str | int], message: str) -> None:
    raise InvalidArgument(message)


def build(config: Any, lookup: Callable[[str, str], Any]) -> Graph:
    """The graph of an ensemble's configuration.

    `lookup(name, version)` returns an object with `config` of a ready model, or raises.
    Raises InvalidArgument naming the step and the tensor that is wrong.
    """
    graph = examine(config, lookup, _refuse)
    assert graph is not None
    return replace(graph, waits=_waits(graph, lookup)) if graph.decoupled else graph


def examine(config: Any, lookup: Callable[[str, str], Any], report: Report) -> Graph | None:
    """build(), but passes every problem to `report(path of the field, message)` instead of raising the first.

    `lookup` may return None for a model whose tensors are not known: then those are not checked. Returns None
    when the problems leave no graph.
    """
    name = config.name
    if not config.ensemble_scheduling.step:
        report(STEP, f"must specify 'step' for ensemble '{name}', got none")
        return None
    seen: dict[str, _Use] = {
        i.name: _Use("an ensemble input", i.data_type, *_dims(config, i.dims)) for i in config.input
    }
    inputs = frozenset(seen)
    maker: dict[str, int] = {}
    uses: dict[tuple[int, str], tuple[str, _Use]] = {}
    steps = []
    consumed: list[tuple[Sequence[str | int], str, _Use | None, str]] = []
    for index, raw in enumerate(config.ensemble_scheduling.step):
        at = (*STEP, index)
        version = str(raw.model_version) if raw.model_version > 0 else ""
        found = lookup(raw.model_name, version)
        child = None if found is None else found.config
        label = f"step {index} (model '{raw.model_name}') of ensemble '{name}'"
        step = Step(
            index,
            raw.model_name,
            version,
            tuple(sorted(raw.input_map.items())),
            tuple(sorted(raw.output_map.items())),
            child is not None and child.model_transaction_policy.decoupled,
        )
        if child is not None and 0 < child.max_batch_size < config.max_batch_size:
            report(
                (*at, "model_name"),
                f"ensemble {name} allows maximum batch size {config.max_batch_size}, but it contains model "
                f"{raw.model_name} which only allows maximum batch size to be {child.max_batch_size}",
            )
        child_inputs = {i.name: i for i in child.input} if child is not None else {}
        child_outputs = {o.name: o for o in child.output} if child is not None else {}
        for own, tensor in step.inputs:
            here = (*at, "input_map")
            use = None
            if own in child_inputs:
                use = _Use(label, child_inputs[own].data_type, *_dims(child, child_inputs[own].dims))
                uses[index, own] = tensor, use
            elif child is not None:
                report(here, _unknown(label, "input", own, tensor, child_inputs))
            consumed.append((here, tensor, use, label))
        mapped = dict(step.inputs)
        missing = [n for n, i in child_inputs.items() if not i.optional and n not in mapped]
        if missing:
            report(at, f"{label} leaves required input(s) {missing} of its model unmapped")
        for own, tensor in step.outputs:
            here = (*at, "output_map")
            if own not in child_outputs and child is not None:
                report(here, _unknown(label, "output", own, tensor, child_outputs))
            if tensor in inputs or tensor in maker:
                other = "an ensemble input" if tensor in inputs else f"step {maker[tensor]}"
                report(here, f"{label} makes tensor '{tensor}', which is {other}'s already")
                continue
            maker[tensor] = index
            if own in child_outputs:
                out = child_outputs[own]
                seen[tensor] = _Use(label, out.data_type, *_dims(child, out.dims))
        steps.append(step)
    for path, tensor, use, label in consumed:
        if tensor not in inputs and tensor not in maker:
            report(
                path,
                f"{label} needs tensor '{tensor}', which is neither an ensemble input nor made by a step",
            )
        elif use is not None and tensor in seen:
            _same(path, name, tensor, seen[tensor], use, report)
    for i, o in enumerate(config.output):
        path = ("output", i)
        if o.name not in maker:
            report(path, f"output '{o.name}' of ensemble '{name}' is made by no step")
        elif o.name in seen:
            use = _Use("an ensemble output", o.data_type, *_dims(config, o.dims))
            uses[-1, o.name] = o.name, use
            _same(path, name, o.name, seen[o.name], use, report)
    below = _below(name, steps, maker, report)
    if below is None:
        return None
    _single_source(name, steps, below, report)
    level = tuple(sum(1 for d in steps if d.decoupled and s.index in below[d.index]) for s in steps)
    fits = {
        reader: Fit(use.batching, use.dims)
        for reader, (tensor, use) in uses.items()
        if tensor in seen and seen[tensor].batching != use.batching
    }
    return Graph(tuple(steps), inputs, tuple(o.name for o in config.output), maker, below, level, fits)


def _dims(config: Any, dims: Any) -> tuple[tuple[int, ...], bool]:
    return tuple(dims), config.max_batch_size > 0


def _unknown(label: str, kind: str, own: str, tensor: str, known: Any) -> str:
    return (
        f"{label} maps {kind} '{own}' to tensor '{tensor}', but its model has no such {kind}; it has "
        f"{sorted(known)}"
    )


def _same(here: Sequence[str | int], name: str, tensor: str, a: _Use, b: _Use, report: Report) -> None:
    if a.data_type != b.data_type:
        report(
            here,
            f"in ensemble '{name}', tensor '{tensor}' is {datatypes.CONFIG_NAME.get(a.data_type)} in {a.where} "
            f"and {datatypes.CONFIG_NAME.get(b.data_type)} in {b.where}",
        )
    # a model without batches may take or make their dimension as an ordinary one, or one item of them (Fit)
    open_rank = not a.dims or not b.dims
    if not open_rank and not _matches(a.full, b.full) and not _matches(a.dims, b.dims):
        report(
            here,
            f"in ensemble '{name}', tensor '{tensor}' has shape {list(a.full)} in {a.where} and "
            f"{list(b.full)} in {b.where}",
        )


def _below(
    name: str, steps: list[Step], maker: dict[str, int], report: Report
) -> dict[int, frozenset[int]] | None:
    """The steps that depend on each step; None after reporting a step that depends on itself."""
    direct: dict[int, set[int]] = {s.index: set() for s in steps}
    for step in steps:
        for tensor in step.needs:
            if tensor in maker:
                direct[maker[tensor]].add(step.index)
    found: dict[int, frozenset[int]] = {}
    for step in steps:
        around = _find_below(step.index, (), direct, found)
        if around:
            cycle = " -> ".join(f"'{steps[i].model_name}'" for i in around)
            report((*STEP, around[-1]), f"ensemble '{name}' has a cycle: {cycle}")
            return None
    return found


def _find_below(
    index: int, path: tuple[int, ...], direct: dict[int, set[int]], found: dict[int, frozenset[int]]
) -> tuple[int, ...]:
    """Adds a step and those that depend on it to `found`. Returns the steps of a cycle if there is one, else ()."""
    if index in path:
        return (*path[path.index(index) :], index)
    if index not in found:
        reached = set(direct[index])
        for after in direct[index]:
            around = _find_below(after, (*path, index), direct, found)
            if around:
                return around
            reached |= found[after]
        found[index] = frozenset(reached)
    return ()


def _single_source(name: str, steps: list[Step], below: dict[int, frozenset[int]], report: Report) -> None:
    """Refuses joins of two unrelated decoupled steps: their responses have no common index by which to join them."""
    sources = [s.index for s in steps if s.decoupled]
    for i in sources:
        for j in sources:
            if i < j and j not in below[i] and i not in below[j]:
                report(
                    (*STEP, j),
                    f"ensemble '{name}' has two decoupled steps that do not follow each other (models "
                    f"'{steps[i].model_name}' and '{steps[j].model_name}'): their responses cannot be paired",
                )


def _waits(graph: Graph, lookup: Callable[[str, str], Any]) -> dict[int, Wait]:
    """What decoupled steps keep while their senders wait, and what has to execute meanwhile: the steps below them, and those
    beside them, without which nothing can be answered. What earlier steps have sent is there."""
    takes = [_takes(step.model_name, step.model_version, lookup) for step in graph.steps]
    return {
        step.index: Wait(
            takes[step.index],
            frozenset[tuple[str, str]]().union(
                *(
                    takes[other.index]
                    for other in graph.steps
                    if other is not step and step.index not in graph.below[other.index]
                )
            ),
        )
        for step in graph.steps
        if step.decoupled
    }


def _takes(name: str, version: str, lookup: Callable[[str, str], Any]) -> frozenset[tuple[str, str]]:
    """What a request of that model keeps others from while it is executed: the model, those of an ensemble's steps, and what
    they need of the rate limiter."""
    config = lookup(name, version).config
    found = {("model", config.name or name)}
    for group in config.instance_group:
        found.update(("resource", resource.name) for resource in group.rate_limiter.resources)
    for step in config.ensemble_scheduling.step:
        found |= _takes(step.model_name, str(step.model_version) if step.model_version > 0 else "", lookup)
    return frozenset(found)
