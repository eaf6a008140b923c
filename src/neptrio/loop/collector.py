"""When the garbage collector may look at what: at little at a time, and never at every model at once.

The problem: the collector stops the whole process while it looks at objects, 15 to 60 us for each model that was loaded
after the start. With 2,000 models the loop stood still for 30 ms and more. The choice: the server's own objects refer to
each other in such a way that reference counts free them, those of an unloaded model (repository.model.Model.stop) and those
of a closed connection. So what was looked at once and is in use needs no second look: it is frozen, which hides it from
the collector, before there is too much of it. A look at all that was frozen comes only when the process has grown by more
than its models explain, which other people's code may have left, and then in slices (loop/sliced_look).

    young objects          looked at by CPython after YOUNG new ones, and at the end of each load
      those that survived  looked at, once more, when a look would take DUE_NS
        frozen ones        looked at when the process has grown (Growth)

Rules:
 1. Only a process of our own is set up so, never the program that embeds a server.
 2. What the start has made is frozen.
 3. At the end of a load the young objects are collected, which are its own.
 4. How long a look at those that survived would take is estimated by what the looks took that they survived, in time of
    the processor. At DUE_NS there is one. Above MOST_NS (thousands of connections in a second) they are frozen unseen.
 5. They are frozen only if that look has taken long, so with few models everything is looked at again and again, and
    nothing that is left in a cycle is lost.
 6. Frozen objects are looked at (a complete look) if there are such since the last one, and at rest, if the process has grown
    by a quarter more than its models explain, or there is MUCH that was frozen while models' Python code runs in this
    process or nobody counts its memory (PYTHONMALLOC=malloc); where the server never rests, if it has become twice as
    large.
 7. A complete look is made in slices of SLICE_NS with rests between them, so nobody waits for it. Where that is not possible
    (sliced_look.prepare) it is made at once.
 8. When a model whose Python code ran in this process ends, the objects that belong to it are looked at and no others: they
    are looked at as if they were young (loop.ended_code). What is there even after the unload is looked for at rest.
"""

from __future__ import annotations

import enum
import gc
import sys
import time
from collections.abc import Callable

import trio

from neptrio.loop import ended_code, sliced_look

YOUNG = 2_000  # objects that were made and not freed until young ones are looked at: 0.1 to 0.3 ms
MIDDLE = 0  # every second look at the youngest is one at those that survived the first, too
NEVER = 1 << 30  # looks at those until CPython looks at all by itself

DUE_NS = 500_000
MOST_NS = 1_000_000
MUCH = 10  # times that objects were frozen

MODEL_BLOCKS = 300  # of memory that a small model takes
LOOK_SECONDS = 1.0
CALM_LOOKS = 2
FEW_PASSES = 20  # of the loop between two looks: timers and probes, no clients that ask again and again

SLICE_NS = 100_000
REST_SECONDS = 0.001


class Step(enum.Enum):
    """What is to be done with the objects that survived."""

    NOTHING = enum.auto()
    LOOK = enum.auto()
    FREEZE = enum.auto()


class Survivors:
    """How long a look at the objects that survived would take, in nanoseconds (rules 4 and 5)."""

    def __init__(self) -> None:
        self._ns = 0

    def more(self, ns: int) -> None:
        """A look at young objects took so long."""
        self._ns += ns

    def step(self) -> Step:
        """What is to be done now. After LOOK looked() is to be called, after FREEZE frozen()."""
        if self._ns < DUE_NS:
            return Step.NOTHING
        return Step.LOOK if self._ns <= MOST_NS else Step.FREEZE

    def looked(self, ns: int) -> Step:
        """The look took so long. NOTHING: they stay as they are, FREEZE: they are too many for another look."""
        self._ns = ns
        return Step.FREEZE if ns >= DUE_NS // 2 else Step.NOTHING

    def frozen(self) -> None:
        """There are none any more."""
        self._ns = 0


class Growth:
    """Decides when a complete look may be (rule 6)."""

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
_survivors = Survivors()
_freezes = 0  # since the last complete look
_looks = 0  # complete ones
_blocks = 0  # of memory after the last of them
_began = 0
_looking = False  # whether the collector is in the middle of a look
_in_slices = False  # whether a complete look can be made in slices


