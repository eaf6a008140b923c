"""Plain HTTP clients for tests: HTTP/1.1 on a raw socket, HTTP/2 by prior knowledge or over TLS."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.events

TIMEOUT = 60.0


@dataclass
class Reply:
    """A response: lower-case header names, the body as bytes."""

    status: int
    reason: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    version: str = ""
    interim: list[int] = field(default_factory=list)  # statuses of 1xx responses before it


class Http1:
    """One HTTP/1.1 connection: sends any bytes as they are, reads whole responses. `file` has what comes, for other readers."""

    def __init__(self, address: str, tls: ssl.SSLContext | None = None) -> None:
        """`address` is HOST:PORT or unix:PATH."""
        host, port = address.rsplit(":", 1)
        self.sock: Any
        if host == "unix":
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(TIMEOUT)
            self.sock.connect(port)
        else:
            self.sock = socket.create_connection((host, int(port)), timeout=TIMEOUT)
        if tls is not None:
            self.sock = tls.wrap_socket(self.sock, server_hostname="localhost")
        self.file = self.sock.makefile("rb")

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def request(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Reply:
        """Sends a request with Content-Length and reads its response; `headers` may name another Host."""
        self.start(method, path, body, headers)
        return self.read(method)

    def start(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> int:
        """Sends a request whose response is read later; returns what finish() takes, as that of Http2 does."""
        lines = [f"{method} {path} HTTP/1.1", f"Content-Length: {len(body)}"]
        headers = {"Host": "localhost", **(headers or {})}
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.send("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
        return 0

    def finish(self, stream: int) -> Reply:
        """Waits for the next response."""
        return self.read()

    def read(self, method: str = "GET") -> Reply:
        """Reads the next response that is not 1xx."""
        interim: list[int] = []
        while True:
            reply = self.head()
            if reply.status >= 200:
                break
            interim.append(reply.status)
        reply.interim = interim
        if method == "HEAD":
            return reply
        if reply.headers.get("transfer-encoding") == "chunked":
            reply.body = b"".join(self._chunks())
        elif "content-length" in reply.headers:
            reply.body = self._exactly(int(reply.headers["content-length"]))
        else:
            reply.body = self.file.read()
        return reply

    def chunk(self) -> bytes:
        """The next chunk of a chunked body, b"" at its end."""
        size = int(self.file.readline(), 16)
        data = self._exactly(size)
        assert self.file.readline() == b"\r\n"
        return data

    def _chunks(self) -> list[bytes]:
        found = []
        while chunk := self.chunk():
            found.append(chunk)
        return found

    def head(self) -> Reply:
        """Reads a status line and headers, of an answer whose body is read in pieces or that has none."""
        line = self.file.readline()
        if not line:
            raise ConnectionError("the server closed the connection")
        version, status, reason = line.decode().rstrip("\r\n").split(" ", 2)
        reply = Reply(int(status), reason, version=version)
        while (line := self.file.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            reply.headers[name.lower()] = value.strip()
        return reply

    def _exactly(self, n: int) -> bytes:
        data: bytes = self.file.read(n)
        if len(data) != n:
            raise ConnectionError(f"the body ended after {len(data)} of {n} bytes")
        return data

    def closed(self) -> bool:
        """Waits until the server closes the connection; False when it sends something instead."""
        try:
            return self.file.read(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.file.close()
        self.sock.close()

    def __enter__(self) -> Http1:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Http2:
    """One HTTP/2 connection, prior knowledge or ALPN."""

    def __init__(self, address: str, tls: ssl.SSLContext | None = None) -> None:
        host, port = address.rsplit(":", 1)
        self.sock: Any = socket.create_connection((host, int(port)), timeout=TIMEOUT)
        if tls is not None:
            self.sock = tls.wrap_socket(self.sock, server_hostname="localhost")
            assert self.sock.selected_alpn_protocol() == "h2"
        self.connection = h2.connection.H2Connection(
            config=h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        )
        self.connection.initiate_connection()
        self.replies: dict[int, Reply] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        self.terminated = False
        self.flush()

    def flush(self) -> None:
        self.sock.sendall(self.connection.data_to_send())

    def start(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> int:
        """Sends a whole request; returns its stream id. A Host in `headers` is sent as the authority."""
        stream = self.connection.get_next_available_stream_id()
        headers = dict(headers or {})
        host = headers.pop("Host", "localhost")
        fields = [(":method", method), (":path", path), (":scheme", "http"), (":authority", host)]
        fields += [("content-length", str(len(body)))]
        fields += [(name.lower(), value) for name, value in headers.items()]
        self.connection.send_headers(stream, fields, end_stream=not body)
        self.flush()
        while body and stream not in self.ended:
            room = min(
                self.connection.local_flow_control_window(stream), self.connection.max_outbound_frame_size
            )
            if room == 0:
                self.pump()
                continue
            self.connection.send_data(stream, body[:room], end_stream=len(body) <= room)
            body = body[room:]
            self.flush()
        return stream

    def pump(self) -> None:
        """Reads from the socket once and handles the frames that came."""
        data = self.sock.recv(65536)
        if not data:
            raise ConnectionError("the server closed the connection")
        for event in self.connection.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                fields = dict(event.headers)
                self.replies[event.stream_id] = Reply(
                    int(fields.pop(":status")), headers=fields, version="HTTP/2"
                )
            elif isinstance(event, h2.events.DataReceived):
                self.replies[event.stream_id].body += event.data
                self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                self.ended.add(event.stream_id)
            elif isinstance(event, h2.events.StreamReset):
                self.ended.add(event.stream_id)
                self.resets[event.stream_id] = int(event.error_code)
            elif isinstance(event, h2.events.ConnectionTerminated):
                self.terminated = True
        self.flush()

    def finish(self, stream: int) -> Reply:
        """Waits for the stream's response."""
        while stream not in self.ended:
            self.pump()
        return self.replies[stream]

    def request(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Reply:
        return self.finish(self.start(method, path, body, headers))

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Http2:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
