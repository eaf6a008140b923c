"""Operations on two models and an ensemble, three at a time, in every combination and order of ends.

The manager is the real one, on trio; only what takes a model from its folder to a started Model is
a fake, whose ends the test decides.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from neptrio.config.model_config import ConfigSource, parse_text
from neptrio.errors import TritonError
from neptrio.observe.counters import ModelCounters
from neptrio.repository import version_states
from neptrio.repository.manager import RepositoryManager
from neptrio.repository.model_builder import Found, PollFailure
from neptrio.repository.override import LoadParameters
from neptrio.repository.version_states import State
from neptrio.settings import Settings

STEPS = "".join(f'step {{ model_name: "{name}" }} ' for name in ("a", "b"))
CONFIGS = {"a": "", "b": "", "e": f'platform: "ensemble" ensemble_scheduling {{ {STEPS} }}'}
OPERATIONS: list[tuple[str, str, bool]] = [
    *(("load", name, False) for name in "abe"),
    *(("unload", name, False) for name in "abe"),
    ("unload", "e", True),
]
Op = tuple[str, str, bool]


class FakeModel:
    """A model that is ready until it is withdrawn; tells when it stops twice or serves when stopped."""

    def __init__(self, version: int) -> None:
        self.version = str(version)
        self.ready = True
        self.lost = False
        self.stopped = False
        self.counters = ModelCounters()
        self.load_duration_secs = 0.0
        self.cpu_bytes = 0
        self.reason = ""
        self.backend = SimpleNamespace(runs_code_here=False, own_processes=False)
        self.config = SimpleNamespace(instance_group=[])

    def abort(self) -> None:
        pass

    def withdraw(self) -> None:
        self.ready = False

    async def drain(self) -> None:
        await trio.lowlevel.checkpoint()

    async def stop(self) -> None:
        assert not self.stopped
        self.stopped = True
        await trio.lowlevel.checkpoint()


class FakeLoader:
    """Loads take as many scheduling points as `chance` says; those of `failing` fail."""

    def __init__(self, chance: random.Random) -> None:
        self.left_behind = 0
        self.failing: set[str] = set()
        self.models: list[FakeModel] = []
        self._chance = chance
        self._changes = itertools.count()

    async def _while(self) -> None:
        for _ in range(self._chance.randrange(6)):
            await trio.lowlevel.checkpoint()

    async def fingerprint(self, name: str, chosen: Path | None) -> Any:
        await self._while()
        return {}

    async def find(self, name: str, parameters: LoadParameters, chosen: Path | None) -> Found:
        await self._while()
        source = ConfigSource(parse_text(CONFIGS[name], name))
        return Found(Path(name), source, {"changed": (next(self._changes), 0)}, [1])

    async def build(
        self, name: str, version: int, found: Found, made: list[Any], tell: Any, behind: Any
    ) -> Any:
        model = FakeModel(version)
        self.models.append(model)
        made.append(model)
        await self._while()
        if name in self.failing:
            made.remove(model)
            await model.stop()
            raise TritonError("broken")
        return model


async def play(
    tmp_path: Path, loaded: bool, operations: list[Op], chance: random.Random, failing: str = ""
) -> None:
    settings = Settings(model_repository=(tmp_path,), model_control_mode="explicit")
    manager = RepositoryManager(settings, None, None, lambda _: None)  # type: ignore[arg-type]
    fake = FakeLoader(chance)
    manager.loads.builder = fake  # type: ignore[assignment]
    manager.withdrawal.give_back = lambda with_cycles: None
    errors: list[str] = []

    async def one(op: Op) -> None:
        kind, name, dependents = op
        for _ in range(chance.randrange(12)):
            await trio.lowlevel.checkpoint()
        try:
            if kind == "load":
                await manager.load(name, {})
            else:
                await manager.unload(name, dependents)
        except TritonError as error:
            errors.append(str(error))

    async with trio.open_nursery() as core:
        await core.start(manager.run)
        if loaded:
            await manager.load("e", {})
        fake.failing = set(failing)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for op in operations:
                    nursery.start_soon(one, op)
            while manager.nursery.child_tasks:  # type: ignore[union-attr]
                await trio.lowlevel.checkpoint()
        check(manager, fake, errors, operations, failing)
        with trio.fail_after(60):
            await manager.unload_all()
        assert all(model.stopped for model in fake.models), "nothing is left behind"
        core.cancel_scope.cancel()


def check(
    manager: RepositoryManager, fake: FakeLoader, errors: list[str], operations: list[Op], failing: str
) -> None:
    serving = {name for name in "abe" if name in manager.latest}
    for name, record in manager.records.items():
        for row in record.rows.values():
            assert row.state in (State.READY, State.UNLOADED, State.FAILED), (name, row)
            assert (row.model is not None) == (row.state is State.READY) == (name in serving)
    users: dict[str, set[str]] = {}
    for name, record in manager.records.items():
        for child in record.children:
            users.setdefault(child, set()).add(name)
    assert manager.users == users
    alive = [model for model in fake.models if not model.stopped]
    assert len(alive) == len(serving) and all(model.ready for model in alive)
    if "e" in serving:
        assert {"a", "b"} <= serving, "an ensemble serves with its steps' models only"
    for error in errors:
        assert (
            error == version_states.OUTDATED
            or "not available or ambiguous" in error
            or (failing and "broken" in error)
        ), error
    kinds = {kind for kind, _, _ in operations}
    if kinds == {"load"} and not failing:
        assert errors == [] and {name for _, name, _ in operations} <= serving


@pytest.mark.slow
@pytest.mark.parametrize("loaded", [False, True])
def test_three_concurrent_operations(tmp_path: Path, loaded: bool) -> None:
    for seed, operations in enumerate(itertools.product(OPERATIONS, repeat=3)):
        for repeat in range(2):
            chance = random.Random(seed * 10 + repeat)
            trio.run(play, tmp_path, loaded, list(operations), chance)


@pytest.mark.slow
def test_three_concurrent_operations_on_broken_models(tmp_path: Path) -> None:
    for seed, operations in enumerate(itertools.product(OPERATIONS, repeat=3)):
        for failing in ("a", "e"):
            trio.run(play, tmp_path, seed % 2 == 0, list(operations), random.Random(seed), failing)


def test_a_long_random_history(tmp_path: Path) -> None:
    chance = random.Random(7)
    operations = [chance.choice(OPERATIONS) for _ in range(500)]
    trio.run(play, tmp_path, True, operations, chance)


@pytest.mark.parametrize(
    "failure", [PollFailure("no such folder"), TritonError("broken"), RuntimeError("a defect")], ids=repr
)
def test_a_load_that_fails_at_the_moment_it_is_outdated_says_that_it_is(
    tmp_path: Path, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        settings = Settings(model_repository=(tmp_path,), model_control_mode="explicit")
        manager = RepositoryManager(settings, None, None, lambda _: None)  # type: ignore[arg-type]

        class Failing(FakeLoader):
            async def find(self, name: str, parameters: LoadParameters, chosen: Path | None) -> Found:
                manager.withdrawal.unload(name, False)
                raise failure

        manager.loads.builder = Failing(random.Random(0))  # type: ignore[assignment]
        async with trio.open_nursery() as core:
            await core.start(manager.run)
            with pytest.raises(TritonError) as outcome:
                await manager.load("a", {})
            assert str(outcome.value) == version_states.OUTDATED
            core.cancel_scope.cancel()

    trio.run(main)
    assert not caplog.records
