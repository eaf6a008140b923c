"""Which loaded models are put away for room, and what keeps the others. Nothing here waits or reads a clock.

Rules:
 1. The model that was used longest ago goes first.
 2. A model stays while it has requests or live sequences, for the least time after its load, while it is a step of an
    ensemble that stays, and where its owner keeps it: by `keep_loaded`, or by having loaded it otherwise than on demand.
 3. Where all that could go is less than what is needed, nothing goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum

SHOWN = 3  # models that an error names


HOST = -1  # the place of which a budget without a device is; others are GPUs, by their numbers


class Hold(Enum):
    """Why a model stays."""

    REQUESTS = "has requests under way"
    FRESH = "was loaded a moment ago"
    LOADING = "is being loaded"
    LEAVING = "is being put away"
    GIVEN_UP = "its load was given up, and has not ended"
    SEQUENCES = "has live sequences"
    KEPT = "keep_loaded"
    BY_HAND = "was not loaded on demand"

    @property
    def passes(self) -> bool:
        """Whether it soon may be otherwise."""
        return self.ends or self in (Hold.REQUESTS, Hold.FRESH)

    @property
    def ends(self) -> bool:
        """Whether what is held becomes less by itself, whoever waits."""
        return self in (Hold.LOADING, Hold.LEAVING, Hold.GIVEN_UP)


@dataclass(frozen=True)
class Holder:
    """A model that holds memory."""

    name: str
    size: int  # bytes
    used_ms: int  # when it was used last
    hold: Hold | None = None
    needed_by: tuple[str, ...] = ()  # ensembles that serve or are loaded, with this model as a step
    steps: bool = False  # it is an ensemble: once it is put away, the models of its steps can be
    devices: Mapping[int, int] = field(default_factory=dict)  # GPU -> bytes of its memory

    def at(self, place: int) -> Holder:
        """The same, with the bytes that it holds in that place as its size."""
        return self if place == HOST else replace(self, size=self.devices.get(place, 0))


def choose(holders: Sequence[Holder], need: int) -> list[Holder]:
    """What to put away now for `need` bytes, in order; [] where waiting has no point. It may be less than needed, where
    other models may be put away soon."""
    if need <= 0 or not hopeful(holders, need):
        return []
    left = sorted(holders, key=lambda holder: holder.used_ms)
    chosen: dict[str, Holder] = {}
    freed = 0
    while freed < need:
        for holder in left:
            if (
                holder.hold is None
                and (holder.size or holder.steps)
                and chosen.keys() >= set(holder.needed_by)
            ):
                break
        else:
            break
        left.remove(holder)
        chosen[holder.name] = holder
        freed += holder.size
    return list(chosen.values()) if freed else []


def staying(holders: Iterable[Holder], together: Set[str] = frozenset()) -> set[str]:
    """The models that stay until somebody does something about it. Those `together` do, too, once they are loaded."""
    every = {holder.name: holder for holder in holders}
    found = {
        name
        for name, holder in every.items()
        if (holder.hold is not None and not holder.hold.passes)
        or (name in together and not (holder.hold is not None and holder.hold.ends))
    }
    more = True
    while more:  # steps of ensembles that stay, which may be ensembles themselves
        more = False
        for name, holder in every.items():
            if name not in found and not found.isdisjoint(holder.needed_by):
                found.add(name)
                more = True
    return found


def hopeful(holders: Sequence[Holder], need: int, together: Set[str] = frozenset()) -> bool:
    """Whether so many bytes can be put away, now or soon. `together`: the other steps of an ensemble that waits for the bytes."""
    kept = staying(holders, together)
    return sum(holder.size for holder in holders if holder.name not in kept) >= need


def idle(holder: Holder, seconds: float, now_ms: int) -> bool:
    """Whether a model that may go was not used for so long."""
    return holder.hold is None and not holder.needed_by and now_ms - holder.used_ms >= seconds * 1000


def size_text(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"


def budget_text(place: int, limit: int) -> str:
    """A budget as a flag."""
    return f"--model-memory-budget={'' if place == HOST else f'gpu:{place}='}{size_text(limit)}"


def who_holds(holders: Iterable[Holder]) -> str:
    """Who holds the most, and why that stays."""
    largest = sorted((one for one in holders if one.size), key=lambda one: -one.size)
    told = [
        f"'{one.name}' {size_text(one.size)}"
        + (
            f" ({one.hold.value})"
            if one.hold is not None
            else f" (step of '{one.needed_by[0]}')"
            if one.needed_by
            else ""
        )
        for one in largest[:SHOWN]
    ]
    more = f" and {len(largest) - SHOWN} more" if len(largest) > SHOWN else ""
    return f"{', '.join(told)}{more}" if told else "nobody"
