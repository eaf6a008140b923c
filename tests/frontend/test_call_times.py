"""Traces of what front ends pass on whole (generate, infer_stream, OpenAI's routes and infer requests that they do not
read): the times are those at which the front end received the request and the engine gave it the answer, and every trace ends."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.test_front_ends import front_of, pids
from tests.frontend.test_send_times import ANSWERED, points, stopped, times
from tests.support.http import Http1, Http2, Reply
from tests.support.metrics import scrape, value
from tests.support.server import ServerProcess
from tests.support.talking import Talking
from tests.support.traced import read
from tests.support.waiting import until

ASKED = b'{"inputs": [{"name": "P", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}'
BATCHED = ASKED.replace(b"[1]", b"[1, 1]")
HTTP = {"http1": Http1, "http2": Http2}


@dataclass(frozen=True)
class Route:
    """A route, and what is asked there."""

    path: str
    body: bytes
    model: str = "talks"
    says: str = "rre"  # what the model is told

    @property
    def streams(self) -> bool:
        """Whether each response is sent as it comes."""
        return "stream" in self.path or b'"stream": true' in self.body

    @property
    def responses(self) -> int:
        return self.says.count("r")

    def ask(self, client: Http1 | Http2) -> Reply:
        """Asks, and reads the whole answer."""
        return client.request("POST", self.path, self.body)


def openai(path: str, **members: Any) -> Route:
    return Route("/v1/" + path, json.dumps({"model": "talks", **members}).encode())


CHAT = [{"role": "user", "content": "x"}]
ROUTES = {
    "generate": Route("/v2/models/talks/generate", b'{"P": "x"}', says="re"),
    "generate_stream": Route("/v2/models/talks/generate_stream", b'{"P": "x"}'),
    "infer_stream": Route("/v2/models/talks/infer_stream", ASKED),
    "completions": openai("completions", prompt="x"),
    "completions stream": openai("completions", prompt="x", stream=True),
    "chat": openai("chat/completions", messages=CHAT),
    "chat stream": openai("chat/completions", messages=CHAT, stream=True),
    "embeddings": Route("/v1/embeddings", b'{"model": "embeds", "input": "x"}', "embeds", "re"),
    # a version that the front end does not know by this text: the engine reads the request
    "infer": Route("/v2/models/embeds/versions/01/infer", BATCHED, "embeds", "re"),
}
STREAMS = [name for name, route in ROUTES.items() if route.streams]


class Traced:
    """A server that traces every request."""

    def __init__(self, server: ServerProcess, models: Talking, file: Path) -> None:
        self.server = server
        self.models = models
        self.file = file

    def ended(self, model: str) -> list[dict[str, Any]]:
        """The last traces of a model, from any front end."""
        with urllib.request.urlopen(f"http://{self.server.http}/v2/trace/recent", timeout=60) as answer:
            return [trace for trace in json.loads(answer.read()) if trace["model_name"] == model]

    def of(self, model: str, since: int) -> dict[str, Any]:
        """The one trace of a request that came after a time."""
        (trace,) = [t for t in self.ended(model) if t["timestamps"][0]["ns"] >= since]
        return trace

    def late(self, model: str, since: int) -> dict[str, Any]:
        """The trace of a request whose client has no answer, when it has ended."""
        return until(
            lambda: [t for t in self.ended(model) if t["timestamps"][0]["ns"] >= since], "the trace ends"
        )[0]

    def answers(self, model: str) -> float:
        """How often a model has answered, from the engine's own port."""
        return value(scrape(self.server), "nv_inference_request_success", model=model, version="1")

    def answer(self, route: Route) -> None:
        """Lets the model answer the one request that it has, and waits until the engine knows of it."""
        before = self.answers(route.model)
        self.models.go(route.says)
        self.models.ended()
        until(lambda: self.answers(route.model) == before + 1, "the engine has the answer")


@contextmanager
def traced_server(folder: Path, front_ends: int) -> Iterator[Traced]:
    repository = folder / "models"
    models = Talking(repository, folder / "pipes")
    flags = [f"--trace-config={each}" for each in ("level=TIMESTAMPS", "rate=1")]
    flags += [f"--trace-config=triton,file={folder / 'traces'}", f"--frontends={front_ends}"]
    try:
        with ServerProcess(repository, *flags) as server:
            yield Traced(server, models, folder / "traces")
    finally:
        models.close()


@pytest.fixture(scope="module", params=[0, 2], ids=["no front ends", "2 front ends"])
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    with traced_server(tmp_path_factory.mktemp("server"), request.param) as made:
        yield made


@pytest.fixture(scope="module")
def with_front_ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    with traced_server(tmp_path_factory.mktemp("server"), 2) as made:
        yield made


@pytest.fixture
def of_its_own(tmp_path: Path) -> Iterator[Traced]:
    """A server whose front ends have not been killed before: one that is killed again and again starts 30 s later."""
    with traced_server(tmp_path, 2) as made:
        yield made


@pytest.fixture(params=HTTP)
def http(request: pytest.FixtureRequest) -> type[Http1 | Http2]:
    return HTTP[request.param]


