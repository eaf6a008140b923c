"""Gives back what ONNX Runtime holds on a GPU: sessions, and tensors that were left there.

The problem: such a free may wait for everything that runs on the device, for ever while a kernel hangs, and Python makes
it wherever the last reference dies, on the trio thread too. The choice: a thread for each GPU, besides the device's own,
which our own models need.

Rules:
 1. Nobody waits for this thread without a limit. It is a daemon: the process can end while it hangs.
 2. A session is released when nothing seems to hang on its device (Device.later), or later.
 3. What lies on a GPU that was given up is never freed, not even when the interpreter ends: that may hang, too.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from neptrio import process_parts
from neptrio.backends.kernel.driver_thread import DriverThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from neptrio.backends.kernel.device import Device

log = logging.getLogger("neptrio.onnx")

WAIT_SECONDS = 10.0  # how long an unload waits for the release of a session
AGAIN_SECONDS = 1.0  # after so long it is asked again whether something hangs


class Held:
    """Holds a tensor of ONNX Runtime on a GPU, for a Tensor that may die on any thread."""

    __slots__ = ("_box", "_releases")

    def __init__(self, value: Any, releases: Releases) -> None:
        # whoever dropped the value itself would have a reference for a moment longer than the thread that is to free it
        self._box = [value]
        self._releases = releases

    def __del__(self) -> None:
        self._releases.drop(self._box)


class Release:
    """The release of one session."""

    def __init__(self, session: Any, begins: Callable[[Release], None], done: Callable[[], None]) -> None:
        self._session = session
        self._begins = begins
        self._done = done
        self.begun = False
        self.ended = threading.Event()

    def begin(self) -> None:
        """On the releases' thread."""
        self.begun = True
        self._begins(self)
        session, self._session = self._session, None
        session.close()
        self.ended.set()
        self._done()


class Releases:
    """The thread of one GPU. Use of()."""

    _made: dict[int, Releases] = {}  # noqa: RUF012
    _lock = threading.Lock()

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._thread = DriverThread(f"onnx-gpu-{ordinal}")
        self._waiting: list[Release] = []
        self._ended = 0
        self.given_up = False  # rule 3
        self.hangs = False  # a run does not return

    @classmethod
    def of(cls, ordinal: int) -> Releases:
        """Those of a GPU. Any thread."""
        with cls._lock:
            if ordinal not in cls._made:
                cls._made[ordinal] = cls(ordinal)
            return cls._made[ordinal]

    def progress(self) -> tuple[int, int]:
        """How many releases are under way, and how many have ended (Device.queues)."""
        return sum(release.begun for release in list(self._waiting)), self._ended

    def watch(self, device: Device) -> None:
        """Has the device count what is released here among what may hang, and tell when it is given up."""
        if self not in device.queues:
            device.queues.append(self)
            device.occupants.append(self)

    def device_broke(self, device: Device) -> None:
        """The device was given up (rule 3). On the trio thread."""
        self.given_up = True
        for release in list(self._waiting):
            keep(release)

    @property
    def unfinished(self) -> bool:
        """True when something hangs, or is not released."""
        return self.hangs or bool(self._waiting)

    def hold(self, value: Any) -> Held:
        """What a tensor that lies in `value` refers to."""
        return Held(value, self)

    def drop(self, box: list[Any]) -> None:
        """Lets go of a tensor that nothing but `box` refers to. Any thread, in destructors too."""
        if self.given_up:
            keep(box)
        else:
            self._thread.post(box.clear)

    def release(
        self,
        session: Any,
        name: str,
        device: Device | None,
        seconds: float,
        begins: Callable[[Release], None],
        done: Callable[[], None],
    ) -> None:
        """Releases the session of instance `name` and waits for that, `seconds` at most. `begins` is called when that
        begins, `done` when it has ended. On the instance's thread."""
        if self.given_up:
            keep(session)
            return
        release = Release(session, begins, partial(self._done, done, device))
        self._waiting.append(release)
        start = partial(self._thread.post, partial(self._begin, release))
        if device is None:
            start()
        else:
            device.later(start)
        while not release.ended.wait(min(seconds, AGAIN_SECONDS)):
            seconds -= AGAIN_SECONDS
            if seconds <= 0 or self.given_up:
                log.warning("%s", _left(name, self._ordinal, release.begun))
                return
            if device is not None:
                device.look_again()

    def _begin(self, release: Release) -> None:
        try:
            release.begin()
        finally:
            self._waiting.remove(release)
            self._ended += 1

    def _done(self, done: Callable[[], None], device: Device | None) -> None:
        done()
        if device is not None:
            device.look_again()


def _left(name: str, ordinal: int, begun: bool) -> str:
    if begun:
        return f"the release of {name}'s session hangs on GPU {ordinal}: its thread is left behind"
    return f"something seems to hang on GPU {ordinal}: {name}'s session is released when that has ended"


def keep(thing: Any) -> None:
    """Keeps an object for ever: even the interpreter's end does not free it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def unfinished() -> bool:
    """True when the process cannot end in the ordinary way, because that would wait for a device."""
    return any(releases.unfinished for releases in list(Releases._made.values()))


process_parts.hang.append(unfinished)
