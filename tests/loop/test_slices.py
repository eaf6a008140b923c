"""Long work on the loop is cut: others run between two rows."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import trio

from neptrio.loop import slices
from neptrio.loop.loop_pass import LoopPass
from neptrio.loop.poller import Poller
from neptrio.loop.slices import Slices, in_slices
from neptrio.loop.timers import Timers


@pytest.mark.parametrize(("slice_ns", "rests"), [(-1, (3, 4, 5)), (1 << 62, (0,))])
def test_others_run_between_rows(
    monkeypatch: pytest.MonkeyPatch, slice_ns: int, rests: tuple[int, ...]
) -> None:
    monkeypatch.setattr(slices, "SLICE_NS", slice_ns)
    ran: list[str] = []

    def rows() -> Iterator[int]:
        for number in range(5):
            ran.append("row")
            yield number

    async def other() -> None:
        while True:
            ran.append("other")
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            assert await in_slices(rows(), lambda number: b"%d" % number, b",") == b"0,1,2,3,4"
            nursery.cancel_scope.cancel()

    trio.run(main)
    # trio runs the tasks of a batch in any order, so the other one may run before the first row or behind the last
    between = "".join("o" if what == "other" else "r" for what in ran).strip("o")
    assert between.count("o") in rests


@pytest.mark.parametrize("way", ["in trio's stead", "task"])
def test_a_slice_ends_early_when_a_socket_is_waiting(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(slices, "SLICE_NS", 1 << 62)
    monkeypatch.setattr(slices, "LOOK_NS", -1)
    if way == "task":
        monkeypatch.setenv("NEPTRIO_POLLER", "task")
    received: list[bytes] = []

    async def main() -> None:
        loop_pass = LoopPass()
        poller = Poller(loop_pass, Timers(loop_pass))
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            async with trio.open_nursery() as nursery:
                await nursery.start(poller.run)
                nursery.start_soon(poller.read, ours, lambda: received.append(ours.recv(9)) or True)
                with trio.fail_after(60):
                    theirs.send(b"a")
                    while not received:
                        await trio.sleep(0)
                    work = Slices()
                    await work.pause()
                    assert not work.used_up
                    theirs.send(b"b")
                    assert work.used_up
                    while len(received) < 2:
                        await work.rest()
                    assert not work.used_up
                nursery.cancel_scope.cancel()

    trio.run(main)
    assert received == [b"a", b"b"]


def test_the_core_is_offered_to_others_behind_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    offered: list[str] = []
    monkeypatch.setattr(slices, "SLICE_NS", -1)
    monkeypatch.setattr(slices, "offer_core", lambda: offered.append("core"))

    async def main() -> None:
        assert await in_slices(range(3), lambda number: b"%d" % number) == b"012"

    trio.run(main)
    assert len(offered) == 3


@pytest.mark.parametrize("ends, pauses", [((False, False), 0), ((True, False), 2), ((True, True), 2)])
def test_a_long_answer_is_sent_in_a_pass_without_rows(
    monkeypatch: pytest.MonkeyPatch, ends: tuple[bool, bool], pauses: int
) -> None:
    paused: list[int] = []

    class Known:
        """Says after which rows the slice is used up."""

        rows = iter(ends)

        @property
        def used_up(self) -> bool:
            return next(self.rows)

        async def pause(self) -> None:
            paused.append(1)

    monkeypatch.setattr(slices, "Slices", Known)

    async def main() -> None:
        assert await in_slices(range(2), lambda number: b"%d" % number) == b"01"

    trio.run(main)
    assert len(paused) == pauses
