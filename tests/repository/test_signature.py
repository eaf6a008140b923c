"""Whether a folder is still as it was when it was read (repository.signature)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from neptrio.repository import signature
from neptrio.repository.demand import Demand
from neptrio.repository.model_names import Names
from neptrio.repository.signature import ABOUT, Listing, Reading, Signature, current, read_folder
from neptrio.settings import Settings
from tests.support.repository import identity_config, write_model

LONG_AGO = 1_000_000_000


def aged(folder: Path) -> Path:
    """As if nothing had been written there for long."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (LONG_AGO, LONG_AGO))
    return folder


def state(folder: Path, config_name: str = "") -> signature.FolderState:
    reading = read_folder(folder, config_name, False)
    assert reading is not None
    return reading.state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return aged(write_model(tmp_path, "m", identity_config()))


def test_a_folder_that_was_left_alone_is_current(folder: Path) -> None:
    assert current(state(folder)) and current(state(folder, "other"))
    os.remove(folder / "config.pbtxt")
    aged(folder)
    assert current(state(folder)), "one without a configuration, too"
    shutil.rmtree(folder)
    assert current(state(folder)), "and one that is not there"


def test_what_has_just_been_written_counts_as_changed(folder: Path) -> None:
    os.utime(folder / "config.pbtxt")
    assert not current(state(folder))


def test_a_change_is_seen(folder: Path) -> None:
    config = folder / "config.pbtxt"
    before = state(folder)
    text = config.read_text()
    config.write_text(text.replace("INPUT", "GIVEN"))
    assert not current(before), "by its time"
    aged(folder)
    assert current(before)
    config.write_text(f"{text}\n")
    aged(folder)
    assert not current(before), "by its size"
    before = state(folder)
    shutil.copy(config, folder / "new")
    os.replace(folder / "new", config)
    aged(folder)
    assert not current(before), "by its inode"
    before = state(folder)
    (folder / "2").mkdir()
    assert not current(before), "by the folder"
    aged(folder)
    before = state(folder, "other")
    (folder / "configs").mkdir()
    (folder / "configs" / "other.pbtxt").write_text(text)
    os.utime(folder, (LONG_AGO, LONG_AGO))
    assert not current(before), "by a file that is preferred"


def test_a_look_asks_about_some_models_and_in_turn_about_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a look at 10,000 folders takes no longer than one at a tenth of them."""
    asked: list[str] = []
    anew: list[str] = []

    def noted(found: signature.FolderState) -> bool:
        asked.append(found[0][0])
        return found[0][0] != "m7"

    class Listed(Demand):
        def read(self, names: list[str]) -> Listing:
            anew.extend(names)
            return {name: Reading(Signature((1,), False, 0, ()), state=((name, 0, 0, 1),)) for name in names}

    monkeypatch.setattr(signature, "current", noted)
    models = [f"m{number}" for number in range(2 * ABOUT + 10)]

    async def listed() -> dict[str, int]:
        return dict.fromkeys(models, 1)

    catalog: Any = SimpleNamespace(
        repositories=SimpleNamespace(listed=listed),
        records={},
        latest={},
        names=Names(lambda name: None),
        readiness=SimpleNamespace(notify=lambda name: None),
    )
    settings = Settings(model_repository=(), model_control_mode="on-demand")
    loop: Any = SimpleNamespace(timers=None, loop_pass=None)
    demand = Listed(settings, catalog, loop, lambda *_, **__: None)
    trio.run(demand.look)
    assert (asked, anew) == ([], models)
    anew.clear()
    for count in (ABOUT, ABOUT, 10):
        before = len(asked)
        trio.run(demand.look)
        assert len(asked) - before == count
    assert asked == models and anew == ["m7"]
