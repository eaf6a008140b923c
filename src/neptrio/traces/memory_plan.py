"""What different budgets of memory would have meant for recorded traffic: `neptrio explain --memory`.

The problem: a budget that is too small makes requests wait for loads, and one that is too large is memory that nobody else can
use; which is which depends on who asks for what, and in which order. The choice: the requests of a trace file are played, in
their order, against a store of models that puts away the one that was used longest ago, once for each of some budgets.

Rules:
 1. A use is a request of the file, also one that an ensemble or a model made. The first use of a model waits for its load
    under any budget; those are counted apart.
 2. A load takes no time here, and a model that is in use can be put away: requests that overlap want a little more memory.
 3. A model that is larger than a budget is never loaded under it: all its uses wait.
Source: repository.putting_away, rule 1.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from neptrio.traces.reader import Trace

POINTS = 8  # budgets that are tried
FEW = 0.01  # a budget under which fewer requests than this wait again is enough


@dataclass(frozen=True)
class Size:
    """What is known of a model."""

    held: int  # bytes that it holds while it is loaded
    seconds: float = 0.0  # its load; 0: not known
    measured: bool = True  # False: by the sizes of its files


@dataclass(frozen=True)
class Outcome:
    """What a budget would have meant."""

    budget: int  # bytes
    again: int  # loads of models that had been loaded before
    waits: Counter[str] = field(compare=False)  # model -> its uses that waited for a load, the first included
    seconds: float = 0.0  # that those loads take


class Uses:
    """Who was asked for, and when."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._when, self._whom = array("q"), array("l")

    def add(self, trace: Trace) -> None:
        """Another trace of the file, in any order."""
        if trace.model and trace.times:
            self._when.append(min(ns for ns, _ in trace.times))
            self._whom.append(self._numbers.setdefault(trace.model, len(self._numbers)))

    def __len__(self) -> int:
        return len(self._when)

    @property
    def seconds(self) -> float:
        """From the first to the last."""
        return (max(self._when) - min(self._when)) / 1e9 if self._when else 0.0

    def counts(self) -> Counter[str]:
        """Uses by model."""
        names = list(self._numbers)
        return Counter({names[number]: count for number, count in Counter(self._whom).items()})

    def in_order(self) -> list[str]:
        """The models of all uses, the first use first."""
        names = list(self._numbers)
        return [names[self._whom[i]] for i in sorted(range(len(self._when)), key=self._when.__getitem__)]


def played(order: Sequence[str], sizes: Mapping[str, Size], budget: int) -> Outcome:
    """What happens to uses in that order."""
    loaded: OrderedDict[str, int] = OrderedDict()  # used longest ago first
    held = again = 0
    seconds = 0.0
    before: set[str] = set()
    waits: Counter[str] = Counter()
    for name in order:
        if name in loaded:
            loaded.move_to_end(name)
            continue
        size = sizes[name]
        waits[name] += 1
        again += name in before
        before.add(name)
        seconds += size.seconds
        if size.held > budget:
            continue
        held += size.held
        while held > budget:
            held -= loaded.popitem(last=False)[1]
        loaded[name] = size.held
    return Outcome(budget, again, waits, seconds)


def outcomes(order: Sequence[str], sizes: Mapping[str, Size]) -> list[Outcome]:
    """For budgets from that of the largest model to that of all together, the smallest first."""
    asked = set(order)
    least = max((sizes[name].held for name in asked), default=0)
    most = sum(sizes[name].held for name in asked)
    step = (most - least) / (POINTS - 1)
    budgets = dict.fromkeys(round(least + step * i) for i in range(POINTS))
    return [played(order, sizes, budget) for budget in budgets]


def enough(found: Sequence[Outcome], uses: int) -> Outcome:
    """The smallest budget under which hardly any request waits for a load that could have been spared."""
    return next((one for one in found if one.again <= FEW * uses), found[-1])
