"""When the garbage collector may look at what: at young objects, and at everything only where there is a reason.

The problem: the collector stops the whole process while it looks at objects, 15 to 60 us for each model that was loaded.
With 2,000 models the loop stood still for 30 ms and more. The choice: the server's own objects refer to each other in such a
way that reference counts free them, those of an unloaded model (repository.model.Model.stop) and those of a closed
connection. So what was looked at once and is in use needs no second look. A complete look comes only when the process
has grown by more than its models explain, which other people's code may have left, and when a model ends whose code ran here.

Rules:
 1. Only a process of our own is set up so, never the program that embeds a server.
 2. What the start has made is frozen, which hides it from the collector.
 3. At the end of a load the young objects are collected, which are its own.
 4. A complete look is made at rest if the process has grown by a quarter more than its models explain, since the start has
    ended or the last such look; where the server never rests, if it has become twice as large. It stops the process. Where
    nobody counts what Python's objects take (PYTHONMALLOC=malloc), CPython decides when.
 5. The code of a model that ran in this process refers to itself: when such models end there is a complete look, one for
    all that end together.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable

from neptrio.loop import periodic

log = logging.getLogger("neptrio.server")

YOUNG = 2_000  # objects that were made and not freed until young ones are looked at: 0.1 to 0.3 ms
MIDDLE = 0  # every second look at the youngest is one at those that survived the first, too
NEVER = 1 << 30  # looks at those until CPython looks at all by itself
OFTEN = 10

MODEL_BLOCKS = 300  # of memory that a small model takes
LOOK_SECONDS = 1.0
CALM_LOOKS = 2
FEW_PASSES = 20  # of the loop between two looks: timers and probes, no clients that ask again and again


class Growth:
    """Decides when a complete look may be (rule 4)."""

    def __init__(self) -> None:
        self._passes = 0
        self._calm = 0
        self._blocks = 0
        self._models = 0

    def looked(self, blocks: int, models: int) -> None:
        """There was a complete look. `blocks`: the pieces of memory that Python objects take now; `models`: how many models
        there are."""
        self._blocks = blocks
        self._models = models

    def rests(self, passes: int) -> bool:
        """Called every LOOK_SECONDS with how many passes the loop has made: whether it has had next to nothing to do."""
        calm = passes - self._passes <= FEW_PASSES
        self._passes = passes
        self._calm = self._calm + 1 if calm else 0
        return self._calm >= CALM_LOOKS

    def too_much(self, blocks: int, models: Callable[[], int], rests: bool) -> bool:
        """Whether there is more than models explain: by a quarter at rest, and otherwise by as much again."""
        part = 4 if rests else 1
        if blocks < self._blocks - self._blocks // 8:
            self.looked(blocks, models())  # models have gone: what comes now is measured by what is left
        if blocks <= self._blocks + self._blocks // part:
            return False
        explained = max(0, self._blocks + (models() - self._models) * MODEL_BLOCKS)
        return blocks > explained + explained // part


_ours = False


def set_up() -> None:
    """The process is ready to serve: makes the collector look at little (rules 1 and 2). Requests make almost no cycles."""
    global _ours
    gc.disable()  # it was off since cli.main: while modules are imported it finds nothing
    gc.set_threshold(YOUNG, MIDDLE, NEVER if sys.getallocatedblocks() else OFTEN)
    gc.enable()
    _ours = True
    gc.freeze()


def settled() -> None:
    """Imports that went on while the server served have ended: what they made belongs to the start (rule 2).

    Only the youngest are looked at: a look at all that was imported takes 10 ms, and has found nothing to free.
    """
    gc.collect(1)
    gc.freeze()


def loaded() -> None:
    """A load has ended (rule 3). Takes some hundredths of a millisecond."""
    if _ours:
        gc.collect(1)


def look_at_all() -> None:
    """A complete look, at what is frozen too. Any thread; all others wait for it.

    In a program that embeds the server nothing is frozen by us, and nothing that the program has frozen is shown.
    """
    if _ours:
        gc.unfreeze()
    gc.collect()
    if _ours:
        gc.freeze()


async def collect(passes: Callable[[], int], models: Callable[[], int] = lambda: 0) -> None:
    """Looks at all when it is due until it is cancelled, if the process is set up so. Growth counts from its call.

    `passes`: how many passes the loop has made; `models`: how many models there are.
    """
    growth = Growth()
    growth.looked(sys.getallocatedblocks(), models())

    async def look() -> None:
        rests = growth.rests(passes())
        if _ours and growth.too_much(sys.getallocatedblocks(), models, rests):
            look_at_all()
            growth.looked(sys.getallocatedblocks(), models())

    await periodic.for_ever(LOOK_SECONDS, look, "looking whether the garbage collector is needed", log)
