"""An ensemble's graph: which step needs which tensors, checked against the models it names.

Pure: a configuration and the models' tensors in, a graph or an InvalidArgument out.
Source: spec/features.md A4 and A5, spec/rules.md E4.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from neptrio import datatypes
from neptrio.errors import InvalidArgument


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
        """The ensemble tensors without which the step cannot start."""
        return frozenset(tensor for _, tensor in self.inputs)


@dataclass(frozen=True)
class Graph:
    """The steps in configuration order and what they make."""

    steps: tuple[Step, ...]
    inputs: frozenset[str]
    outputs: tuple[str, ...]  # in configuration order
    maker: dict[str, int]  # tensor -> index of the step that makes it
    below: dict[int, frozenset[int]]  # step -> the steps that depend on it, directly or not
    level: tuple[int, ...]  # per step: how many decoupled steps it depends on

    @property
    def decoupled(self) -> bool:
        """True when a step may answer any number of times."""
        return any(step.decoupled for step in self.steps)

    def depth(self, needed: frozenset[int]) -> int:
        """How many decoupled steps follow one another among those needed."""
        return sum(1 for step in self.steps if step.decoupled and step.index in needed)

    def needed_for(self, outputs: Iterable[str]) -> frozenset[int]:
        """The steps without which these outputs cannot be made."""
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
    """Where a tensor was seen, for messages and for consistency."""

    where: str
    data_type: int
    dims: tuple[int, ...]


def child_names(config: Any) -> list[str]:
    """The models an ensemble is composed of, each once, in configuration order."""
    return list(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))


def build(config: Any, lookup: Callable[[str, str], Any]) -> Graph:
    """The graph of an ensemble's configuration.

    `lookup(name, version)` returns an object with `config` of a ready model, or raises.
    Raises InvalidArgument naming the step and the tensor that is wrong.
    """
    name = config.name
    if not config.ensemble_scheduling.step:
        raise InvalidArgument(f"must specify 'step' for ensemble '{name}', got none")
    seen: dict[str, _Use] = {
        i.name: _Use("an ensemble input", i.data_type, _full(config, i.dims)) for i in config.input
    }
    inputs = frozenset(seen)
    maker: dict[str, int] = {}
    steps = []
    consumed: list[tuple[Step, str, _Use]] = []
    for index, raw in enumerate(config.ensemble_scheduling.step):
        version = str(raw.model_version) if raw.model_version > 0 else ""
        child = lookup(raw.model_name, version).config
        label = f"step {index} (model '{raw.model_name}') of ensemble '{name}'"
        step = Step(
            index,
            raw.model_name,
            version,
            tuple(sorted(raw.input_map.items())),
            tuple(sorted(raw.output_map.items())),
            child.model_transaction_policy.decoupled,
        )
        child_inputs = {i.name: i for i in child.input}
        child_outputs = {o.name: o for o in child.output}
        for own, tensor in step.inputs:
            if own not in child_inputs:
                raise InvalidArgument(_unknown(label, "input", own, tensor, child_inputs))
            use = _Use(label, child_inputs[own].data_type, _full(child, child_inputs[own].dims))
            consumed.append((step, tensor, use))
        missing = [i.name for i in child.input if not i.optional and i.name not in dict(step.inputs)]
        if missing:
            raise InvalidArgument(f"{label} leaves required input(s) {missing} of its model unmapped")
        for own, tensor in step.outputs:
            if own not in child_outputs:
                raise InvalidArgument(_unknown(label, "output", own, tensor, child_outputs))
            if tensor in inputs or tensor in maker:
                other = "an ensemble input" if tensor in inputs else f"step {maker[tensor]}"
                raise InvalidArgument(f"{label} makes tensor '{tensor}', which is {other}'s already")
            maker[tensor] = index
            seen[tensor] = _Use(label, child_outputs[own].data_type, _full(child, child_outputs[own].dims))
        steps.append(step)
    for step, tensor, use in consumed:
        made = seen.get(tensor)
        if made is None:
            raise InvalidArgument(
                f"{use.where} needs tensor '{tensor}', which is neither an ensemble input nor made by a step"
            )
        _same(name, tensor, made, use)
        del step
    for o in config.output:
        if o.name not in maker:
            raise InvalidArgument(f"output '{o.name}' of ensemble '{name}' is made by no step")
        _same(name, o.name, seen[o.name], _Use("an ensemble output", o.data_type, _full(config, o.dims)))
    below = _below(name, steps, maker)
    _single_source(name, steps, below)
    level = tuple(sum(1 for d in steps if d.decoupled and s.index in below[d.index]) for s in steps)
    return Graph(tuple(steps), inputs, tuple(o.name for o in config.output), maker, below, level)


def _full(config: Any, dims: Any) -> tuple[int, ...]:
    return ((-1, *dims)) if config.max_batch_size > 0 else tuple(dims)


def _unknown(label: str, kind: str, own: str, tensor: str, known: Any) -> str:
    return (
        f"{label} maps {kind} '{own}' to tensor '{tensor}', but its model has no such {kind}; it has "
        f"{sorted(known)}"
    )


def _same(name: str, tensor: str, a: _Use, b: _Use) -> None:
    if a.data_type != b.data_type:
        raise InvalidArgument(
            f"in ensemble '{name}', tensor '{tensor}' is {datatypes.CONFIG_NAME.get(a.data_type)} in {a.where} "
            f"and {datatypes.CONFIG_NAME.get(b.data_type)} in {b.where}"
        )
    # a model without batching may take or make the batch dimension as an ordinary one
    fits = len(a.dims) == len(b.dims) and all(
        x == y or x < 0 or y < 0 for x, y in zip(a.dims, b.dims, strict=True)
    )
    if not fits:
        raise InvalidArgument(
            f"in ensemble '{name}', tensor '{tensor}' has shape {list(a.dims)} in {a.where} and "
            f"{list(b.dims)} in {b.where}"
        )


def _below(name: str, steps: list[Step], maker: dict[str, int]) -> dict[int, frozenset[int]]:
    direct: dict[int, set[int]] = {s.index: set() for s in steps}
    for step in steps:
        for tensor in step.needs:
            if tensor in maker:
                direct[maker[tensor]].add(step.index)
    found: dict[int, frozenset[int]] = {}

    def visit(index: int, path: tuple[int, ...]) -> frozenset[int]:
        if index in path:
            cycle = " -> ".join(f"'{steps[i].model_name}'" for i in (*path[path.index(index) :], index))
            raise InvalidArgument(f"ensemble '{name}' has a cycle: {cycle}")
        if index not in found:
            reached = set(direct[index])
            for after in direct[index]:
                reached |= visit(after, (*path, index))
            found[index] = frozenset(reached)
        return found[index]

    for step in steps:
        visit(step.index, ())
    return found


def _single_source(name: str, steps: list[Step], below: dict[int, frozenset[int]]) -> None:
    """Responses of two unrelated decoupled steps have no common index: they cannot be joined."""
    sources = [s.index for s in steps if s.decoupled]
    for i in sources:
        for j in sources:
            if i < j and j not in below[i] and i not in below[j]:
                raise InvalidArgument(
                    f"ensemble '{name}' has two decoupled steps that do not follow each other (models "
                    f"'{steps[i].model_name}' and '{steps[j].model_name}'): their responses cannot be paired"
                )
