"""The poller in trio's stead and as a task: the same behaviour, whoever waits."""

from __future__ import annotations

import os
import signal
import socket
import threading

import pytest
import trio
import trio.testing

from neptrio.loop import poller as module
from neptrio.request.infer_request import monotonic_ns
from tests.loop.loops import LIMIT_S, Loop, running


@pytest.fixture(params=["hook", "task", "no inside"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == "task":
        monkeypatch.setenv("NEPTRIO_POLLER", "task")
    elif name == "no inside":  # a trio that keeps its epoll elsewhere

        def fails() -> None:
            raise AttributeError("'Runner' object has no attribute 'io_manager'")

        monkeypatch.setattr(module, "_Inside", fails)
    return name


def test_what_arrives_is_taken_and_its_task_woken(mode: str) -> None:
    async def main() -> None:
        async with running() as loop:
            for i in range(50):
                loop.far.send(b"%d" % i)
                await loop.hear()
            assert loop.got == [b"%d" % i for i in range(50)]

    trio.run(main)


def test_who_waits_in_trios_stead(mode: str) -> None:
    async def main() -> None:
        async with running() as loop:
            assert (loop.poller.inside is not None) == (mode == "hook")

    trio.run(main)


def test_read_ends_with_the_peer_and_with_an_error(mode: str) -> None:
    async def main() -> None:
        async with running(read=False) as loop:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(loop.poller.read, loop.near, loop.receive)
                await trio.testing.wait_all_tasks_blocked()
                loop.far.close()
            assert loop.got == [b""]

            def fails() -> bool:
                raise OSError("reset")

            with pytest.raises(OSError, match="reset"):
                await loop.poller.read(loop.near, fails)

    trio.run(main)


def test_a_bell_is_heard_each_time_and_never_read(mode: str) -> None:
    async def main() -> None:
        async with running() as loop:
            bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            rings = 0

            def rung() -> bool:
                nonlocal rings
                rings += 1
                loop.news.set()
                return True

            loop.poller.listen(bell, rung)
            for count in range(1, 4):
                os.eventfd_write(bell, 1)
                await loop.hear()
                for _ in range(3):  # rounds in which a descriptor that can be read would be told again
                    loop.far.send(b"x")
                    await loop.hear()
                assert rings == count
            assert os.eventfd_read(bell) == 3
            loop.poller.unlisten(bell)
            os.eventfd_write(bell, 1)
            loop.far.send(b"x")
            await loop.hear()
            assert rings == 3
        os.close(bell)

    trio.run(main)


def test_a_cancelled_read_leaves_its_socket_alone(mode: str) -> None:
    async def main() -> None:
        async with running(read=False) as loop:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(loop.poller.read, loop.near, loop.receive)
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            loop.far.send(b"later")
            await trio.lowlevel.wait_readable(loop.near)
            assert loop.got == [] and loop.near.recv(10) == b"later"

    trio.run(main)


def test_deadlines_of_tasks_come(mode: str) -> None:
    """Those set before the wait, and those that a receive() sets while trio's wait has begun."""

    async def main() -> None:
        async with running() as loop:
            with trio.move_on_after(0.001) as scope:
                await trio.sleep_forever()
            assert scope.cancelled_caught

            waiting = trio.CancelScope()

            def receive() -> bool:
                loop.far.recv(10)
                waiting.deadline = trio.current_time()
                return True

            async with trio.open_nursery() as nursery:
                nursery.start_soon(loop.poller.read, loop.far, receive)
                await trio.testing.wait_all_tasks_blocked()
                loop.near.send(b"x")
                with waiting:
                    await trio.sleep_forever()
                nursery.cancel_scope.cancel()
            assert waiting.cancelled_caught

    trio.run(main)


def test_timers_come_whoever_sets_them(mode: str) -> None:
    async def main() -> None:
        async with running() as loop:
            fired: list[str] = []
            done = trio.Event()

            def second() -> None:
                fired.append("second")
                done.set()

            def first() -> None:
                fired.append("first")
                loop.timers.at(monotonic_ns() + 1000, second)

            loop.timers.at(monotonic_ns() + 60 * 10**9, first).cancel()
            loop.timers.at(monotonic_ns() + 10**6, first)
            await done.wait()
            assert fired == ["first", "second"]

    trio.run(main)


def test_what_was_to_be_done_later_is_done(mode: str) -> None:
    class Dispatcher:
        def __init__(self) -> None:
            self.again = 3

        def dispatch(self, now: int) -> None:
            self.again -= 1
            if self.again:
                loop.loop_pass.mark_later(self)
            else:
                done.set()

    async def main() -> None:
        nonlocal loop, done
        async with running(read=False) as loop:
            done = trio.Event()
            dispatcher = Dispatcher()

            def receive() -> bool:
                loop.near.recv(10)
                loop.loop_pass.mark_later(dispatcher)
                return True

            async with trio.open_nursery() as nursery:
                nursery.start_soon(loop.poller.read, loop.near, receive)
                await trio.testing.wait_all_tasks_blocked()
                loop.far.send(b"x")
                await done.wait()
                assert dispatcher.again == 0
                nursery.cancel_scope.cancel()

    loop: Loop
    done: trio.Event
    trio.run(main)


def test_a_pass_that_a_task_has_begun_and_not_ended_is_ended(mode: str) -> None:
    class Marked:
        def dispatch(self, now: int) -> None:
            loop.loop_pass.want_flush(self)

        def flush(self) -> None:
            done.set()

    async def main() -> None:
        nonlocal loop, done
        async with running() as loop:
            for _ in range(3):
                done = trio.Event()
                await trio.testing.wait_all_tasks_blocked()
                loop.loop_pass.mark(Marked())
                await done.wait()

    loop: Loop
    done: trio.Event
    trio.run(main)


def test_threads_wake_tasks(mode: str) -> None:
    async def main() -> None:
        async with running() as loop:
            for i in range(20):
                assert await trio.to_thread.run_sync(lambda i=i: i) == i
            token = trio.lowlevel.current_trio_token()
            done = trio.Event()
            thread = threading.Thread(target=token.run_sync_soon, args=(done.set,))
            thread.start()
            await done.wait()
            thread.join()
            assert loop.got == []

    trio.run(main)


def test_signals_arrive(mode: str) -> None:
    async def main() -> None:
        async with running():
            with trio.open_signal_receiver(signal.SIGUSR1) as signals:
                os.kill(os.getpid(), signal.SIGUSR1)
                async for number in signals:
                    assert number == signal.SIGUSR1
                    return

    trio.run(main)


def test_busy_tasks_and_busy_sockets_take_turns(mode: str) -> None:
    async def main() -> None:
        async with running() as loop:
            stop = False

            async def busy() -> None:
                while not stop:
                    await trio.lowlevel.checkpoint()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(busy)
                loop.far.send(b"1")
                await loop.hear()
                stop = True
            other, peer = socket.socketpair()
            with other, peer:
                peer.send(b"x")
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(loop.poller.read, other, lambda: True)  # leaves it readable
                    for _ in range(20):
                        await trio.lowlevel.checkpoint()
                    with trio.move_on_after(0.001) as sleep:
                        await trio.sleep_forever()
                    assert sleep.cancelled_caught  # and not the nursery, whose task goes on
                    nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_second_poller_of_the_same_run_is_served_too() -> None:
    async def main() -> None:
        async with running() as one, running() as two:
            assert one.poller.inside is not None and two.poller.inside is None
            for loop in (one, two, one, two):
                loop.far.send(b"x")
                await loop.hear()

    trio.run(main)


def test_trio_as_a_guest_waits_itself() -> None:
    """In guest mode trio's wait is on another thread, and its host's loop must not be held up."""
    calls: list[object] = []
    ready = threading.Semaphore(0)

    async def main() -> bool:
        async with running() as loop:
            loop.far.send(b"x")
            await loop.hear()
            return loop.poller.inside is None

    def run_soon(function: object) -> None:
        calls.append(function)
        ready.release()

    outcomes: list[object] = []
    trio.lowlevel.start_guest_run(main, run_sync_soon_threadsafe=run_soon, done_callback=outcomes.append)
    while not outcomes:
        assert ready.acquire(timeout=LIMIT_S)
        calls.pop(0)()  # type: ignore[operator]
    assert outcomes[0].unwrap()  # type: ignore[attr-defined]


def test_the_way_and_the_reason_for_the_slower_one(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> str:
        async with running() as loop:
            return loop.poller.way

    expected = {
        "hook": "in trio's stead",
        "task": "by a task (NEPTRIO_POLLER=task asks for it)",
        "no inside": f"by a task (trio {trio.__version__} is not built as expected: "
        "'Runner' object has no attribute 'io_manager')",
    }
    assert trio.run(main) == expected[mode]
    told = [record.getMessage() for record in caplog.records if record.name == "neptrio.poller"]
    assert told == (
        [] if mode == "hook" else [f"sockets are waited for {expected[mode]}: slower, same behaviour"]
    )


def test_gives_way_to_control_work_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(module.time, "sleep", naps.append)
    for limit in ("GIVE_WAY_NS", "WAITED_NS"):  # nobody knows for how long a test is kept from its processor
        monkeypatch.setattr(module, limit, 3600 * 10**9)

    async def main() -> None:
        async with running() as loop:

            async def exchange() -> int:
                before = len(naps)
                loop.far.send(b"x")
                await loop.hear()
                return len(naps) - before

            assert await exchange() == 0
            with loop.poller.giving_way(), loop.poller.giving_way():
                assert await exchange() >= 1
                monkeypatch.setattr(module, "monotonic_ns", lambda: monotonic_ns() + module.GIVE_WAY_NS)
                assert await exchange() == 0  # the thread works for long: others are served as ever
                monkeypatch.undo()
                monkeypatch.setattr(module.time, "sleep", naps.append)
            assert await exchange() == 0

    trio.run(main)


def test_what_cannot_be_registered_leaves_nothing_behind(mode: str) -> None:
    async def main() -> None:
        async with running() as loop:
            await trio.testing.wait_all_tasks_blocked()
            before = dict(loop.poller._watches)
            with open(os.devnull, "rb") as file:  # which no epoll takes
                with pytest.raises(PermissionError):
                    await loop.poller.read(file.fileno(), lambda: True)
                with pytest.raises(PermissionError):
                    loop.poller.listen(file.fileno(), lambda: True, late=True)
            with pytest.raises(FileExistsError):
                await loop.poller.read(loop.near, lambda: True)
            with pytest.raises(FileExistsError):
                loop.poller.listen(loop.near.fileno(), lambda: True)
            assert loop.poller._watches == before and loop.poller._late == -1
            loop.far.send(b"x")
            await loop.hear()
            assert loop.got == [b"x"], "who was there first still reads"

    trio.run(main)


def test_a_reader_whose_socket_was_closed_hears_of_it_when_its_number_is_used_again(mode: str) -> None:
    async def main() -> None:
        async with running(read=False) as loop:
            number = loop.near.fileno()
            ended: list[OSError] = []

            async def read() -> None:
                with pytest.raises(OSError, match="closed while it was read") as caught:
                    await loop.poller.read(number, loop.receive)
                ended.append(caught.value)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await trio.testing.wait_all_tasks_blocked()
                again, far = socket.socketpair()
                loop.near.close()
                os.dup2(again.fileno(), number)
                again.close()
                loop.near = socket.socket(fileno=number)
                loop.near.setblocking(False)
                nursery.start_soon(loop.poller.read, number, loop.receive)
                await trio.testing.wait_all_tasks_blocked()
                assert len(ended) == 1
                far.send(b"x")
                await loop.hear()
                assert loop.got == [b"x"]
                far.close()

    trio.run(main)


def test_a_receiver_that_closes_its_socket_ends_alone(mode: str) -> None:
    """Bells tell once: what a failure left out of a round would never be heard."""

    async def main() -> None:
        async with running(read=False) as loop:
            bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            rung = trio.Event()

            def ring() -> bool:
                rung.set()
                return True

            def closes() -> bool:
                loop.near.close()
                return False

            async with trio.open_nursery() as nursery:
                nursery.start_soon(loop.poller.read, loop.near, closes)
                await trio.testing.wait_all_tasks_blocked()
                loop.poller.listen(bell, ring)
                loop.far.send(b"x")
                os.eventfd_write(bell, 1)
                await rung.wait()
            loop.poller.unlisten(bell)
            os.close(bell)

    trio.run(main)


def test_a_poller_that_has_ended_holds_nobody() -> None:
    async def main() -> Loop:
        async with running() as loop:
            bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            loop.poller.listen(bell, lambda: True)
        os.close(bell)
        return loop

    assert not trio.run(main).poller._watches
