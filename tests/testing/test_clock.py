"""Minutes that pass in no time: every wait of the server ends with a jump of the clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import trio

import neptrio
from neptrio.request.infer_request import jump_clock
from neptrio.testing import Clock, FakeModel, TestServer

HOUR = 3600.0
X = {"x": ("INT64", [1])}
Y = {"y": ("INT64", [1])}
Serve = Callable[..., TestServer]


@pytest.fixture
def later() -> Iterator[Callable[..., Future[neptrio.Response]]]:
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


def test_a_jump_ends_a_wait_in_the_queue(
    neptrio_serve: Serve, neptrio_clock: Clock, later: Callable[..., Future]
) -> None:
    queue = {"default_queue_policy": {"default_timeout_microseconds": int(HOUR * 1e6)}}
    fake = FakeModel(X, Y, max_batch_size=1, batching=queue).holds()
    server = neptrio_serve(fake)
    model = server.model("fake")
    asked = [later(model.infer, {"x": [[i]]}) for i in range(6)]
    fake.until_asked()
    server.until_queued("fake")
    neptrio_clock.jump(HOUR)
    fake.release(6)
    ends = [request.exception(60) for request in asked]
    late = [end for end in ends if end is not None]
    assert late
    assert len(late) < 6  # what executes is not refused
    assert all(isinstance(end, neptrio.Unavailable) and "timeout expired" in str(end) for end in late)


def test_a_jump_ends_the_delay_of_a_batch(
    neptrio_serve: Serve, neptrio_clock: Clock, later: Callable[..., Future]
) -> None:
    batching = {"preferred_batch_size": [8], "max_queue_delay_microseconds": int(HOUR * 1e6)}
    fake = FakeModel(X, Y, max_batch_size=8, batching=batching).answers(lambda x: {"y": 2 * x})
    server = neptrio_serve(fake)
    asked = [later(server.model("fake").infer, {"x": [[i]]}) for i in range(2)]
    server.until_queued("fake", 2)
    assert fake.records == []
    neptrio_clock.jump(HOUR)
    assert [request.result(60)["y"].tolist() for request in asked] == [[[0]], [[2]]]
    assert len(fake.records) == 1


def test_a_jump_passes_a_deadline(
    neptrio_serve: Serve, neptrio_clock: Clock, later: Callable[..., Future]
) -> None:
    fake = FakeModel(X, Y).holds()
    server = neptrio_serve(fake)
    asked = later(server.model("fake").infer, {"x": [1]}, timeout=HOUR)
    fake.until_asked()
    neptrio_clock.jump(HOUR)
    with pytest.raises(neptrio.TritonError, match="deadline") as caught:
        asked.result(60)
    assert caught.value.code is neptrio.Code.DEADLINE


def test_a_jump_ends_an_idle_sequence(neptrio_serve: Serve, neptrio_clock: Clock) -> None:
    sequences = {"sequence_batching": {"max_sequence_idle_microseconds": int(HOUR * 1e6)}}
    server = neptrio_serve(FakeModel(X, Y, config=sequences))
    with server.model("fake").sequence() as sequence:
        sequence.infer({"x": [1]})
        assert len(server.sequences("fake")["sequences"]) == 1
        neptrio_clock.jump(HOUR - 60)
        sequence.infer({"x": [1]})
        neptrio_clock.jump(HOUR)
        with pytest.raises(neptrio.TritonError, match="sequence"):
            sequence.infer({"x": [1]})


def test_a_jump_ends_the_time_that_a_model_takes(
    neptrio_serve: Serve, neptrio_clock: Clock, later: Callable[..., Future]
) -> None:
    fake = FakeModel(X, Y).takes(HOUR).answers({"y": [7]})
    server = neptrio_serve(fake)
    asked = later(server.infer, "fake", x=[1])
    fake.until_asked()
    neptrio_clock.jump(HOUR)
    assert asked.result(60)["y"].tolist() == [7]
    spent = server.statistics("fake")["model_stats"][0]["inference_stats"]["compute_infer"]["ns"]
    assert spent >= HOUR * 1e9


def test_the_clock_only_goes_ahead(neptrio_clock: Clock) -> None:
    before = neptrio_clock.now()
    neptrio_clock.jump(5)
    assert neptrio_clock.now() >= before + 5
    for wrong in (-1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="jumps ahead"):
            neptrio_clock.jump(wrong)
    with pytest.raises(ValueError, match="cannot go back"):
        jump_clock(-1)


def test_a_clock_is_trios_too() -> None:
    """Sleeps of a program's own loop end too, once it looks at the clock."""
    clock = Clock()

    async def main() -> float:
        with trio.move_on_after(HOUR) as scope:
            clock.jump(HOUR)
            await trio.sleep_forever()
        assert scope.cancelled_caught
        return trio.current_time()

    begun = clock.now()
    assert trio.run(main, clock=clock) >= begun + HOUR
