"""What is known of models that are loaded on demand, while repositories are read (repository.demand)."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from neptrio.config.demand import Residence
from neptrio.loop import slices
from neptrio.repository.demand import Demand
from neptrio.repository.demand_states import TABLE, Act, Event, State
from neptrio.repository.demand_view import DemandView
from neptrio.repository.known_models import Known
from neptrio.repository.model_names import Names
from neptrio.repository.signature import Listing, Reading, Signature
from neptrio.settings import Settings

SIGNATURE = Signature((1,), False, 0, (), {"stable": 1})


class LoadedMeanwhile(Demand):
    """A model of the list is loaded by hand while the folders are read on a thread."""

    def read(self, names: list[str]) -> Listing:
        self.found: Known = trio.from_thread.run_sync(self.add, names[0], None, Residence())
        return {name: Reading(SIGNATURE) for name in names}


async def listed() -> dict[str, int]:
    return {"loaded": 1, "other": 1}


def test_who_waits_for_a_model_is_not_forgotten_when_it_is_listed() -> None:
    repositories = SimpleNamespace(listed=listed)
    names = Names(lambda name: None)
    catalog: Any = SimpleNamespace(
        repositories=repositories, records={}, latest={}, names=names, readiness=Told()
    )
    settings = Settings(model_repository=(), model_control_mode="on-demand")
    loop: Any = SimpleNamespace(timers=None, loop_pass=None)
    demand = LoadedMeanwhile(settings, catalog, loop, lambda *_, **__: None)
    trio.run(demand.look)
    assert demand.known["loaded"] is demand.found
    assert [demand.known[name].signature for name in ("loaded", "other")] == [SIGNATURE] * 2
    assert [names.label(name, "stable") for name in ("loaded", "other")] == [1, 1]


class Repositories:
    """Whose folders come and go."""

    names = ("m",)

    async def listed(self) -> dict[str, int]:
        return dict.fromkeys(self.names, 1)


class Told:
    def notify(self, name: str) -> None:
        pass


class Listed(Demand):
    def read(self, names: list[str]) -> Listing:
        return {name: Reading(SIGNATURE) for name in names}


def test_a_folder_that_is_replaced_is_not_gone() -> None:
    """A look that meets no folder forgets nothing: who replaces it takes the old one away first. The next look does."""
    repositories = Repositories()
    names = Names(lambda name: None)
    catalog: Any = SimpleNamespace(
        repositories=repositories, records={}, latest={}, names=names, readiness=Told()
    )
    settings = Settings(model_repository=(), model_control_mode="on-demand")
    loop: Any = SimpleNamespace(timers=None, loop_pass=None)
    demand = Listed(settings, catalog, loop, lambda *_, **__: None)
    trio.run(demand.look)
    known = demand.known["m"]
    repositories.names = ()
    trio.run(demand.look)
    assert demand.known == {"m": known}
    known.standing.apply(Event.BEGIN, 0)
    known.standing.apply(Event.FAIL, 0, "there is no folder")
    assert known.standing.act(1) is Act.REFUSE
    repositories.names = ("m",)
    trio.run(demand.look)
    assert demand.known == {"m": known}
    assert known.standing.act(1) is Act.LOAD, "what it has failed for is no longer so"
    repositories.names = ()
    trio.run(demand.look)
    assert demand.known == {"m": known}
    trio.run(demand.look)
    assert demand.known == {}


def test_how_many_models_stand_where_is_known_at_any_time() -> None:
    """Of thousands of models they are not counted when somebody asks."""
    repositories = Repositories()
    repositories.names = tuple("abcdefgh")
    catalog: Any = SimpleNamespace(
        repositories=repositories, records={}, latest={}, names=Names(lambda name: None), readiness=Told()
    )
    settings = Settings(model_repository=(), model_control_mode="on-demand")
    loop: Any = SimpleNamespace(timers=None, loop_pass=None)
    demand = Listed(settings, catalog, loop, lambda *_, **__: None)
    view = DemandView(catalog, demand)
    chance = random.Random(1)
    seen: set[str] = set()

    def look() -> None:
        anew = Counter(known.standing.state.value for known in demand.known.values())
        assert view.states() == dict(sorted(anew.items()))
        seen.update(anew)

    for _ in range(300):
        if chance.random() < 0.1:
            repositories.names = tuple(chance.sample("abcdefgh", chance.randrange(9)))
            trio.run(demand.look)
            look()
        for known in demand.known.values():
            event = chance.choice(list(Event))
            if (known.standing.state, event) in TABLE:
                known.standing.apply(event, 0)
                look()
    assert seen == {state.value for state in State}
    repositories.names = ()
    for known in demand.known.values():
        if known.standing.state in (State.LOADING, State.READY):
            known.standing.apply(Event.OUTDATE, 0)
            known.standing.apply(Event.WITHDRAW, 0)
    trio.run(demand.look)
    trio.run(demand.look)
    assert view.states() == {}


def test_others_run_while_thousands_of_folders_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each model is a slice; two looks at once, of which the second may overtake the first, disturb nobody."""
    monkeypatch.setattr(slices, "SLICE_NS", -1)
    repositories = Repositories()
    repositories.names = tuple(f"m{i}" for i in range(40))
    catalog: Any = SimpleNamespace(
        repositories=repositories, records={}, latest={}, names=Names(lambda name: None), readiness=Told()
    )
    settings = Settings(model_repository=(), model_control_mode="on-demand")
    loop: Any = SimpleNamespace(timers=None, loop_pass=None)
    demand = Listed(settings, catalog, loop, lambda *_, **__: None)
    seen: list[int] = []

    async def other() -> None:
        while True:
            seen.append(len(demand.known))
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            await demand.look()
            assert len(set(seen)) > 10 and len(demand.known) == 40
            repositories.names = ("m7",)
            await demand.look()
            assert len(demand.known) == 40
            seen.clear()
            async with trio.open_nursery() as looks:
                looks.start_soon(demand.look)
                looks.start_soon(demand.look)
            assert len(set(seen)) > 10 and set(demand.known) == {"m7"}
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert demand.states == {State.KNOWN: 1}
