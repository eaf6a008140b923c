"""tritonclient's four clients, over every method that they have."""

from __future__ import annotations

import asyncio
import inspect
import queue
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from tests.clients.servers import example_server
from tests.support.server import ServerProcess

pytest.importorskip("schemathesis", reason="run by make test-clients")
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http
import tritonclient.http.aio as http_aio
import tritonclient.utils.shared_memory as shared_memory
from tritonclient.utils import InferenceServerException

A, B = np.arange(16, dtype=np.int32).reshape(1, 16), np.ones((1, 16), np.int32)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with example_server("simple", flags=["--allow-client-shm=true"]) as process:
        yield process


class Recorder:
    """Calls a client's methods, asynchronous ones too, and notes which were called."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.called: set[str] = set()

    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        self.called.add(name)
        made = getattr(self.client, name)(*args, **options)
        return await made if inspect.isawaitable(made) else made

    async def refused(self, text: str, name: str, *args: Any) -> None:
        with pytest.raises(InferenceServerException, match=text):
            await self.call(name, *args)

    def methods(self) -> set[str]:
        return {name for name in dir(type(self.client)) if not name.startswith("_")}


class Headers:
    """A client's plugin: adds a header to every request, and counts them."""

    def __init__(self) -> None:
        self.requests = 0

    def __call__(self, request: Any) -> None:
        self.requests += 1
        request.headers["x-of-a-plugin"] = "1"


def inputs(module: Any) -> list[Any]:
    made = [module.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    made[0].set_data_from_numpy(A)
    made[1].set_data_from_numpy(B)
    return made


def check(result: Any) -> None:
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), A + B)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), A - B)


def member(answer: Any, name: str) -> Any:
    return answer[name] if isinstance(answer, dict) else getattr(answer, name)


async def control(r: Recorder) -> None:
    """The verbs that all four have."""
    assert await r.call("is_server_live") and await r.call("is_server_ready")
    assert await r.call("is_model_ready", "simple", "1") and not await r.call("is_model_ready", "nothing")
    assert "statistics" in member(await r.call("get_server_metadata"), "extensions")
    assert member(await r.call("get_model_metadata", "simple"), "platform") == "kernel"
    config = await r.call("get_model_config", "simple", "1")
    assert member(config if isinstance(config, dict) else config.config, "max_batch_size") == 8
    index = await r.call("get_model_repository_index")
    rows = index if isinstance(index, list) else index.models
    assert {member(row, "name") for row in rows} >= {"simple", "upper_case"}
    await r.call("load_model", "identity_int32")
    assert await r.call("is_model_ready", "identity_int32")
    await r.call("unload_model", "identity_int32")
    assert not await r.call("is_model_ready", "identity_int32")
    await r.refused("failed to load 'nothing'", "load_model", "nothing")
    statistics = await r.call("get_inference_statistics", "simple", "1")
    (row,) = member(statistics, "model_stats")
    assert member(row, "name") == "simple"
    before = await r.call("get_trace_settings", "simple")
    await r.call("update_trace_settings", "simple", {"trace_rate": "7"})
    assert "7" in str(await r.call("get_trace_settings", "simple"))
    await r.call("update_trace_settings", "simple", {"trace_rate": None})
    assert str(await r.call("get_trace_settings", "simple")) == str(before)
    await r.call("update_log_settings", {"log_verbose_level": 1})
    settings = await r.call("get_log_settings")
    over_http = isinstance(settings, dict)
    level = (
        settings["log_verbose_level"] if over_http else settings.settings["log_verbose_level"].uint32_param
    )
    assert level == 1
    await r.call("update_log_settings", {"log_verbose_level": 0})


async def plugins(r: Recorder) -> None:
    made = Headers()
    await r.call("register_plugin", made)
    assert await r.call("plugin") is made
    await r.call("is_server_live")
    assert made.requests == 1
    await r.call("unregister_plugin")


