"""A call in a program leaves nothing that only the collector could free: its arrays may be large."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import trio

import neptrio
from neptrio.embedded.blocking import RunningServer
from tests.support.garbage import left_in_cycles
from tests.support.repository import identity_config, write_model

INPUTS = {"INPUT0": np.ones((1, 16), np.int32)}
WRONG = {"INPUT0": np.ones((1, 3), np.int32)}


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Path]:
    write_model(tmp_path, "one", identity_config(pairs=1))
    yield tmp_path
    gc.enable()


def each(running: RunningServer) -> None:
    """A call of every kind."""
    model, unknown = running.model("one"), running.model("unknown")
    model.infer(INPUTS)
    assert len(list(model.stream(INPUTS))) == 1
    assert len(list(model.infer_each([INPUTS, INPUTS], ahead=1))) == 2
    refused: list[Callable[[], object]] = [
        lambda: model.infer(WRONG),
        lambda: list(model.stream(WRONG)),
        lambda: unknown.infer(INPUTS),
        unknown.config,
        lambda: running.load("unknown"),
    ]
    for call in refused:
        with pytest.raises(neptrio.TritonError):
            call()


@pytest.mark.slow
def test_calls_of_a_thread(repository: Path) -> None:
    with neptrio.Server(repository).running() as running:
        each(running)  # what is made once is made
        gc.collect()
        gc.disable()
        each(running)
        assert not left_in_cycles()


def test_calls_of_tasks(repository: Path) -> None:
    async def calls(server: neptrio.Server) -> None:
        model = server.model("one")
        await model.infer(INPUTS)
        assert len([one async for one in model.stream(INPUTS)]) == 1
        with pytest.raises(neptrio.TritonError):
            await model.infer(WRONG)
        with pytest.raises(neptrio.TritonError):
            await server.model("unknown").config()

    async def main() -> None:
        async with neptrio.Server(repository) as server:
            await calls(server)
            gc.collect()
            gc.disable()
            await calls(server)
            assert not left_in_cycles()

    trio.run(main)
