"""The Python code of a model that ran in the server's process and has ended: what is left of it is freed.

The problem: a class, and a module with a function, refers to itself, so reference counts do not free them, and a look of the
garbage collector at all it has hidden (loop.collector) stops the process for every model of the server. The choice: the
objects that belong to the one model are shown to the collector as if they were new (loop/thaw) and let go.

Rules:
 1. They are looked at as soon as the model's object and modules have been let go, on the same thread, so that destructors
    run where the code has run.
 2. What somebody still refers to then, as a thread of the model, is looked at once more when the unload has ended.
 3. What is there even then, and a model of more than MOST objects, waits for the next complete look.
"""

from __future__ import annotations

import gc
import types
import weakref
from contextlib import suppress
from typing import Any

from neptrio.loop.thaw import thaw

# objects of one model: found in 40 ms, in pieces; looked at in 2 ms, and freed in 5 more
MOST = 50_000


class EndedCode:
    """The objects of one model's code. Any thread.

    `roots`: those from which the others are reached; `package`: the name of the package that its modules are in. Refers to
    none of them.
    """

    def __init__(self, roots: list[Any], package: str) -> None:
        self._package = package
        self._roots: list[weakref.ref[Any]] = []
        modules = [root for root in roots if issubclass(type(root), types.ModuleType)]
        # a module may end while its functions live on, which lead to all that was in it
        for root in (*roots, *(thing for module in modules for thing in _made_by(module))):
            with suppress(TypeError):  # None, or a class with __slots__
                self._roots.append(weakref.ref(root))
        self._shown = thaw(roots, package, MOST) >= 0

    def collect(self) -> None:
        """The roots have been let go: frees what nobody holds."""
        self._look()
        if self.alive():
            _still_there.append(self)

    def collect_again(self) -> None:
        """Shows what is still there to the collector, and frees what nobody holds."""
        roots = self.alive()
        if roots:
            self._shown = thaw(roots, self._package, MOST) >= 0
            roots.clear()
            self.collect()

    def _look(self) -> None:
        if self._shown:
            gc.collect(0)
        if self._shown and self.alive():
            gc.collect(1)  # an automatic look came in between

    def alive(self) -> list[Any]:
        """Those roots that are still there."""
        return [root for ref in self._roots if (root := ref()) is not None]


def _made_by(module: types.ModuleType) -> list[Any]:
    """The functions and classes that a module has made itself."""
    # not by isinstance(), which may ask the object
    found = [
        thing for thing in module.__dict__.values() if issubclass(type(thing), (types.FunctionType, type))
    ]
    return [thing for thing in found if thing.__module__ == module.__name__]


_still_there: list[EndedCode] = []


def collect_again() -> None:
    """An unload has ended: looks once more at what was still referred to when the code did (rule 2)."""
    ended = _still_there[:]
    del _still_there[: len(ended)]
    for code in ended:
        code.collect_again()


def is_there() -> bool:
    """Whether anything waits for a complete look (rule 3)."""
    return any(code.alive() for code in _still_there)


def forget() -> None:
    """There is a complete look now."""
    _still_there.clear()