async def memory(r: Recorder, module: Any) -> None:
    """System regions are used by an inference; there is no GPU, and the refusal says so."""
    region = shared_memory.create_shared_memory_region("in", f"/neptrio_{id(r)}", 128)
    try:
        shared_memory.set_shared_memory_region(region, [A, B])
        await r.call("register_system_shared_memory", "in", f"/neptrio_{id(r)}", 128)
        assert "in" in str(await r.call("get_system_shared_memory_status"))
        given = [module.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
        given[0].set_shared_memory("in", 64)
        given[1].set_shared_memory("in", 64, 64)
        check(await r.call("infer", "simple", given))
        await r.call("unregister_system_shared_memory", "in")
        assert "in" not in str(await r.call("get_system_shared_memory_status"))
    finally:
        shared_memory.destroy_shared_memory_region(region)
    await r.refused("shared memory", "register_cuda_shared_memory", "gpu", b"AAAA", 0, 128)
    assert "gpu" not in str(await r.call("get_cuda_shared_memory_status"))
    await r.call("unregister_cuda_shared_memory", "gpu")


async def infer(r: Recorder, module: Any) -> None:
    check(await r.call("infer", "simple", inputs(module)))
    wanted = [module.InferRequestedOutput("OUTPUT1")]
    only = await r.call("infer", "simple", inputs(module), outputs=wanted, request_id="mine")
    assert only.as_numpy("OUTPUT0") is None
    assert member(only.get_response(), "id") == "mine"
    await r.refused("unknown model: 'nothing'", "infer", "nothing", inputs(module))


def test_http(server: ServerProcess) -> None:
    async def main() -> None:
        with http.InferenceServerClient(server.http, concurrency=2) as client:
            r = Recorder(client)
            await control(r)
            await plugins(r)
            await memory(r, http)
            await infer(r, http)
            check((await r.call("async_infer", "simple", inputs(http))).get_result())
            body, size = await r.call("generate_request_body", inputs(http))
            assert isinstance(body, bytes) and 0 < size < len(body)
            answer = b'{"model_name":"simple","outputs":[]}'
            assert (await r.call("parse_response_body", answer)).get_response()["model_name"] == "simple"
            await r.call("close")
            assert r.called == r.methods()

    asyncio.run(main())


def test_http_aio(server: ServerProcess) -> None:
    async def main() -> None:
        async with http_aio.InferenceServerClient(server.http) as client:
            r = Recorder(client)
            await control(r)
            await plugins(r)
            await memory(r, http_aio)
            await infer(r, http_aio)
            body, size = await r.call("generate_request_body", inputs(http_aio))
            assert isinstance(body, bytes) and 0 < size < len(body)
            answer = b'{"model_name":"simple","outputs":[]}'
            assert (await r.call("parse_response_body", answer)).get_response()["model_name"] == "simple"
            await r.call("close")
            assert r.called == r.methods()

    asyncio.run(main())


def test_grpc(server: ServerProcess) -> None:
    async def main() -> None:
        with grpc.InferenceServerClient(server.grpc) as client:
            r = Recorder(client)
            await control(r)
            await plugins(r)
            await memory(r, grpc)
            await infer(r, grpc)
            answers: queue.Queue[Any] = queue.Queue()
            await r.call(
                "async_infer", "simple", inputs(grpc), lambda result, error: answers.put(error or result)
            )
            check(answers.get(timeout=60))
            await r.call("start_stream", lambda result, error: answers.put(error or result))
            for _ in range(3):
                await r.call("async_stream_infer", "simple", inputs(grpc))
            for _ in range(3):
                check(answers.get(timeout=60))
            await r.call("stop_stream")
            await r.call("close")
            assert r.called == r.methods()

    asyncio.run(main())


def test_grpc_aio(server: ServerProcess) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for _ in range(3):
            yield {"model_name": "simple", "inputs": inputs(grpc_aio)}

    async def main() -> None:
        async with grpc_aio.InferenceServerClient(server.grpc) as client:
            r = Recorder(client)
            await control(r)
            await plugins(r)
            await memory(r, grpc_aio)
            await infer(r, grpc_aio)
            got = 0
            async for result, error in await r.call("stream_infer", requests()):
                assert error is None
                check(result)
                got += 1
            assert got == 3
            await r.call("close")
            assert r.called == r.methods()

    asyncio.run(main())
