"""The window of a response sender: when send() waits, and what ends its wait."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as utils
from triton_python_backend_utils._sender import RESPONSE_OVERHEAD, UNTOLD_BYTES, WINDOW_BYTES, Channel

FINAL = utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Server:
    """What a Channel posts to: (size, final) of each response."""

    def __init__(self, single: bool = False) -> None:
        self.posted: list[tuple[int, bool]] = []
        self.refused = False  # what is posted cannot be sent
        self.cancelled = False
        self.asked = (
            threading.Event()
        )  # a sender has asked whether its response will be read, just before it waits
        self.channel = Channel(self.post, lambda: self.cancelled, self.unread, lambda: None, single)

    def post(self, response: Any, final: bool, size: int, handed_over: int) -> None:
        assert 0 < handed_over <= time.monotonic_ns()
        if self.refused:
            raise ValueError("cannot be packed")
        self.posted.append((size, final))

    def unread(self) -> bool:
        self.asked.set()
        return self.cancelled


def response(size: int) -> utils.InferenceResponse:
    """One that counts for `size` bytes."""
    return utils.InferenceResponse([utils.Tensor("OUT", np.zeros(size - RESPONSE_OVERHEAD, np.uint8))])


class Sending:
    """A thread in send()."""

    def __init__(self, server: Server, size: int) -> None:
        self.error: Exception | None = None
        self._server = server
        self._before = len(server.posted)
        server.asked.clear()
        self._thread = threading.Thread(target=self._run, args=(response(size),), daemon=True)
        self._thread.start()

    def _run(self, made: utils.InferenceResponse) -> None:
        try:
            self._server.channel.send(made, 0)
        except utils.TritonModelException as error:
            self.error = error

    def waits(self) -> bool:
        """Whether it waits for room. It holds the lock from its question until it waits or has sent."""
        assert self._server.asked.wait(10)
        with self._server.channel._lock:
            return len(self._server.posted) == self._before

    def end(self) -> Exception | None:
        self._thread.join(10)
        assert not self._thread.is_alive(), "send() still waits"
        return self.error


@pytest.mark.parametrize("size", [RESPONSE_OVERHEAD, WINDOW_BYTES // 2, WINDOW_BYTES, 8 * WINDOW_BYTES])
def test_send_does_not_wait_for_what_the_server_need_not_tell(size: int) -> None:
    """The server may keep less than UNTOLD_BYTES to itself for ever."""
    server = Server()
    server.channel.send(response(UNTOLD_BYTES - 1), 0)
    assert Sending(server, size).end() is None
    assert server.posted == [(UNTOLD_BYTES - 1, False), (size, False)]


@pytest.mark.parametrize("size", [RESPONSE_OVERHEAD, WINDOW_BYTES // 2, WINDOW_BYTES, 8 * WINDOW_BYTES])
def test_send_waits_when_the_window_is_full(size: int) -> None:
    server = Server()
    for _ in range(2):
        server.channel.send(response(WINDOW_BYTES // 2), 0)
    waiting = Sending(server, size)
    assert waiting.waits()
    server.channel.acknowledge(UNTOLD_BYTES)
    assert waiting.end() is None
    assert server.posted[2:] == [(size, False)]


def test_the_first_response_never_waits() -> None:
    server = Server()
    assert Sending(server, 100 * WINDOW_BYTES).end() is None
    assert len(server.posted) == 1


def waiting_beside(server: Server) -> Sending:
    """A thread that waits, because the window is full."""
    server.channel.send(response(WINDOW_BYTES), 0)
    waiting = Sending(server, WINDOW_BYTES)
    assert waiting.waits()
    return waiting


def test_the_final_response_of_another_thread_ends_a_wait() -> None:
    """Nobody acknowledges what comes last, so nothing else would wake the thread."""
    server = Server()
    waiting = waiting_beside(server)
    server.channel.send(None, FINAL)
    assert "Response sender has been closed" in str(waiting.end())
    assert server.posted == [(WINDOW_BYTES, False), (RESPONSE_OVERHEAD, True)]


def test_the_final_response_ends_the_wait_of_a_coroutine() -> None:
    server = Server()

    async def main() -> str:
        server.channel.send(response(WINDOW_BYTES), 0)
        waiting = asyncio.ensure_future(server.channel.async_send(response(WINDOW_BYTES), 0))
        while not server.channel._waiters:
            await asyncio.sleep(0)
        server.channel.send(None, FINAL)
        with pytest.raises(utils.TritonModelException) as failed:
            await asyncio.wait_for(waiting, 10)
        return str(failed.value)

    assert "Response sender has been closed" in asyncio.run(main())


def test_errors_and_the_final_flag_do_not_wait() -> None:
    server = Server()
    server.channel.send(response(WINDOW_BYTES), 0)
    server.channel.send(utils.InferenceResponse(error=utils.TritonError("told")), 0)
    server.channel.send(None, FINAL)
    assert [final for _, final in server.posted] == [False, False, True]


def test_a_cancellation_ends_a_wait() -> None:
    server = Server()
    waiting = waiting_beside(server)
    server.cancelled = True
    server.channel.wake()
    assert "The request was cancelled" in str(waiting.end())
    assert len(server.posted) == 1


def test_the_end_of_a_request_ends_a_wait() -> None:
    """Its execute() has raised, while a thread of the model sends."""
    server = Server()
    waiting = waiting_beside(server)
    server.channel.close()
    assert "Response sender has been closed" in str(waiting.end())


def test_another_response_may_follow_one_that_cannot_be_sent() -> None:
    server = Server()
    server.refused = True
    with pytest.raises(ValueError, match="cannot be packed"):
        server.channel.send(response(8 * WINDOW_BYTES), FINAL)
    server.refused = False
    server.channel.send(response(8 * WINDOW_BYTES), 0)
    server.channel.send(utils.InferenceResponse(error=utils.TritonError("told")), FINAL)
    assert [final for _, final in server.posted] == [False, True]


def test_a_second_response_of_a_model_that_is_not_decoupled_is_refused_at_once() -> None:
    server = Server(single=True)
    server.channel.send(response(2 * WINDOW_BYTES), 0)
    assert "exactly one response per request" in str(Sending(server, 2 * RESPONSE_OVERHEAD).end())
    server.channel.send(None, FINAL)
    assert server.posted == [(2 * WINDOW_BYTES, True)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_nobody_reads_raises_but_where_that_would_fail_others(asynchronous: bool) -> None:
    server, alone = Server(), Server(single=True)
    server.cancelled = alone.cancelled = True

    def send(to: Server, flags: int = 0) -> None:
        if asynchronous:
            asyncio.run(to.channel.async_send(response(2000), flags))
        else:
            to.channel.send(response(2000), flags)

    server.channel.together = True
    send(server)
    assert server.posted == []
    server.channel.together = False
    with pytest.raises(utils.TritonModelException, match="The request was cancelled"):
        send(server)
    send(server, FINAL)
    assert server.posted == [(2000, True)]
    send(alone)
    assert alone.posted == [(2000, True)]
