"""The metrics port: GET /metrics, and nothing else.

Other paths are 200 with an empty body, other methods 405, as on a Triton server (spec/observed.md
15). A port of its own, so that a scrape needs no way through the inference fronts and works while
they drain.

Rules:
 1. A connection is dropped after IDLE_SECONDS without a request and at MAX_CONNECTIONS others.
 2. A request head or body beyond MAX_REQUEST bytes, or one that is no HTTP, ends its connection.
 3. Whatever a connection raises ends there.
"""

from __future__ import annotations

import logging
import socket
from typing import Any

import httptools
import trio

from neptrio.observe.host import HostSampler
from neptrio.observe.metrics import Metrics
from neptrio.transport.link import accept_loop

log = logging.getLogger("neptrio.metrics")

IDLE_SECONDS = 60
MAX_CONNECTIONS = 256
MAX_REQUEST = 64 << 10
CONTENT_TYPE = b"text/plain; charset=utf-8"


class _Requests:
    """Collects the requests that the parser completes, as (method, path, keep alive)."""

    def __init__(self) -> None:
        self.done: list[tuple[bytes, bytes, bool]] = []
        self.received = 0
        self._url = b""
        self.parser = httptools.HttpRequestParser(self)

    def on_message_begin(self) -> None:
        self._url = b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_message_complete(self) -> None:
        self.received = 0
        self.done.append((self.parser.get_method(), self._url, self.parser.should_keep_alive()))


class MetricsServer:
    """The front: accepts, answers, and samples the machine."""

    def __init__(
        self, metrics: Metrics, listener: socket.socket, sampler: HostSampler, interval: float
    ) -> None:
        self._metrics = metrics
        self._listener = listener
        self._sampler = sampler
        self._interval = interval
        self._connections = 0

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled."""
        self._metrics.host = await trio.to_thread.run_sync(self._sampler.sample, abandon_on_cancel=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sample)
            task_status.started()
            try:
                await accept_loop(self._listener, lambda sock: nursery.start_soon(self._serve, sock))
            finally:
                self._listener.close()

    @property
    def connections(self) -> int:
        """None that could hold up a shutdown."""
        return 0

    async def drain(self) -> None:
        """Nothing: scrapes go on until the fronts are down."""

    async def _sample(self) -> None:
        while True:
            await trio.sleep(self._interval)
            try:
                self._metrics.host = await trio.to_thread.run_sync(
                    self._sampler.sample, abandon_on_cancel=True
                )
            except Exception:
                log.exception("sampling the machine failed, its gauges stay as they are")
                return

    async def _serve(self, sock: socket.socket) -> None:
        if self._connections >= MAX_CONNECTIONS:
            sock.close()
            return
        self._connections += 1
        try:
            async with trio.SocketStream(trio.socket.from_stdlib_socket(sock)) as stream:
                await self._answer_all(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError, httptools.HttpParserError):
            pass
        except Exception:
            log.exception("a metrics connection failed")
        finally:
            self._connections -= 1

    async def _answer_all(self, stream: trio.SocketStream) -> None:
        requests = _Requests()
        while True:
            with trio.move_on_after(IDLE_SECONDS) as idle:
                data = await stream.receive_some(65536)
            if idle.cancelled_caught or not data:
                return
            requests.received += len(data)
            if requests.received > MAX_REQUEST:
                return
            requests.parser.feed_data(data)
            for method, url, keep_alive in requests.done:
                with trio.fail_after(IDLE_SECONDS):
                    await stream.send_all(await self.answer(method, url, keep_alive))
                if not keep_alive:
                    return
            requests.done.clear()

    async def answer(self, method: bytes, url: bytes, keep_alive: bool) -> bytes:
        """The whole HTTP response."""
        status, headers, body = b"200 OK", [], b""
        if method != b"GET":
            status, headers = b"405 Method Not Allowed", [(b"Allow", b"GET")]
        elif url.partition(b"?")[0] == b"/metrics":
            headers, body = [(b"Content-Type", CONTENT_TYPE)], await self._metrics.document()
        headers.append((b"Content-Length", b"%d" % len(body)))
        if not keep_alive:
            headers.append((b"Connection", b"close"))
        lines: list[Any] = [b"HTTP/1.1 " + status, *(b"%s: %s" % pair for pair in headers)]
        return b"\r\n".join(lines) + b"\r\n\r\n" + body
