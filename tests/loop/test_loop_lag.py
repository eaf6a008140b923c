"""The loop's measure of itself: what a pass is, who is named, and where the numbers are shown."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from neptrio.loop.loop_lag import BOUNDS_NS, LoopLag
from neptrio.loop.loop_pass import LoopPass
from neptrio.loop.poller import Poller
from neptrio.loop.timers import Timers
from neptrio.observe.top_view import Sample, render
from tests.support.embedded import EmbeddedServer
from tests.support.http import Http1
from tests.support.metrics import value
from tests.support.repository import identity_config, write_model
from tests.support.waiting import until_trio

MS = 1_000_000


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    """What is logged of the loop."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    log = logging.getLogger("neptrio.loop")
    log.addHandler(handler)
    yield found
    log.removeHandler(handler)


def busy(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def busy_first(lag: LoopLag) -> None:
    """Takes 0.1 s, as if no line had been logged before."""
    lag.told_ns = 0
    busy(0.1)


def test_a_pass_is_counted_once_by_its_length() -> None:
    lag = LoopLag()
    lag.waits()
    assert lag.count == 0, "no pass was under way"
    lag.woke()
    busy(0.002)
    lag.woke()
    lag.waits()
    lag.waits()
    found = lag.statistics()
    assert found.count == 1 and found.max_ns == found.sum_ns >= 2 * MS
    assert list(found.cumulative) == [int(found.max_ns <= bound) for bound in BOUNDS_NS]
    assert lag.cumulative([1 << 14, 1 << 36]) == [0, 1]


def test_the_longest_work_is_named(lines: list[logging.LogRecord]) -> None:
    lag = LoopLag(20)
    near, far = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, (host, port) = listener.accept()
    with near, far, listener, client, server:
        of_client = SimpleNamespace(sock=server)

        class Callback:
            __self__ = of_client

        notes: list[tuple[int, str, str, Any, int]] = [
            (0, "decoding", "m", None, 5),
            (10 * MS, "encoding", "n", Callback(), 7),
        ]
        task = SimpleNamespace(name="a task")
        lag.late(40 * MS, 40 * MS, notes, task, 1 * MS)
        lag.late(70_000 * MS, 40 * MS, [], task, 30 * MS)
        lag.late(140_000 * MS, 40 * MS, [(139_990 * MS, "decoding", "m", None, 5)], task, 1 * MS)
    said = [record.getMessage().partition("all requests waited for 40 ms because of ")[2] for record in lines]
    assert [text.partition(" (")[0] for text in said] == [
        f"encoding of model 'n', 7 bytes, connection {host}:{port}",
        "one step of the server itself, or the processor was taken away; the step is of a task",
        "many small things, or the processor was taken away",
    ]
    # and what can be done about it, where something can
    assert ["--frontends" in said[0], *("isolation 'process'" in text for text in said[1:])] == [
        True,
        True,
        True,
    ]


def test_lines_are_few(lines: list[logging.LogRecord]) -> None:
    lag = LoopLag(20)
    for begun in range(1, 90_000, 6_000):
        lag.late(begun * MS, 30 * MS, [], None, 0)
    assert [record.getMessage().partition(" (")[0] for record in lines] == [
        "all requests waited for 30 ms because of many small things, or the processor was taken away",
        "all requests waited for 30 ms because of many small things, or the processor was taken away; "
        "so 9 more times since the last line",
    ]


def test_notes_are_of_one_pass(lines: list[logging.LogRecord]) -> None:
    lag = LoopLag(0.000001)
    lag.note("work between passes", "m", 1)
    lag.woke()
    lag.note("decoding", "m", 1)
    busy(0.002)
    lag.waits()
    lag.told_ns = 0
    lag.woke()
    busy(0.002)
    lag.waits()
    assert "decoding of model 'm', 1 bytes" in lines[0].getMessage()
    assert "many small things" in lines[1].getMessage()


@pytest.mark.parametrize("way", ["hook", "task"])
def test_the_poller_measures_what_it_calls(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "task":
        monkeypatch.setenv("NEPTRIO_POLLER", "task")
    lag = LoopLag()

    async def main() -> None:
        loop_pass = LoopPass()
        timers = Timers(loop_pass)
        poller = Poller(loop_pass, timers, lag)
        near, far = socket.socketpair()
        with near, far:
            near.setblocking(False)

            def receive() -> bool:
                busy(0.05)
                return near.recv(10) == b"more"

            async with trio.open_nursery() as nursery:
                for part in (loop_pass, timers, poller):
                    await nursery.start(part.run)
                far.send(b"more")
                nursery.start_soon(poller.read, near, receive)
                await until_trio(lambda: lag.max_ns >= 50 * MS, "the pass is measured")
                nursery.cancel_scope.cancel()

    trio.run(main)
    assert lag.cumulative(BOUNDS_NS)[-1] == lag.count
    assert lag.sum_ns >= 50 * MS


def test_a_server_shows_its_lag(
    tmp_path_factory: pytest.TempPathFactory, lines: list[logging.LogRecord]
) -> None:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "m", identity_config())
    with EmbeddedServer(repository, loop_lag_warning_ms=20) as server:
        server.ask(busy_first, server.server.loop.lag)
        metrics = "{}:{}".format(*server.server.metrics_listener.getsockname()[:2])  # type: ignore[union-attr]
        with Http1(server.http) as client:
            live = json.loads(client.request("GET", "/v2/models/stats?live=true").body)
            plain = json.loads(client.request("GET", "/v2/models/stats").body)
        with Http1(metrics) as client:
            text = client.request("GET", "/metrics").body.decode()
    assert "loop_lag" not in plain
    lag = live["loop_lag"]
    assert lag["max_ns"] >= 100 * MS and lag["cumulative"][-1] == [BOUNDS_NS[-1], lag["count"]]
    assert value(text, "neptrio_loop_lag_seconds_count") >= lag["count"]
    assert value(text, "neptrio_loop_lag_seconds_bucket", le="1.6384e-05") >= 0
    assert any("run_sync_soon" in record.getMessage() for record in lines), "the task that was busy"


def test_top_shows_percentiles_of_the_interval() -> None:
    old = {"cumulative": [[1 << 14, 5], [1 << 20, 10]]}
    new = {"cumulative": [[1 << 14, 104], [1 << 20, 110]]}
    head = render("u", Sample(0, {}, old), Sample(1, {}, new))[0]
    assert head == "u  0 models, interval 1.0 s, loop lag p50/p99 16us/16us"
    assert render("u", Sample(0, {}), Sample(1, {}, old))[0].endswith("16us/1.0ms")
    assert "loop" not in render("u", Sample(0, {}), Sample(1, {}))[0]