@pytest.mark.parametrize("name", ROUTES)
def test_who_has_an_answer_finds_its_trace(traced: Traced, http: type[Http1 | Http2], name: str) -> None:
    route = ROUTES[name]
    with http(traced.server.http) as client:
        for _ in range(20):
            traced.models.go(route.says)
            sent = time.monotonic_ns()
            assert route.ask(client).status == 200
            received = time.monotonic_ns()
            trace = traced.of(route.model, sent)
            found = points(trace)
            assert found[:2] == ["RECV_START", "RECV_END"]
            assert [found.count(point) for point in ANSWERED] == [route.responses] * 3
            made, starts, ends = (times(trace, point) for point in ANSWERED)
            for one, start, end in zip(made, starts, ends, strict=True):
                assert sent <= one <= start <= end
                assert start <= received
            traced.models.started()
            traced.models.ended()


@pytest.mark.parametrize("name", STREAMS)
def test_each_response_of_a_stream_has_its_own_times(
    traced: Traced, http: type[Http1 | Http2], name: str
) -> None:
    route = ROUTES[name]
    sent = time.monotonic_ns()
    with http(traced.server.http) as client:
        words = Words(client, route)
        traced.models.go("r")
        words.wait(1)
        between = time.monotonic_ns()
        traced.models.go("re")
        words.wait(2)
        received = time.monotonic_ns()
        words.end()
    trace = traced.of(route.model, sent)
    first, second = times(trace, "SEND_START")
    assert sent <= first <= between <= second <= received
    assert times(trace, "SEND_END")[0] >= first
    traced.models.started()
    traced.models.ended()


class Words:
    """The answer to a stream, as it comes."""

    def __init__(self, client: Http1 | Http2, route: Route) -> None:
        self._client = client
        self._got = b""
        self._done = False
        self._stream = client.start("POST", route.path, route.body)
        self._head = True

    def _more(self) -> None:
        if isinstance(self._client, Http2):
            self._client.pump()
            self._got = getattr(self._client.replies.get(self._stream), "body", b"")
            self._done = self._stream in self._client.ended
            return
        if self._head:
            self._head = False
            assert self._client.head().status == 200
        chunk = self._client.chunk()
        self._got += chunk
        self._done = not chunk

    def wait(self, count: int) -> None:
        """Waits for so many of the model's words."""
        while self._got.count(b"word") < count:
            assert not self._done
            self._more()

    def end(self) -> None:
        """Waits for the end of the answer."""
        while not self._done:
            self._more()


@pytest.mark.parametrize("name", ROUTES)
def test_when_a_request_began_to_come_and_was_whole(
    traced: Traced, http: type[Http1 | Http2], name: str
) -> None:
    """The client waits for a sign that its head has come before it sends the body."""
    route = ROUTES[name]
    traced.models.go(route.says)
    sent = time.monotonic_ns()
    with http(traced.server.http) as client:
        if isinstance(client, Http1):
            head = f"POST {route.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(route.body)}\r\n"
            client.send(head.encode() + b"Expect: 100-continue\r\n\r\n")
            assert client.head().status == 100
            between = time.monotonic_ns()
            client.send(route.body)
            assert client.read().status == 200
        else:
            stream = client.connection.get_next_available_stream_id()
            fields = {":method": "POST", ":path": route.path, ":scheme": "http", ":authority": "localhost"}
            client.connection.send_headers(stream, list(fields.items()))
            assert client.request("GET", "/v2/health/live").status == 200
            between = time.monotonic_ns()
            client.connection.send_data(stream, route.body, end_stream=True)
            client.flush()
            assert client.finish(stream).status == 200
    trace = traced.of(route.model, sent)
    (start,), (end,) = times(trace, "RECV_START"), times(trace, "RECV_END")
    assert sent <= start <= between <= end
    traced.models.started()
    traced.models.ended()


@pytest.mark.parametrize("name", ROUTES)
def test_a_request_is_whole_when_the_front_end_has_it(with_front_ends: Traced, name: str) -> None:
    """The engine is stopped meanwhile."""
    traced, route = with_front_ends, ROUTES[name]
    server = traced.server
    with Http1(server.http) as client:
        assert client.request("GET", "/v2/health/live").status == 200
        pid = front_of(server, client.sock.getsockname())
        others = []
        while True:
            other = Http1(server.http)
            others.append(other)
            assert other.request("GET", "/v2/health/live").status == 200
            if front_of(server, other.sock.getsockname()) == pid:
                break
        traced.models.go(route.says)
        sent = time.monotonic_ns()
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            client.start("POST", route.path, route.body)
            # the front end answers this alone, and looks at what came before it no later
            other.send(b"nonsense\r\n\r\n")
            assert other.read().status >= 400
            here = time.monotonic_ns()
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        assert client.read().status == 200
        for each in others:
            each.close()
    trace = traced.of(route.model, sent)
    assert sent <= times(trace, "RECV_START")[0] <= times(trace, "RECV_END")[0] <= here
    assert times(trace, "REQUEST_START")[0] > here
    traced.models.started()
    traced.models.ended()


