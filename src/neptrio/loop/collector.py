"""When the garbage collector may look at what: never at every model while somebody is served.

The problem: the collector stops the whole process while it looks at objects, about 15 us for each model that was loaded
after the start. With 2,000 models the loop stood still for 30 ms after each unload. The choice: the server's own objects
refer to each other in such a way that reference counts free them, above all those of an unloaded model
(repository.model.Model.stop). Then a full collection finds only what other people's code has left, and can wait until
nobody is there.

Rules:
 1. Only a process of our own is set up so, never the program that embeds a server.
 2. What the start has made is frozen: no collection looks at it.
 3. At the end of a load the young objects are collected, which are its own. What survives is old, and seen by full collections
    only. Without that the objects of many loads would be young together, and be looked at together.
 4. A full collection comes when DUE collections of young objects have passed and the server rests. One that never rests
    has one after SELDOM of them, and only if the old objects have grown by a quarter (CPython's own rule).
 5. The unload of a model whose Python code ran in this process collects everything at once (observe.memory.give_back).
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import trio

YOUNG = 20_000  # objects that were made and not freed until young ones are looked at: 1 to 3 ms
MIDDLE = 20  # looks at the youngest until those that survived are looked at, too
DUE = 100  # looks at all young objects; each is behind a load, or behind a million small requests
SELDOM = 10_000

LOOK_SECONDS = 1.0
CALM_LOOKS = 2
FEW_PASSES = 20  # of the loop between two looks: timers and probes, no clients that ask again and again

_ours = False


def set_up() -> None:
    """The server is ready to serve: makes the collector run rarely (rules 1 and 2). Requests make almost no cycles."""
    global _ours
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, SELDOM)
    gc.enable()  # it was off since cli.main: while modules are imported it finds nothing
    _ours = True


def loaded() -> None:
    """A load has ended (rule 3). Takes some hundredths of a millisecond."""
    if _ours:
        gc.collect(1)


def everything() -> None:
    """A model whose Python code ran in this process is gone (rule 5). What the start has made is looked at, too, from now
    on: the model may be of it, and the next one."""
    if _ours:
        gc.unfreeze()
    gc.collect()


class Rest:
    """Decides when a full collection may be (rule 4)."""

    def __init__(self) -> None:
        self._passes = 0
        self._calm = 0

    def look(self, passes: int, collections: int) -> bool:
        """Called every LOOK_SECONDS with how many passes the loop has made, and how many collections of young objects there
        were since the last full one. True: collect now."""
        calm = passes - self._passes <= FEW_PASSES
        self._passes = passes
        self._calm = self._calm + 1 if calm else 0
        return self._calm >= CALM_LOOKS and collections >= DUE


async def collect_at_rest(passes: Callable[[], int]) -> None:
    """Collects by rule 4 until it is cancelled; see Rest.look() for `passes`."""
    rest = Rest()
    while True:
        await trio.sleep(LOOK_SECONDS)
        if rest.look(passes(), gc.get_count()[2]) and _ours:
            gc.collect()
