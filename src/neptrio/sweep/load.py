"""Closed-loop clients over HTTP/1.1: each sends its next request when it has the answer to the one before.

The problem: the clients share a machine with the server, and often it is their own cost that limits a rate.
The choice: one thread, sockets that do not block, and requests that were encoded before the measurement. Of an
answer only its head is looked at. One request costs a third of what http.client takes in a thread.
Rules:
 1. A client has one request under way. Its latency runs from the moment before the first byte is written to the
    moment its last byte was read.
 2. When the time is over no client begins another request, those under way are waited for, so that the server's
    statistics before and after differ by exactly what was sent.
 3. Clients of a sequence end it before they stop.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from neptrio.client.connection import ConnectionLost

READ_BYTES = 256 << 10
REFUSALS = 100  # failures without any success after which a run is given up


@dataclass
class Loaded:
    """What one run of the clients saw. Times are seconds; `ended` are moments after the run's start."""

    seconds: float = 0.0
    client_cpu: float = 0.0  # CPU seconds of this process
    latencies: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    failures: int = 0
    failure: str = ""  # what the server said the first time


@dataclass(frozen=True)
class Script:
    """What one client sends: `steps` over and over. After its last step a client may stop at any time."""

    steps: tuple[bytes, ...]
    last: bytes = b""  # ends what `steps` began when the time is over before their end


class _Client:
    def __init__(self, sock: socket.socket, script: Script) -> None:
        self.sock = sock
        self.script = script
        self.step = 0
        self.unsent = memoryview(b"")
        self.buffer = bytearray()
        self.head = 0  # bytes of the answer's head, 0 until it is complete
        self.wanted = -1  # bytes of the answer; -1: it is chunked, or the head is not complete
        self.chunked = False
        self.began = 0.0
        self.stopping = False
        self.writing = False


class Load:
    """Clients of one server. `url` is HOST:PORT or an http or https URL. Raises ConnectionLost."""

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        self._tls = parts.scheme == "https"
        self._address = (parts.hostname or "", parts.port or (443 if self._tls else 80))
        self._host = parts.netloc.rpartition("@")[2]
        self._prefix = parts.path.rstrip("/")
        self._timeout = timeout

    def request(self, path: str, headers: dict[str, str], body: bytes) -> bytes:
        """The bytes of a POST request."""
        lines = [
            f"POST {self._prefix}{path} HTTP/1.1",
            f"Host: {self._host}",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body

    def _connect(self) -> socket.socket:
        try:
            sock = socket.create_connection(self._address, self._timeout)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls:
                sock = ssl.create_default_context().wrap_socket(sock, server_hostname=self._address[0])
        except OSError as error:
            raise ConnectionLost(f"{self._host}: {error}") from error
        sock.setblocking(False)
        return sock

    def run(self, scripts: Sequence[Script], seconds: float) -> Loaded:
        """Runs a client per script for so long, at least one request each. Raises ConnectionLost."""
        found = Loaded()
        with selectors.DefaultSelector() as selector:
            clients = []
            try:
                for script in scripts:
                    client = _Client(self._connect(), script)
                    clients.append(client)
                    selector.register(client.sock, selectors.EVENT_READ, client)
                cpu, start = time.process_time(), time.perf_counter()
                for client in clients:
                    self._send(selector, client, script_step(client))
                open_clients = len(clients)
                until = start + seconds
                while open_clients:
                    events = selector.select(self._timeout)
                    if not events:
                        raise ConnectionLost(f"{self._host}: no answer in {self._timeout:g} s")
                    for key, mask in events:
                        client = key.data
                        if mask & selectors.EVENT_WRITE:
                            self._write(selector, client)
                        if mask & selectors.EVENT_READ and self._read(selector, client):
                            self._answered(found, client, start)
                            stop = time.perf_counter() >= until or (
                                found.failures >= REFUSALS and not found.latencies
                            )
                            if not self._next(selector, client, stop):
                                open_clients -= 1
                found.seconds = max(found.ended, default=time.perf_counter() - start)
                found.client_cpu = time.process_time() - cpu
            finally:
                for client in clients:
                    client.sock.close()
        return found

    def _next(self, selector: selectors.BaseSelector, client: _Client, stop: bool) -> bool:
        """Sends the client's next request; False when it has stopped."""
        if not client.stopping:
            client.step = (client.step + 1) % len(client.script.steps)
            if not stop:
                self._send(selector, client, script_step(client))
                return True
            if client.step and client.script.last:
                client.stopping = True
                self._send(selector, client, client.script.last)
                return True
        selector.unregister(client.sock)
        return False

    def _send(self, selector: selectors.BaseSelector, client: _Client, request: bytes) -> None:
        client.unsent = memoryview(request)
        client.buffer.clear()
        client.head, client.wanted, client.chunked = 0, -1, False
        client.began = time.perf_counter()
        self._write(selector, client)

    def _write(self, selector: selectors.BaseSelector, client: _Client) -> None:
        try:
            while client.unsent:
                client.unsent = client.unsent[client.sock.send(client.unsent) :]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError as error:
            raise ConnectionLost(f"{self._host}: {error}") from error
        if client.writing != bool(client.unsent):
            client.writing = bool(client.unsent)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.writing else 0)
            selector.modify(client.sock, events, client)

    def _read(self, selector: selectors.BaseSelector, client: _Client) -> bool:
        """Takes in what has come; True when the answer is complete."""
        try:
            while True:
                data = client.sock.recv(READ_BYTES)
                if not data:
                    raise ConnectionLost(f"{self._host} closed the connection of a request")
                client.buffer += data
                if not self._tls and len(data) < READ_BYTES:
                    break
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except OSError as error:
            raise ConnectionLost(f"{self._host}: {error}") from error
        if not client.head:
            at = client.buffer.find(b"\r\n\r\n")
            if at < 0:
                return False
            client.head = at + 4
            head = bytes(client.buffer[:at]).lower()
            _, found, rest = head.partition(b"\r\ncontent-length:")
            if found:
                client.wanted = client.head + int(rest.partition(b"\r\n")[0])
            elif b"\r\ntransfer-encoding: chunked" in head:
                client.chunked = True
            else:
                raise ConnectionLost(f"{self._host} answers neither with a Content-Length nor in chunks")
        if client.chunked:
            return client.buffer.endswith(b"\r\n0\r\n\r\n")
        return len(client.buffer) >= client.wanted

    def _answered(self, found: Loaded, client: _Client, start: float) -> None:
        now = time.perf_counter()
        status = bytes(client.buffer[9:12])
        event = client.chunked and b"\nevent: error\n" in client.buffer
        if status == b"200" and not event:
            found.latencies.append(now - client.began)
            found.ended.append(now - start)
        else:
            found.failures += 1
            if not found.failure:
                text = client.buffer[client.head :][:300].decode(errors="replace")
                found.failure = f"HTTP status {status.decode(errors='replace')}: {text}"
        if b"\r\nconnection: close" in bytes(client.buffer[: client.head]).lower():
            raise ConnectionLost(
                f"{self._host} closes connections after an answer: {found.failure or 'no error'}"
            )


def script_step(client: _Client) -> bytes:
    """The request that is the client's turn."""
    return client.script.steps[client.step]