def set_up() -> None:
    """The process is ready to serve: makes the collector look at little (rules 1 and 2). Requests make almost no cycles."""
    global _ours, _in_slices
    gc.disable()  # it was off since cli.main: while modules are imported it finds nothing
    _in_slices = sliced_look.prepare()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)
    gc.callbacks.append(_told)
    gc.enable()
    _ours = True
    _hide_all()


def settled() -> None:
    """Imports that went on while the server served have ended: what they made belongs to the start (rule 2).

    Only the youngest are looked at: a look at all that was imported takes 10 ms, and has found nothing to free.
    """
    gc.collect(1)
    _hide_all()


def loaded() -> None:
    """A load has ended (rule 3). Takes some hundredths of a millisecond, now and then half a millisecond."""
    if _ours:
        gc.collect(1)
        _look()


def unloaded() -> None:
    """The unload of a model whose Python code ran in this process has ended (rule 7). Any thread.

    In a program that embeds the server everything is looked at: nothing is hidden from the collector there.
    """
    if _ours:
        ended_code.collect_again()
    else:
        ended_code.forget()
        gc.collect()


def _told(phase: str, info: dict[str, int]) -> None:
    """Called by the collector before and after each look, in the thread that it runs on; measures those that objects survive."""
    global _began, _looking
    _looking = phase == "start"
    if info["generation"] == 1:
        if phase == "start":
            _began = time.thread_time_ns()
        else:
            _survivors.more(time.thread_time_ns() - _began)


def _look() -> None:
    """Looks at what survived, if that is due (rules 4 and 5)."""
    step = _survivors.step()
    if step is Step.LOOK:
        began = time.thread_time_ns()
        gc.collect()
        step = _survivors.looked(time.thread_time_ns() - began)
    elif step is Step.FREEZE:
        gc.collect(1)  # the youngest were not looked at yet
    if step is Step.FREEZE:
        _freeze()


def _freeze() -> None:
    global _freezes
    gc.freeze()
    _freezes += 1
    _survivors.frozen()


async def _look_at_all() -> None:
    """A complete look (rule 7)."""
    ended_code.forget()
    if _in_slices:
        await _look_in_slices()
    else:
        gc.unfreeze()
        gc.collect()
        _hide_all()


async def _look_in_slices() -> None:
    before, shown = _freezes, 0
    look = sliced_look.SlicedLook()
    while True:
        if not _looking:  # on another thread: finalizers, which let others run
            more = look.step(SLICE_NS)
            if look.objects_shown > shown:
                shown = look.objects_shown
                gc.collect(0)
            if not more:
                break
        await trio.sleep(REST_SECONDS)
    gc.collect(1)  # what was shown before other garbage that referred to it
    _looked_at_all(before)


def _hide_all() -> None:
    gc.freeze()
    _survivors.frozen()
    _looked_at_all(_freezes)


def _looked_at_all(freezes: int) -> None:
    """There was a complete look at what so many freezings had hidden."""
    global _freezes, _looks, _blocks
    _freezes -= freezes
    _looks += 1
    _blocks = sys.getallocatedblocks()


async def collect(
    passes: Callable[[], int],
    models: Callable[[], int] = lambda: 0,
    code_here: Callable[[], bool] = lambda: False,
) -> None:
    """Looks at objects when it is due until it is cancelled, if the process is set up so.

    `passes`: how many passes the loop has made; `models`: how many models there are; `code_here`: whether the Python code of
    one runs in this process.
    """
    growth = Growth()
    looks = 0
    while True:
        await trio.sleep(LOOK_SECONDS)
        rests = growth.rests(passes())
        if not _ours:
            continue
        _look()
        if rests and ended_code.is_there():
            await _look_at_all()
        elif looks == _looks and _freezes:
            much = rests and _freezes >= MUCH and (code_here() or not _blocks)
            if much or growth.too_much(sys.getallocatedblocks(), models, rests):
                await _look_at_all()
        if looks != _looks:
            looks = _looks
            growth.looked(_blocks, models())
