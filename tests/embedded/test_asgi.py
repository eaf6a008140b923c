"""The REST app called from an asyncio loop: `embedded.asgi`. Its clients here are made of queues."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

import neptrio
from neptrio.embedded.asgi import AHEAD_BYTES, STOPPING, call_app
from neptrio.embedded.engine import Engine
from tests.embedded import models

SECONDS = 10.0  # only a failing test waits so long
LATER = "later"  # a body that the test puts itself
Event = dict[str, Any]


class Client:
    """One call: the test puts events of the request, and takes those of the answer."""

    def __init__(self, engine: Engine, path: str, body: Any = None, **scope: Any) -> None:
        self.asked = asyncio.Semaphore(0)  # once for every receive()
        self.request: asyncio.Queue[Event] = asyncio.Queue()
        self.answer: asyncio.Queue[Event] = asyncio.Queue(scope.pop("room", 0))
        if body != LATER:
            self.put(b"" if body is None else json.dumps(body).encode(), False)
        self.scope = {
            "type": "http",
            "method": "POST" if body is not None else "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"Host", b"somewhere")],
            "client": ("192.0.2.1", 1),
            **scope,
        }
        self.task = asyncio.create_task(call_app(engine, self.scope, self._receive, self.answer.put))

    async def _receive(self) -> Event:
        self.asked.release()
        return await self.request.get()

    def put(self, body: bytes, more: bool) -> None:
        self.request.put_nowait({"type": "http.request", "body": body, "more_body": more})

    async def whole(self) -> tuple[int, bytes]:
        """Status and body of the answer, when the call has returned."""
        await asyncio.wait_for(self.task, SECONDS)
        start, *parts = [self.answer.get_nowait() for _ in range(self.answer.qsize())]
        assert [part["more_body"] for part in parts[:-1]] == [True] * (len(parts) - 1)
        assert not parts[-1].get("more_body", False)
        return start["status"], b"".join(part["body"] for part in parts)


def engine_of(server: neptrio.Server) -> Engine:
    """What runs behind a server that has been entered."""
    engine = server._engine
    assert engine is not None
    return engine


def run(main: Callable[[neptrio.Server, Engine], Awaitable[None]], **settings: Any) -> None:
    async def running() -> None:
        async with models.new_server(**settings) as server:
            await main(server, engine_of(server))

    asyncio.run(running())


def with_app(engine: Engine, app: Any) -> None:
    """Puts an app of the test behind the calls."""
    engine.asgi._made = (app, None)


async def until_live(server: neptrio.Server, what: str, number: int) -> None:
    """Asks until so many requests to the model `hold` are executing, or queued."""
    while (await server.statistics("hold", live=True))["model_stats"][0]["live"][what] != number:
        pass


def doubled(value: float) -> Any:
    return {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [value]}]}


def test_requests_are_answered_like_a_clients() -> None:
    async def main(server: neptrio.Server, engine: Engine) -> None:
        status, body = await Client(engine, "/v2/health/ready").whole()
        assert (status, body) == (200, b"")
        answers = [Client(engine, "/v2/models/double/infer", doubled(i)).whole() for i in range(50)]
        for i, (status, body) in enumerate(await asyncio.gather(*answers)):
            assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [2 * i])
        status, body = await Client(engine, "/v2/models/none/infer", doubled(1)).whole()
        assert status == 404 and b"none" in body
        assert (await Client(engine, "/elsewhere").whole())[0] == 404

    run(main)


def test_a_prefix_is_no_part_of_the_path() -> None:
    async def main(server: neptrio.Server, engine: Engine) -> None:
        assert (await Client(engine, "/some/place/v2/health/live", root_path="/some/place").whole())[0] == 200
        assert (await Client(engine, "/v2/health/live", root_path="/some/place").whole())[0] == 200
        assert (await Client(engine, "/some/place/v2/health/live").whole())[0] == 404

    run(main)


def test_a_body_crosses_as_it_comes_and_one_event_ahead() -> None:
    async def main(server: neptrio.Server, engine: Engine) -> None:
        got: list[bytes] = []
        go = trio.Event()

        async def app(scope: Event, receive: Any, send: Any) -> None:
            await go.wait()
            more = True
            while more:
                event = await receive()
                got.append(event["body"])
                more = event["more_body"]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"".join(got)})

        with_app(engine, app)
        client = Client(engine, "/", LATER)
        for part in b"abcdefgh":
            client.put(bytes([part]), part != ord("h"))
        await (
            client.asked.acquire()
        )  # the event with which the call begins; no other while the app reads none
        assert client.asked.locked() and client.request.qsize() == 7
        engine.soon(go.set)
        assert await client.whole() == (200, b"abcdefgh")
        assert got == [bytes([part]) for part in b"abcdefgh"]

    run(main)


def test_an_answer_waits_for_its_reader() -> None:
    async def main(server: neptrio.Server, engine: Engine) -> None:
        sent = 0
        parts = 64
        size = AHEAD_BYTES // 4

        async def app(scope: Event, receive: Any, send: Any) -> None:
            nonlocal sent
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(parts):
                await send({"type": "http.response.body", "body": bytes(size), "more_body": True})
                sent += 1
            await send({"type": "http.response.body", "body": b"end"})

        with_app(engine, app)
        client = Client(engine, "/", room=1)
        start = await asyncio.wait_for(client.answer.get(), SECONDS)
        assert start["status"] == 200
        total = 0
        for taken in range(1, parts + 1):
            event = await asyncio.wait_for(client.answer.get(), SECONDS)
            total += len(event["body"])
            # what the program has taken, the queue and the event that its send() holds, and what may be ahead
            assert sent <= taken + 2 + AHEAD_BYTES // size + 1
        last = await asyncio.wait_for(client.answer.get(), SECONDS)
        assert last["body"] == b"end" and total == parts * size
        await asyncio.wait_for(client.task, SECONDS)

    run(main)


def test_streamed_answers_come_part_by_part() -> None:
    async def main(server: neptrio.Server, engine: Engine) -> None:
        body = {"inputs": [{"name": "n", "shape": [1], "datatype": "INT64", "data": [5]}]}
        client = Client(engine, "/v2/models/count/infer_stream", body)
        status, text = await client.whole()
        events = [json.loads(line[6:]) for line in text.decode().splitlines() if line]
        assert status == 200
        assert [e["outputs"][0]["data"] for e in events if e["outputs"]] == [[i] for i in range(5)]

    run(main)


@pytest.mark.parametrize("how", ["disconnect", "cancel"])
def test_who_leaves_cancels_the_app(how: str) -> None:
    async def main(server: neptrio.Server, engine: Engine) -> None:
        begun, ended = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        seen: list[str] = []

        async def app(scope: Event, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            assert (await receive())["type"] == "http.request"
            loop.call_soon_threadsafe(begun.set)
            try:
                seen.append((await receive())["type"])
                seen.append((await receive())["type"])  # it is told again, however often it asks
            except trio.Cancelled:
                seen.append("cancelled")
                raise
            finally:
                loop.call_soon_threadsafe(ended.set)

        with_app(engine, app)
        client = Client(engine, "/", {})
        await asyncio.wait_for(begun.wait(), SECONDS)
        if how == "disconnect":
            client.request.put_nowait({"type": "http.disconnect"})
            await asyncio.wait_for(client.task, SECONDS)
        else:
            client.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await client.task
        await asyncio.wait_for(ended.wait(), SECONDS)
        assert seen == (["http.disconnect"] * 2 if how == "disconnect" else ["cancelled"])

    run(main)


def test_a_program_that_cannot_send_cancels_the_app() -> None:
    async def main(server: neptrio.Server, engine: Engine) -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def app(scope: Event, receive: Any, send: Any) -> None:
            try:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await trio.sleep_forever()
            finally:
                loop.call_soon_threadsafe(ended.set)

        async def receive() -> Event:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def broken(event: Event) -> None:
            raise OSError("the socket is gone")

        with_app(engine, app)
        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        with pytest.raises(OSError, match="gone"):
            await asyncio.wait_for(call_app(engine, scope, receive, broken), SECONDS)
        await asyncio.wait_for(ended.wait(), SECONDS)

    run(main)


def test_a_program_that_cannot_receive_cancels_the_app() -> None:
    async def main(server: neptrio.Server, engine: Engine) -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        parts = [{"type": "http.request", "body": b"", "more_body": True}]

        async def app(scope: Event, receive: Any, send: Any) -> None:
            try:
                while True:
                    await receive()
            finally:
                loop.call_soon_threadsafe(ended.set)

        async def broken() -> Event:
            if not parts:
                raise OSError("the socket is gone")
            return parts.pop()

        async def send(event: Event) -> None:
            raise AssertionError(event)

        with_app(engine, app)
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        with pytest.raises(OSError, match="gone"):
            await asyncio.wait_for(call_app(engine, scope, broken, send), SECONDS)
        await asyncio.wait_for(ended.wait(), SECONDS)

    run(main)


def test_a_program_may_have_nothing_to_receive_behind_a_body() -> None:
    async def main(server: neptrio.Server, engine: Engine) -> None:
        body = json.dumps(doubled(2)).encode()
        events = [{"type": "http.request", "body": body, "more_body": False}]
        answer: list[Event] = []

        async def broken() -> Event:
            if not events:
                raise RuntimeError("asked once too often")
            return events.pop()

        async def send(event: Event) -> None:
            answer.append(event)

        scope = {"type": "http", "method": "POST", "path": "/v2/models/double/infer", "headers": []}
        await asyncio.wait_for(call_app(engine, scope, broken, send), SECONDS)
        assert answer[0]["status"] == 200

    run(main)


def test_a_client_that_leaves_cancels_its_request() -> None:
    async def main(server: neptrio.Server, engine: Engine) -> None:
        clients = [Client(engine, "/v2/models/hold/infer", doubled(i)) for i in range(4)]
        await until_live(server, "executing", 2)  # of its two instances, and each has prepared one more
        await until_live(server, "prepared", 2)
        queued = Client(engine, "/v2/models/hold/infer", doubled(2))
        await until_live(server, "queued", 1)
        queued.request.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(queued.task, SECONDS)
        assert queued.answer.empty()
        models.gate.set()
        for client in clients:
            assert (await client.whole())[0] == 200
        assert (await server.statistics("hold"))["model_stats"][0]["inference_count"] == 4

    run(main)


def test_a_stopping_server_answers_what_is_under_way() -> None:
    async def main() -> None:
        async with models.new_server(exit_timeout_secs=60) as server:
            engine = engine_of(server)
            client = Client(engine, "/v2/models/hold/infer", doubled(3))
            await until_live(server, "executing", 1)
            drains = asyncio.Event()
            loop = asyncio.get_running_loop()
            drain = engine.asgi.drain

            async def telling() -> None:
                engine.soon(lambda: loop.call_soon_threadsafe(drains.set))
                await drain()

            engine.asgi.drain = telling  # type: ignore[method-assign]
            engine.soon(engine.stop)
            await asyncio.wait_for(drains.wait(), SECONDS)
            late = Client(engine, "/v2/health/live")
            with pytest.raises(neptrio.Unavailable, match=STOPPING):
                await asyncio.wait_for(late.task, SECONDS)
            models.gate.set()
            status, body = await client.whole()
            assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [3])
        with pytest.raises(neptrio.Unavailable):
            await asyncio.wait_for(Client(engine, "/v2/health/live").task, SECONDS)

    asyncio.run(main())


def test_calls_that_a_server_leaves_behind_fail() -> None:
    async def main() -> None:
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def app(scope: Event, receive: Any, send: Any) -> None:
            loop.call_soon_threadsafe(begun.set)
            await trio.sleep_forever()

        async with models.new_server(exit_timeout_secs=0.1) as server:
            engine = engine_of(server)
            with_app(engine, app)
            client = Client(engine, "/", {})
            await asyncio.wait_for(begun.wait(), SECONDS)
        with pytest.raises(neptrio.Unavailable):
            await asyncio.wait_for(client.task, SECONDS)

    asyncio.run(main())


@pytest.mark.slow
def test_an_app_that_fails_fails_the_call() -> None:
    async def main(server: neptrio.Server, engine: Engine) -> None:
        async def app(scope: Event, receive: Any, send: Any) -> None:
            raise ValueError("a bug")

        with_app(engine, app)
        with pytest.raises(ValueError, match="a bug"):
            await asyncio.wait_for(Client(engine, "/").task, SECONDS)

    run(main)


def test_limits_on_a_client_count_its_calls() -> None:
    async def main(server: neptrio.Server, engine: Engine) -> None:
        first = Client(engine, "/v2/models/hold/infer", doubled(1))
        await until_live(server, "executing", 1)
        status, body = await Client(engine, "/v2/models/double/infer", doubled(1)).whole()
        assert status == 429 and b"1 requests under way" in body
        other = Client(engine, "/v2/models/double/infer", doubled(1), client=("192.0.2.2", 1))
        assert (await other.whole())[0] == 200
        models.gate.set()
        assert (await first.whole())[0] == 200

    run(main, max_concurrent_requests_per_address=1)


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [None, True])
def test_clients_of_a_hosting_program_count_as_being_on_other_machines(allowed: bool | None) -> None:
    """Nobody knows where the program listens, so files in load calls, which run as code, must be allowed to be taken."""

    async def main(server: neptrio.Server, engine: Engine) -> None:
        files = {"file:1/model.py": "cHJpbnQoMSk=", "config": '{"backend": "python"}'}
        load = Client(engine, "/v2/repository/models/code/load", {"parameters": files})
        status, answer = await load.whole()
        if allowed:
            assert b"--allow-file-override" not in answer
        else:
            assert status == 403 and b"--allow-file-override" in answer

    run(main, model_control_mode="explicit", allow_file_override=allowed)


def test_a_suggested_setting_holds_where_the_server_has_none() -> None:
    given = models.new_server(allow_file_override=True)
    given.suggest(allow_file_override=False, read_only=True)
    assert given._once().takes_files(None) and given._settings["read_only"]
    given._clean()


def test_requests_that_wait_fill_the_budget() -> None:
    """As over the roads of tests/transport/test_held_bytes.py: those without room are refused, small ones too beyond it."""
    size = 100_000  # numbers, 400,000 bytes
    numbers = {"name": "x", "shape": [size], "datatype": "FP32", "parameters": {"binary_data_size": 4 * size}}
    head = json.dumps({"inputs": [numbers]}).encode()
    headers = [(b"Host", b"somewhere"), (b"Inference-Header-Content-Length", b"%d" % len(head))]

    def large(engine: Engine) -> Client:
        length = (b"Content-Length", b"%d" % (len(head) + 4 * size))
        client = Client(engine, "/v2/models/hold/infer", LATER, headers=[*headers, length])
        client.put(head + bytes(4 * size), False)
        return client

    async def main(server: neptrio.Server, engine: Engine) -> None:
        held = engine.core.services.held
        held.limit = 1_000_000

        async def look() -> None:
            """Has it counted now: for some milliseconds it adds what was let in to what it has counted."""
            await asyncio.to_thread(trio.from_thread.run_sync, held.look, trio_token=engine.token)

        waiting = []
        for number in (1, 2):
            await look()
            waiting.append(large(engine))
            await until_live(server, "executing", number)
        await look()
        status, body = await large(engine).whole()
        assert status == 503 and b"--max-held-bytes" in body
        held.limit = 500_000  # it is more than full now, which is told to small ones too
        await look()
        status, body = await Client(engine, "/v2/models/double/infer", doubled(1)).whole()
        assert status == 503 and b"no room for more" in body
        assert (await Client(engine, "/v2/health/live").whole())[0] == 200
        models.gate.set()
        for client in waiting:
            assert (await client.whole())[0] == 200
        held.limit = 1_000_000
        await look()
        assert (await large(engine).whole())[0] == 200

    run(main)
