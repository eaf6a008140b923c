"""The asyncio clients: HTTP, gRPC unary, many at once, a stream, a cancelled call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException

from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

ROW = np.arange(16, dtype=np.int32).reshape(1, 16)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("aio")
    write_model(repository, "simple", identity_config())
    with ServerProcess(repository) as process:
        yield process


def inputs(module: Any, row: np.ndarray = ROW) -> list[Any]:
    made = []
    for name in ("INPUT0", "INPUT1"):
        tensor = module.InferInput(name, list(row.shape), "INT32")
        tensor.set_data_from_numpy(row)
        made.append(tensor)
    return made


def test_http(server: ServerProcess) -> None:
    async def main() -> None:
        async with http_aio.InferenceServerClient(server.http) as client:
            assert await client.is_server_live() and await client.is_server_ready()
            assert await client.is_model_ready("simple")
            assert (await client.get_model_metadata("simple"))["name"] == "simple"
            answers = await asyncio.gather(
                *(client.infer("simple", inputs(http_aio, ROW + i), request_id=str(i)) for i in range(20))
            )
            for i, answer in enumerate(answers):
                assert answer.get_response()["id"] == str(i)
                assert (answer.as_numpy("OUTPUT1") == ROW + i).all()
            with pytest.raises(InferenceServerException, match="unknown model: 'nope' is not found"):
                await client.infer("nope", inputs(http_aio))

    asyncio.run(main())


def test_grpc(server: ServerProcess) -> None:
    async def main() -> None:
        async with grpc_aio.InferenceServerClient(server.grpc) as client:
            assert await client.is_server_ready() and await client.is_model_ready("simple")
            assert (await client.get_model_config("simple")).config.backend == "identity"
            answers = await asyncio.gather(
                *(client.infer("simple", inputs(grpc_aio, ROW + i), request_id=str(i)) for i in range(20))
            )
            for i, answer in enumerate(answers):
                assert answer.get_response().id == str(i)
                assert (answer.as_numpy("OUTPUT0") == ROW + i).all()
            with pytest.raises(InferenceServerException, match="unknown model: 'nope' is not found"):
                await client.infer("nope", inputs(grpc_aio))

    asyncio.run(main())


def test_grpc_stream(server: ServerProcess) -> None:
    async def main() -> None:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            for i in range(20):
                model = "simple" if i != 7 else "nope"
                yield {"model_name": model, "inputs": inputs(grpc_aio, ROW + i), "request_id": str(i)}

        async with grpc_aio.InferenceServerClient(server.grpc) as client:
            seen = 0
            async for result, error in client.stream_infer(requests()):
                if seen == 7:
                    assert error is not None and "'nope' is not found" in error.message()
                else:
                    assert error is None and result.get_response().id == str(seen)
                    assert (result.as_numpy("OUTPUT0") == ROW + seen).all()
                seen += 1
            assert seen == 20

    asyncio.run(main())
