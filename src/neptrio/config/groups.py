"""Instance groups: which instances a configuration asks for, and what must change when the groups change.

Two instances are interchangeable when they are on the same device and their groups differ at most in name
and count. A change of the groups keeps as many instances of each such kind as it can (docs/protocol/rules.md E4.5).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from neptrio.config import version_labels

KINDS = {1: "GPU", 2: "CPU", 3: "MODEL"}


@dataclass(frozen=True)
class Placement:
    """Where one instance is to run: its group (a ModelInstanceGroup), its kind and its device."""

    group: Any
    kind: str
    device: int
    index: int  # its number within its group and device

    @property
    def name(self) -> str:
        """The name of an instance made for this place, unless an older instance has that name already."""
        return f"{self.group.name}_{self.index}"

    @property
    def key(self) -> tuple[bytes, str, int]:
        """Equal for two places whose instances are interchangeable."""
        plain = type(self.group)()
        plain.CopyFrom(self.group)
        plain.ClearField("name")
        plain.ClearField("count")
        plain.ClearField("gpus")  # the place's own `device` replaces the group's list
        return plain.SerializeToString(deterministic=True), self.kind, self.device


def placements(config: Any) -> Iterator[Placement]:
    """One place for each instance of a completed configuration, group by group."""
    for group in config.instance_group:
        kind = KINDS.get(group.kind, "CPU")
        for device in list(group.gpus) or [0] if kind == "GPU" else [0]:
            for index in range(group.count):
                yield Placement(group, kind, device, index)


def take_over(config: Any, other: Any) -> None:
    """Puts what changes in place of `other` into `config`: instance groups, version policy, labels and aliases."""
    del config.instance_group[:]
    config.instance_group.extend(other.instance_group)
    config.version_policy.CopyFrom(other.version_policy)
    version_labels.take_over(config, other)


def reset(config: Any, other: Any) -> Any:
    """A copy of `config` in which what changes in place is as in `other`."""
    made = type(config)()
    made.CopyFrom(config)
    take_over(made, other)
    return made


class Placed(Protocol):
    """What plan() needs to know of an instance."""

    placement: Placement | None


P = TypeVar("P", bound=Placed)


def plan(current: Sequence[P], wanted: Iterable[Placement]) -> tuple[list[Placement], list[P]]:
    """What a change of the groups means: (places that need a new instance, instances to retire).

    When there are more instances than places, the youngest are retired.
    """
    left: dict[Any, list[P]] = {}
    for instance in current:
        left.setdefault(instance.placement.key if instance.placement else None, []).append(instance)
    missing = []
    for place in wanted:
        same = left.get(place.key)
        if same:
            same.pop(0)
        else:
            missing.append(place)
    surplus = {id(instance) for same in left.values() for instance in same}
    return missing, [instance for instance in current if id(instance) in surplus]


def names(missing: Iterable[Placement], taken: Iterable[str]) -> list[str]:
    """A name for each place: the group's name and the lowest number that makes a name not in `taken`."""
    used = set(taken)
    found = []
    for place in missing:
        index, name = place.index, place.name
        while name in used:
            index += 1
            name = f"{place.group.name}_{index}"
        used.add(name)
        found.append(name)
    return found


def runs_on(config: Any, own_processes: bool = False) -> str:
    """Where a model's instances run: "2 x CPU", "1 x GPU 0, 1 x GPU 1", "2 x CPU, own processes"."""
    parts = []
    for group in config.instance_group:
        kind = KINDS.get(group.kind, "CPU")
        parts += (
            [f"{group.count} x {kind} {gpu}" for gpu in group.gpus]
            if kind == "GPU"
            else [f"{group.count} x {kind}"]
        )
    return ", ".join([*parts, "own processes"] if own_processes and parts else parts)
