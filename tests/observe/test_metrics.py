"""The metrics document: made in slices, in the order of its families."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from neptrio.loop import slices
from neptrio.observe import metrics
from neptrio.observe.demand_families import DemandRow
from neptrio.observe.exposition import Family, pairs
from tests.support.embedded import EmbeddedServer
from tests.support.repository import identity_config, write_model


class Asked:
    """Models that are loaded on demand and were asked for; `seen` is told when each is looked for."""

    def __init__(self, count: int, seen: Callable[[], None]) -> None:
        self._count = count
        self._seen = seen

    def rows(self) -> Iterator[DemandRow]:
        for i in range(self._count):
            self._seen()
            yield DemandRow(f"d{i}", "loaded", "", 0, i, 1, 1, 0, 0)

    def states(self) -> dict[str, int]:
        return {"on demand": 7, "loaded": self._count}

    def memory(self) -> list[tuple[int, int, int]]:
        return [(-1, 5, 10), (0, 6, 20)]

    def server_bytes(self) -> int:
        return 3


def test_others_run_between_two_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can run does so once per slice; here each version is one, and each model that was asked for."""
    for i in range(20):
        write_model(tmp_path, f"m{i}", identity_config())
    with EmbeddedServer(tmp_path, allow_metrics=True) as server:
        repository = server.server.repository

        async def document(slice_ns: int) -> tuple[list[int], bytes]:
            """How often others had run when each row was begun, and the document."""
            turns, at = 0, []

            def seen() -> None:
                at.append(turns)

            def models() -> Iterator[Any]:
                for model in repository.each_ready():
                    seen()
                    yield model

            async def other() -> None:
                nonlocal turns
                while True:
                    await trio.lowlevel.checkpoint()
                    turns += 1

            monkeypatch.setattr(slices, "SLICE_NS", slice_ns)
            made = metrics.Metrics(
                models, server.server.services, server.server.verbs, metrics.MetricsConfig()
            )
            made.demand = Asked(20, seen)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(other)
                parts = await made.document()
                nursery.cancel_scope.cancel()
            return at, b"".join(parts)

        (whole, text), (cut, same) = (server.run(document, ns) for ns in (1 << 62, -1))
    assert len(whole) == len(cut) == 40
    assert set(whole) == {0}
    # trio runs the tasks of a batch in any order, so the other one may miss every second place
    assert len(set(cut[:20])) >= 10 and len(set(cut[20:])) >= 10
    for found in (text, same):
        assert found.count(b"nv_inference_count{") == 20
        assert found.count(b"# TYPE nv_inference_count ") == 1
    of_demand = [[line for line in found.splitlines() if b"_demand_" in line] for found in (text, same)]
    assert of_demand[0] == of_demand[1] and len(of_demand[0]) == 2 * 11 + 20 * 6 + 2 + 5
    assert b'neptrio_demand_loads_total{model="d3",outcome="failed"} 0' in of_demand[0]
    assert b'neptrio_demand_gpu_held_bytes{gpu="0"} 6' in of_demand[0]
    assert b"neptrio_demand_server_bytes 3" in of_demand[0]


def test_a_packed_family_is_the_same_text() -> None:
    whole, packed = (Family("f", 'a "help"\\', "gauge") for _ in range(2))
    for i in range(5):
        for family in (whole, packed):
            family.sample(pairs([("i", f'{i}"')]), i + 0.5)
        packed.pack(2)
    text = b"".join(whole.render())
    assert b"".join(packed.render()) == text
    assert text.startswith(b'# HELP f a "help"\\\\\n# TYPE f gauge\nf{i="0\\""} 0.5\n')
    assert len(packed.render()) > len(whole.render()) and Family("none", "", "gauge").render() == []
