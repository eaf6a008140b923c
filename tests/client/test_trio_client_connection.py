"""The connection of neptrio.client: many calls on it, calls that are given up, a server that shuts down."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import h2.settings
import numpy as np
import pytest
import trio

from neptrio.client import ConnectionLost, InferenceError, open_client
from tests.client.test_trio_client import run
from tests.support.gate import Gate
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

BIG = {"INPUT0": np.zeros((1, 4_000_000), np.float32)}  # more than windows and sockets take
WINDOW = 65535  # of HTTP/2, until somebody says otherwise
SMALL = {"INPUT0": np.zeros((1, 4), np.float32)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    write_model(repository, "m", identity_config("TYPE_FP32", "-1", pairs=1))
    with ServerProcess(repository) as process:
        yield process


@contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    """The server reads nothing meanwhile."""
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


@pytest.mark.slow
def test_calls_that_wait_for_room_at_the_same_time_all_go_on(server: ServerProcess) -> None:
    async def main() -> None:
        async with open_client(server.grpc) as client:
            for _ in range(3):
                async with trio.open_nursery() as nursery:
                    for _ in range(8):
                        nursery.start_soon(client.infer, "m", BIG)

    run(main)


@pytest.mark.slow
def test_a_call_that_is_given_up_while_it_is_sent_leaves_the_connection_to_the_others(
    server: ServerProcess,
) -> None:
    async def main() -> None:
        async with open_client(server.grpc) as client:
            await client.infer("m", SMALL)
            with stopped(server), trio.move_on_after(0.5) as given_up:
                await client.infer("m", BIG)
            assert given_up.cancelled_caught
            assert (await client.infer("m", SMALL)).outputs["OUTPUT0"].shape == (1, 4)

    run(main)


@pytest.mark.slow
def test_a_stream_on_which_half_a_message_was_sent_is_lost_and_says_so(server: ServerProcess) -> None:
    async def main() -> None:
        async with open_client(server.grpc) as client:
            async with client.stream() as stream:
                await stream.send("m", SMALL)
                assert await stream.receive() is not None
                with stopped(server), trio.move_on_after(0.5) as given_up:
                    await stream.send("m", BIG)
                assert given_up.cancelled_caught
                with pytest.raises(ConnectionLost):
                    await stream.send("m", SMALL)
                with pytest.raises(ConnectionLost):
                    await stream.receive()
            assert (await client.infer("m", SMALL)).outputs["OUTPUT0"].shape == (1, 4)

    run(main)


@pytest.mark.slow
def test_more_calls_than_the_server_takes_at_once_wait_for_their_turn(server: ServerProcess) -> None:
    done = 0

    async def main() -> None:
        async def one() -> None:
            nonlocal done
            await client.infer("m", SMALL)
            done += 1

        async with open_client(server.grpc) as client, trio.open_nursery() as nursery:
            for _ in range(3000):
                nursery.start_soon(one)

    run(main)
    assert done == 3000


@pytest.mark.slow
def test_a_refusal_that_comes_before_the_request_was_sent_is_told(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config("TYPE_FP32", "-1", pairs=1))
    with ServerProcess(tmp_path, "--max-held-bytes=1000000") as server:

        async def main() -> None:
            async with open_client(server.grpc) as client:
                with pytest.raises(InferenceError, match="can never be held"):
                    await client.infer("m", BIG)
                assert (await client.infer("m", SMALL)).outputs["OUTPUT0"].shape == (1, 4)

        run(main)


@pytest.mark.slow
def test_a_server_that_shuts_down_answers_what_it_has_and_gets_nothing_new(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "models", tmp_path / "gate")
    with ServerProcess(tmp_path / "models") as server:
        answered = []

        async def main() -> None:
            async def one() -> None:
                answered.append(await client.infer("gate", {"INPUT0": np.zeros((1, 1), np.int32)}))

            async with open_client(server.grpc) as client, trio.open_nursery() as nursery:
                nursery.start_soon(one)
                await trio.to_thread.run_sync(gate.started)
                server.process.send_signal(signal.SIGTERM)
                with pytest.raises(ConnectionLost, match="is shutting down"):
                    while True:
                        await client.unary("ServerReady", b"")
                assert not answered
                gate.go()

        run(main)
        assert server.ended() == 0 and len(answered) == 1
    gate.close()


async def refuse_all(stream: trio.SocketStream) -> None:
    """A server that takes one call at once, and ends it when a window of its request has come."""
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    server.initiate_connection()
    server.update_settings({h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 1})
    await stream.send_all(server.data_to_send())
    came: Counter[int] = Counter()
    while data := await stream.receive_some():
        for event in server.receive_data(data):
            if isinstance(event, h2.events.DataReceived):
                came[event.stream_id] += len(event.data)
                if came[event.stream_id] == WINDOW:
                    server.increment_flow_control_window(WINDOW)
                    answer = [(":status", "200"), ("grpc-status", "8"), ("grpc-message", "too large")]
                    server.send_headers(event.stream_id, answer, end_stream=True)
        await stream.send_all(server.data_to_send())


def test_a_refusal_that_no_reset_follows_is_told_and_makes_room_for_the_next_call() -> None:
    async def serve(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):  # the client is gone
            await refuse_all(stream)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            listen = partial(trio.serve_tcp, host="127.0.0.1")
            listeners: list[trio.SocketListener] = await nursery.start(listen, serve, 0)
            host, port = listeners[0].socket.getsockname()
            async with open_client(f"{host}:{port}") as client:
                for _ in range(3):
                    with pytest.raises(InferenceError, match="too large"):
                        await client.infer("m", BIG)
            nursery.cancel_scope.cancel()

    run(main)