@pytest.mark.parametrize("name", ROUTES)
def test_a_front_end_that_is_killed(of_its_own: Traced, http: type[Http1 | Http2], name: str) -> None:
    """The engine had answered; no client has the answer, which the engine cannot know."""
    traced, route = of_its_own, ROUTES[name]
    sent = time.monotonic_ns()
    with http(traced.server.http) as client, ThreadPoolExecutor(1) as pool:
        call = pool.submit(route.ask, client)
        traced.models.started()
        with stopped(traced.server) as found:
            traced.answer(route)
            for pid in found:
                os.kill(pid, signal.SIGKILL)
        assert call.exception(60) is not None
    until(lambda: len(set(pids(traced.server)) - set(found)) == len(found), "others have started")
    ended = points(traced.late(route.model, sent))
    made, begun, sent_there = (ended.count(point) for point in ANSWERED)
    assert made == route.responses
    assert begun == sent_there <= made  # a task of the engine's may not have given it all of them yet


@pytest.mark.parametrize("name", STREAMS)
def test_a_client_that_leaves_in_the_middle(traced: Traced, http: type[Http1 | Http2], name: str) -> None:
    """What it had counts as sent."""
    route = ROUTES[name]
    sent = time.monotonic_ns()
    with http(traced.server.http) as client:
        words = Words(client, route)
        traced.models.started()
        traced.models.go("r")
        words.wait(1)
    traced.models.go("e")
    traced.models.ended()
    found = points(traced.late(route.model, sent))
    assert [found.count(point) for point in ANSWERED] == [1, 1, 1]


def test_every_choice_has_the_times_of_the_answer(traced: Traced, http: type[Http1 | Http2]) -> None:
    """Two prompts are two requests, and the answer is sent once."""
    traced.models.go("rere")
    sent = time.monotonic_ns()
    body = json.dumps({"model": "talks", "prompt": ["x", "y"]}).encode()
    with http(traced.server.http) as client:
        assert client.request("POST", "/v1/completions", body).status == 200
    first, second = [t for t in traced.ended("talks") if t["timestamps"][0]["ns"] >= sent]
    for one, other in ((first, second), (second, first)):
        assert times(one, "SEND_START")[0] <= times(other, "SEND_END")[0]
        assert times(one, "INFER_RESPONSE_COMPLETE")[0] <= times(other, "SEND_START")[0]
    for _ in range(2):
        traced.models.started()
        traced.models.ended()


def test_a_full_queue(traced: Traced, http: type[Http1 | Http2]) -> None:
    """The refusal is what is sent; the two requests before it are traced as ever."""
    route = Route("/v2/models/embeds/generate", b'{"P": "x"}', "embeds", "re")
    sent = time.monotonic_ns()
    with ThreadPoolExecutor(2) as pool, http(traced.server.http) as one, http(traced.server.http) as two:
        calls = [pool.submit(route.ask, one)]
        traced.models.started()
        calls.append(pool.submit(route.ask, two))
        with http(traced.server.http) as three:
            until(lambda: queued(traced) == 1, "one waits")
            refused = time.monotonic_ns()
            assert route.ask(three).status == 503
            received = time.monotonic_ns()
        for _ in calls:
            traced.models.go("re")
        assert [call.result(60).status for call in calls] == [200, 200]
    found = [t for t in traced.ended("embeds") if t["timestamps"][0]["ns"] >= sent]
    assert len(found) == 3
    (trace,) = [t for t in found if "error" in t]
    assert points(trace)[-3:] == ["REQUEST_END", "SEND_START", "SEND_END"]
    assert refused <= times(trace, "SEND_START")[0] <= received
    traced.models.started()
    for _ in calls:
        traced.models.ended()


def queued(traced: Traced) -> int:
    address = f"http://{traced.server.http}/v2/models/embeds/stats?live=true"
    with urllib.request.urlopen(address, timeout=60) as answer:
        return int(json.loads(answer.read())["model_stats"][0]["live"]["queued"])


@pytest.mark.parametrize("name", ["generate", "generate_stream", "chat"])
def test_a_count(traced: Traced, name: str) -> None:
    """As many traces as were asked for, of five requests."""
    route = ROUTES[name]
    address = f"http://{traced.server.http}/v2/trace/setting"

    def change(settings: dict[str, str]) -> None:
        with urllib.request.urlopen(address, json.dumps(settings).encode(), timeout=60) as answer:
            assert answer.status == 200

    file = Path(f"{traced.file}.0")
    before = len(read(file)) if file.exists() else 0
    sent = time.monotonic_ns()
    change({"trace_count": "3"})
    with Http1(traced.server.http) as client:
        for _ in range(5):
            traced.models.go(route.says)
            assert route.ask(client).status == 200
            traced.models.started()
            traced.models.ended()
    assert len([t for t in traced.ended(route.model) if t["timestamps"][0]["ns"] >= sent]) == 3
    change({"trace_count": "-1"})
    files = sorted(traced.file.parent.glob("traces.*"))
    assert sum(len(read(each)) for each in files if each.suffix[1:].isdigit()) >= before + 3
