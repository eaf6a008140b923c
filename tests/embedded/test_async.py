"""A server inside programs of trio and asyncio: `async with neptrio.Server(...)`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import neptrio
from tests.embedded import models
from tests.support.repository import write_model


def run_trio(main: Callable[[], Awaitable[Any]]) -> Any:
    return trio.run(main)


def run_asyncio(main: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        return await main()

    return asyncio.run(run())


both = pytest.mark.parametrize("run", [run_trio, run_asyncio], ids=["trio", "asyncio"])
Run = Callable[[Callable[[], Awaitable[Any]]], Any]


async def live(server: neptrio.Server, model: str) -> Any:
    return (await server.statistics(model, live=True))["model_stats"][0]["live"]


async def until_queued(server: neptrio.Server, model: str) -> None:
    """Asks until requests wait for an instance."""
    while not (await live(server, model))["queued"]:
        pass


async def until_idle(server: neptrio.Server, model: str) -> None:
    """Asks until the model has no request."""
    while (found := await live(server, model))["queued"] or found["executing"]:
        pass


@pytest.mark.slow
@both
def test_every_kind_of_request(run: Run) -> None:
    async def main() -> None:
        async with models.new_server() as server:
            assert await server.ready()
            response = await server.model("double").infer({"x": np.ones(2, np.float32)})
            assert response["OUTPUT"].tolist() == [2, 2]
            requests = ({"A": [[i]], "B": [[1]]} for i in range(64))
            sums = [int(r["SUM"][0, 0]) async for r in server.model("add").infer_each(requests)]
            assert sums == list(range(1, 65))
            assert max(models.calls) > 1
            for name in ("count", "count_async"):
                stream = server.model(name).stream({"n": [4]})
                assert [int(r["OUTPUT"][0]) async for r in stream] == [0, 1, 2, 3]
            async with server.model("accumulate").sequence() as sequence:
                assert (await sequence.infer({"x": [2]}))["total"].tolist() == [2]
                assert (await sequence.infer({"x": [3]}))["total"].tolist() == [5]
            while (await server.sequences("accumulate"))["sequences"]:
                pass
            with pytest.raises(neptrio.InvalidArgument, match="nobody to greet"):
                await server.model("greet").infer({"name": [""]})
            with pytest.raises(neptrio.TritonError, match="deadline"):
                await server.model("hold").infer({"x": [1]}, timeout=0.02)
            models.gate.set()

    run(main)


@pytest.mark.slow
@both
def test_what_a_server_tells_of_itself(run: Run) -> None:
    async def main() -> None:
        async with models.new_server(grpc_port=0) as server:
            assert (await server.metadata())["name"] == "triton"
            assert len(await server.index()) == len(server.functions)
            model = server.model("greet")
            assert await model.ready()
            assert (await model.metadata())["name"] == "greet"
            assert (await model.config())["backend"] == "python"
            assert "nv_inference_count" in await server.metrics()
            assert (await server.trace_settings())["trace_level"] == ["OFF"]
            assert "log_info" in await server.log_settings()
            assert list(server.addresses) == ["grpc"]
            await server.unload("greet")
            assert not await model.ready()
            await server.load("greet")
            assert await model.ready()

            def triple(x: models.Floats) -> models.Floats:
                return 3 * x

            added = await server.add(triple)
            assert (await added.infer({"x": [2]}))["OUTPUT"].tolist() == [6]

    run(main)


@pytest.mark.slow
def test_a_cancelled_task_cancels_its_request() -> None:
    async def main() -> None:
        async with models.new_server() as server:
            async with trio.open_nursery() as nursery:
                for _ in range(9):  # some execute, some wait for an instance
                    nursery.start_soon(server.model("hold").infer, {"x": [1]})
                await until_queued(server, "hold")
                nursery.cancel_scope.cancel()
            models.gate.set()
            await until_idle(server, "hold")
            accounts = (await server.statistics("hold", live=True))["model_stats"][0]["accounts"]
            assert accounts["accepted"] == 9
            assert accounts["cancelled"] >= 1

    trio.run(main)


def test_a_cancelled_asyncio_task_cancels_its_request() -> None:
    async def main() -> None:
        async with models.new_server() as server:
            tasks = [asyncio.create_task(server.model("hold").infer({"x": [1]})) for _ in range(9)]
            await until_queued(server, "hold")
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in done)
            models.gate.set()
            await until_idle(server, "hold")

    asyncio.run(main())


@both
def test_a_slow_reader_makes_a_decoupled_model_wait(run: Run) -> None:
    async def main() -> None:
        server = neptrio.Server()
        made = []

        @server.function(inputs={"n": int}, outputs={"block": ("UINT8", [-1])})
        def blocks(n: int) -> Any:
            for i in range(n):
                made.append(i)
                yield np.full(1 << 19, i, np.uint8)

        async with server, aclosing(server.model("blocks").stream({"n": [40]})) as stream:  # type: ignore[type-var]
            first = await anext(stream)
            assert first["block"][0] == 0
            rest = [int(r["block"][0]) async for r in stream]
            assert rest == list(range(1, 40))
        assert made == list(range(40))

    run(main)


@pytest.mark.slow
def test_an_error_in_the_body_ends_the_server_and_is_raised() -> None:
    async def main() -> None:
        with pytest.raises(KeyError, match="mine"):
            async with models.new_server() as server:
                assert await server.ready()
                raise KeyError("mine")
        with pytest.raises(neptrio.Unavailable):
            await server.ready()

    trio.run(main)
    asyncio.run(main())


def test_cancelling_the_body_ends_the_server() -> None:
    async def main() -> None:
        with trio.CancelScope() as scope:
            async with models.new_server() as server:
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught
        with pytest.raises(neptrio.Unavailable):
            server.model("double")

    trio.run(main)


@both
def test_a_server_that_cannot_start(run: Run, tmp_path: Path) -> None:
    write_model(tmp_path, "broken", 'backend: "nonsense"')

    async def main() -> None:
        with pytest.raises(neptrio.TritonError, match="failed to load all models"):
            async with neptrio.Server(tmp_path):
                pytest.fail("it started")

    run(main)


@pytest.mark.slow
def test_trio_on_two_threads_shares_a_server() -> None:
    """Tasks of another trio loop are served too."""
    with models.new_server().running() as server:
        engine = server.model("double")._engine

        async def main() -> list[float]:
            model = neptrio.Model(engine, "double")
            out: list[float] = (await model.infer({"x": [4]}))["OUTPUT"].tolist()
            return out

        assert trio.run(main) == [8]
        assert asyncio.run(main()) == [8]


@both
def test_a_context_is_left_and_not_stopped(run: Run) -> None:
    async def main() -> None:
        async with models.new_server() as server:
            with pytest.raises(RuntimeError, match="leave that"):
                server.stop()
            assert await server.ready()

    run(main)


def test_a_function_whose_adding_is_cancelled_is_the_servers() -> None:
    entered, released = threading.Event(), threading.Event()

    class patient:
        def __init__(self) -> None:
            entered.set()
            assert released.wait(60)

        def __call__(self, x: float) -> float:
            return 5 * x

    async def main() -> None:
        async with models.new_server() as server:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.add, patient)
                while not entered.is_set():
                    await trio.sleep(0)
                nursery.cancel_scope.cancel()
            released.set()
            while not await server.model("patient").ready():
                await trio.sleep(0)
            assert (await server.model("patient").infer({"x": 1.0}))["OUTPUT"].item() == 5
            assert "patient" in server.functions
            await server.remove("patient")

    trio.run(main)


def test_verbs_do_not_wait_for_asyncios_own_threads() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        released = threading.Event()
        async with models.new_server() as server:
            loop.set_default_executor(ThreadPoolExecutor(1))
            blocked = loop.run_in_executor(None, released.wait)
            try:
                assert await asyncio.wait_for(server.ready(), 30)
                assert await asyncio.wait_for(server.model("double").ready(), 30)
                await asyncio.wait_for(server.load("double"), 30)
                assert (await asyncio.wait_for(server.index(), 30))[0]["state"] == "READY"
            finally:
                released.set()
                await blocked

    asyncio.run(main())
