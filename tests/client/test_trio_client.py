"""neptrio.client against a real server."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import trio

from neptrio.client import (
    Client,
    ConnectionLost,
    InferenceError,
    Sequence,
    SequenceBroken,
    Stream,
    open_client,
)
from neptrio.client.http import HttpClient
from tests.sequences.models import sequence_config
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess


def run(function: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        with trio.fail_after(60):
            await function()

    trio.run(limited)


def value(number: int) -> dict[str, np.ndarray]:
    return {"INPUT": np.array([[number]], np.int32)}


def test_unary_streams_and_sequences(tmp_path: Path) -> None:
    write_model(tmp_path, "identity", identity_config("TYPE_STRING", "-1", 0, 1))
    write_model(tmp_path, "large", identity_config("TYPE_FP32", "-1", 0, 1))
    write_model(tmp_path, "sum", sequence_config("direct { }", 4))
    write_model(tmp_path, "brief", sequence_config("direct { }", 4, idle_us=1))
    with ServerProcess(tmp_path) as server:

        async def main() -> None:
            async with open_client(server.grpc) as client:
                words = np.array([b"a", "ü".encode(), b""], dtype=object)
                result = await client.infer("identity", {"INPUT0": words}, id="x")
                assert result.id == "x" and result.outputs["OUTPUT0"].tolist() == words.tolist()
                big = np.arange(1 << 20, dtype=np.float32)  # larger than any window
                np.testing.assert_array_equal(
                    (await client.infer("large", {"INPUT0": big})).outputs["OUTPUT0"], big
                )
                with pytest.raises(InferenceError, match="'nope' is not found") as info:
                    await client.infer("nope", {"INPUT0": words})
                assert info.value.status == 5
                async with client.stream() as stream:
                    for i in range(5):
                        await stream.send("identity", {"INPUT0": words}, id=str(i))
                    await stream.finish()
                    got = []
                    while (answer := await stream.receive()) is not None:
                        got.append(answer.id)
                    assert got == list("01234")
                async with client.sequence("sum") as s, client.sequence("sum") as t:
                    assert s.id != t.id
                    assert (await s.send(value(1))).outputs["OUTPUT"].item() == 1
                    assert (await t.send(value(10))).outputs["OUTPUT"].item() == 10
                    assert (await s.send(value(2))).outputs["START"].item() == 0
                    with pytest.raises(InferenceError, match="data-type is 'FP32'"):
                        await s.send({"INPUT": np.zeros((1, 1), np.float32)})
                    final = await s.send(value(3), last=True)
                    assert final.outputs["OUTPUT"].item() == 6 and final.outputs["END"].item() == 1
                    assert final.outputs["CORRID"].item() == s.id
                    with pytest.raises(SequenceBroken, match="has ended"):
                        await s.send(value(4))
                    assert (await t.send(value(10), last=True)).outputs["OUTPUT"].item() == 20
                async with client.sequence("sum") as s:
                    totals = [r.outputs["OUTPUT"].item() async for r in s.run(value(i) for i in range(1, 5))]
                    assert totals == [1, 3, 6, 10] and s.ended
                async with client.sequence("brief") as s:
                    await s.send(value(1))
                    with pytest.raises(SequenceBroken, match="the server has forgotten sequence"):
                        while True:
                            await s.send(value(1))

        run(main)


def test_a_lost_connection_breaks_the_sequence_and_does_not_restart_it(tmp_path: Path) -> None:
    write_model(tmp_path, "sum", sequence_config("direct { }", 4))
    server = ServerProcess(tmp_path)

    async def main() -> None:
        async with open_client(server.grpc) as client, client.sequence("sum") as s:
            await s.send(value(1))
            server.process.kill()
            await trio.to_thread.run_sync(server.process.wait)
            for _ in range(2):
                with pytest.raises(SequenceBroken, match="lost its connection after 1 requests"):
                    await s.send(value(1))
            with pytest.raises(ConnectionLost):
                await client.infer("sum", value(1))

    run(main)
    server.stop()


def test_signatures_name_what_may_be_given() -> None:
    """What is misspelt is no option that is quietly left out."""
    for function in (Client.infer, Stream.send, Sequence.send, HttpClient.infer):
        parameters = inspect.signature(function).parameters
        assert {"id", "outputs", "parameters"} <= set(parameters)
        assert all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters.values())
