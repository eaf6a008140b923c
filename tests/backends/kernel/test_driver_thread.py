"""A GPU's own thread, without a GPU: who waits for it is answered, also by its end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from neptrio.backends.kernel.driver_thread import DriverThread
from neptrio.errors import Internal


def test_calls_are_made_in_order_and_answered() -> None:
    thread, made = DriverThread("gpu-0"), list[int]()
    thread.post(lambda: made.append(1))
    thread.post(lambda: made.append(1 // 0))  # is logged
    assert thread.ask(lambda: [*made, threading.current_thread().name]) == [1, "gpu-0"]
    assert thread.ask(lambda: thread.ask(lambda: 7)) == 7, "it need not wait for itself"
    with pytest.raises(ZeroDivisionError):
        thread.ask(lambda: 1 // 0)
    assert thread.settle(30)
    thread.end()


def test_a_call_that_takes_too_long_is_an_error() -> None:
    thread, go_on = DriverThread("gpu-0"), threading.Event()
    thread.post(go_on.wait)
    with pytest.raises(Internal, match=r"gpu-0 did not answer within 0\.01 s"):
        thread.ask(lambda: None, 0.01)
    assert not thread.settle(0.01)
    go_on.set()
    thread.end()


def test_its_end_answers_those_who_wait() -> None:
    """Their calls are behind the end and never made; nobody waits for a time limit."""
    thread, go_on = DriverThread("gpu-0"), threading.Event()
    thread.post(go_on.wait)
    thread.end()
    with ThreadPoolExecutor(2) as pool:
        asking, settling = pool.submit(thread.ask, lambda: None, 3600), pool.submit(thread.settle, 3600)
        go_on.set()
        with pytest.raises(Internal, match="gpu-0 has ended"):
            asking.result(60)
        assert settling.result(60)
    with pytest.raises(Internal, match="gpu-0 has ended"):
        thread.ask(lambda: None, 3600)
    assert thread.settle(3600)
