"""Long work on the loop is cut: others run between two rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio

from neptrio.loop import slices
from neptrio.loop.slices import in_slices


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
