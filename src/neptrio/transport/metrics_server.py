"""The metrics port: GET /metrics or /metrics/, and nothing else.

Other paths are 200 with an empty body, other methods 405 with the body that they have on the other
ports, as on a Triton server (docs/protocol/observed.md 15). A port of its own, so that a scrape needs no
way through the inference fronts and works while
they drain.

Rules:
 1. A connection is dropped after IDLE_SECONDS without a request; where there are MAX_CONNECTIONS, the one
    whose last request is longest ago makes way for a new one.
 2. A request head or body beyond MAX_REQUEST bytes, or one that is no HTTP, ends its connection.
 3. An upgrade that a client offers is not taken up; the connection ends behind the answer, and nothing that
    follows is looked at. HTTP/1.1 requests name one Host (transport.host), and one that may be this server's
    (transport.origin_policy).
 4. Whatever a connection raises ends there.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import Any

import httptools
import trio

from neptrio.errors import Code, TritonError
from neptrio.loop import open_files
from neptrio.observe.host import HostSampler
from neptrio.observe.metrics import Metrics
from neptrio.service.connections import Places, kept_back
from neptrio.transport.accept import Acceptor
from neptrio.transport.host import host_problem
from neptrio.transport.origin_policy import OriginPolicy, is_loopback

log = logging.getLogger("neptrio.metrics")

IDLE_SECONDS = 60
MAX_CONNECTIONS = 256
MAX_REQUEST = 64 << 10
PATHS = (b"/metrics", b"/metrics/")
LINGER_SECONDS = 0.5  # in which the rest of what a refused client sends is read, so that it sees the answer
CONTENT_TYPE = b"text/plain; charset=utf-8"


@dataclass(frozen=True)
class MetricsRequest:
    """What was asked; `refusal` is what it is answered with, None where there is nothing to refuse."""

    method: bytes
    url: bytes
    keep_alive: bool
    refusal: TritonError | None = None


class _Requests:
    """Collects the requests that the parser completes."""

    def __init__(self, origins: OriginPolicy) -> None:
        self._origins = origins
        self.done: list[MetricsRequest] = []
        self.received = 0
        self._url = b""
        self._hosts: list[bytes] = []
        self._refusal: TritonError | None = None
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> None:
        """Parses bytes. Raises httptools.HttpParserError for what is no HTTP."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # a request that offered an upgrade is the connection's last (rule 3)

    def on_message_begin(self) -> None:
        self._url = b""
        self._hosts = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"host":
            self._hosts.append(value)

    def on_headers_complete(self) -> None:
        hosts = self._hosts
        host = hosts[-1] if hosts else None
        self._refusal = host_problem(host, len(hosts), self._parser.get_http_version())
        if self._refusal is None:
            self._refusal = self._origins.problem("GET", host, None, None)

    def on_message_complete(self) -> None:
        self.received = 0
        parser = self._parser
        keep_alive = parser.should_keep_alive() and not parser.should_upgrade() and not self._refusal
        self.done.append(MetricsRequest(parser.get_method(), self._url, keep_alive, self._refusal))


class MetricsServer:
    """The front: accepts, answers, and samples the machine."""

    def __init__(
        self,
        metrics: Metrics,
        listener: socket.socket,
        sampler: HostSampler,
        interval: float,
        allowed_hosts: tuple[str, ...] = (),
    ) -> None:
        loopback = is_loopback(str(listener.getsockname()[0]))
        self._origins = OriginPolicy(hosts=allowed_hosts, loopback=loopback)
        self._metrics = metrics
        self._listener = listener
        self._sampler = sampler
        self._interval = interval
        self._places = Places(min(MAX_CONNECTIONS, kept_back(open_files.limit()) // 8))

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled."""
        await self._sample()
        async with trio.open_nursery() as nursery:

            def start(sock: socket.socket, _address: str) -> bool:
                nursery.start_soon(self._serve, sock)
                return self._places.take(sock)

            nursery.start_soon(self._sample_for_ever)
            task_status.started()
            await Acceptor(self._listener, start).run()

    @property
    def connections(self) -> int:
        """None that could hold up a shutdown."""
        return 0

    async def drain(self) -> None:
        """Nothing: scrapes go on until the fronts are down."""

    async def _sample_for_ever(self) -> None:
        while True:
            await trio.sleep(self._interval)
            await self._sample()

    async def _sample(self) -> None:
        """A failure is of the moment (no descriptor is left): the next sample may be taken."""
        try:
            self._metrics.host = await trio.to_thread.run_sync(self._sampler.sample, abandon_on_cancel=True)
        except OSError as error:
            log.warning("sampling the machine failed, its gauges stay as they are: %s", error.strerror)
        except Exception:
            log.exception("sampling the machine failed, its gauges stay as they are")

    async def _serve(self, sock: socket.socket) -> None:
        try:
            async with trio.SocketStream(trio.socket.from_stdlib_socket(sock)) as stream:
                await self._answer_all(stream, sock)
        except (trio.BrokenResourceError, trio.ClosedResourceError, httptools.HttpParserError):
            pass
        except Exception:
            log.exception("a metrics connection failed")
        finally:
            self._places.free(sock)

    async def _answer_all(self, stream: trio.SocketStream, sock: socket.socket) -> None:
        requests = _Requests(self._origins)
        while True:
            with trio.move_on_after(IDLE_SECONDS) as idle:
                data = await stream.receive_some(65536)
            if idle.cancelled_caught or not data:
                return
            requests.received += len(data)
            if requests.received > MAX_REQUEST:
                return
            requests.feed(data)
            self._places.take(sock)
            for asked in requests.done:
                with trio.fail_after(IDLE_SECONDS):
                    await stream.send_all(await self.answer(asked))
                if not asked.keep_alive:
                    await _linger(stream)
                    return
            requests.done.clear()

    async def answer(self, asked: MetricsRequest) -> bytes:
        """The whole HTTP response."""
        status, headers, body = b"200 OK", [], b""
        if asked.refusal:
            status = b"403 Forbidden" if asked.refusal.code is Code.FORBIDDEN else b"400 Bad Request"
            headers, body = [(b"Content-Type", CONTENT_TYPE)], str(asked.refusal).encode() + b"\n"
        elif asked.method != b"GET":
            status, body = b"405 Not Allowed", b'{"error":"Method Not Allowed"}'
            headers = [(b"Content-Type", b"application/json"), (b"Allow", b"GET")]
        elif asked.url.partition(b"?")[0] in PATHS:
            headers, body = [(b"Content-Type", CONTENT_TYPE)], await self._metrics.document()
        headers.append((b"Content-Length", b"%d" % len(body)))
        if not asked.keep_alive:
            headers.append((b"Connection", b"close"))
        lines: list[Any] = [b"HTTP/1.1 " + status, *(b"%s: %s" % pair for pair in headers)]
        return b"\r\n".join(lines) + b"\r\n\r\n" + (b"" if asked.method == b"HEAD" else body)


async def _linger(stream: trio.SocketStream) -> None:
    """Ends our side and reads what still comes: closing before would reset the connection."""
    with trio.move_on_after(LINGER_SECONDS):
        await stream.send_eof()
        while await stream.receive_some(65536):
            pass
