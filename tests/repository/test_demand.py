"""What is known of models that are loaded on demand, while repositories are read (repository.demand)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import trio

from neptrio.config.demand import Residence
from neptrio.repository.demand import Demand, Known, Listing, Signature
from neptrio.repository.model_names import Names
from neptrio.settings import Settings

SIGNATURE = Signature((1,), False, 0, (), {"stable": 1})


class LoadedMeanwhile(Demand):
    """A model of the list is loaded by hand while the folders are read on a thread."""

    def read(self, names: list[str]) -> Listing:
        self.found: Known = trio.from_thread.run_sync(self.add, names[0], None, Residence())
        return {name: (SIGNATURE, Residence()) for name in names}


async def listed() -> dict[str, int]:
    return {"loaded": 1, "other": 1}


def test_who_waits_for_a_model_is_not_forgotten_when_it_is_listed() -> None:
    repositories = SimpleNamespace(listed=listed)
    names = Names(lambda name: None)
    catalog: Any = SimpleNamespace(repositories=repositories, records={}, latest={}, names=names)
    settings = Settings(model_repository=(), model_control_mode="on-demand")
    loop: Any = SimpleNamespace(timers=None, loop_pass=None)
    demand = LoadedMeanwhile(settings, catalog, loop, lambda *_, **__: None)
    trio.run(demand.look)
    assert demand.known["loaded"] is demand.found
    assert [demand.known[name].signature for name in ("loaded", "other")] == [SIGNATURE] * 2
    assert [names.label(name, "stable") for name in ("loaded", "other")] == [1, 1]
