"""CPU time per request of the hot paths, without a network: bytes in, bytes out, one process.

A connection object is fed request bytes over and over; what it answers is read from the other end
of a socket pair. Prints microseconds of CPU per request; benchmarks/instructions.py counts
instructions of the same. A form that ends in `+trace` has every request traced (level TIMESTAMPS), one that ends in
`+front` goes through a front end, whose two sides share the process here.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import trio

from benchmarks.requests import Workload, grpc_message, http_binary, http_json
from neptrio.server import Server
from neptrio.settings import Settings

CONFIG = """
backend: "identity" max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]
"""
A = np.arange(16, dtype=np.int32).reshape(1, 16)
WORK = Workload("identity", (("INPUT0", A), ("INPUT1", A + 1)), A + 1)


def http_request(body: bytes, length: int | None) -> bytes:
    """A whole HTTP/1.1 request."""
    head = b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n"
    if length is not None:
        head += b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n" % length
    else:
        head += b"Content-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


class Meter:
    """What is measured: CPU time, and with a library of marks (benchmarks/instructions.py) instructions."""

    def __init__(self, marks: str = "") -> None:
        self._marks = ctypes.CDLL(marks) if marks else None
        self.counting = False  # a run before it only warms up
        self.seconds = 0.0

    def __enter__(self) -> None:
        gc.collect()  # what is due from before is nothing that these requests take
        if self.counting and self._marks is not None:
            self._marks.begin()
        self.seconds = -time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.process_time()
        if self.counting and self._marks is not None:
            self._marks.end()


Pass = Callable[[], None]


def ends(server: Server) -> tuple[Any, Any]:
    """Both sides of the way between the engine and a front end."""
    from neptrio.frontend.channel import Layout
    from neptrio.frontend.engine_side import EngineSide
    from neptrio.frontend.front_side import FrontSide
    from neptrio.rings.ring import Segment
    from triton_python_backend_utils._process.reserved import sealed_memory

    layout = Layout(1 << 26)
    memory = sealed_memory("hotpath", layout.size)
    ours = Segment(memory, layout.size)
    end = EngineSide(ours, layout, lambda: None, lambda: None, server.services, None)
    return end, FrontSide(ours, layout, lambda: None, lambda: None)


def behind(server: Server) -> tuple[Any, Pass]:
    """The services of a front end, and a pass of both loops."""
    from neptrio.frontend.front_side import RemoteAdmission, RemoteSharedMemory

    end, front = ends(server)
    loop_pass = server.loop.loop_pass

    def both() -> None:
        loop_pass.end()
        end.drain()
        loop_pass.end()
        front.drain()
        loop_pass.end()

    admission = RemoteAdmission(front)
    inputs = [(name, 8, (16,), False, False) for name, _ in WORK.inputs]
    model = {"version": "1", "latest": True, "decoupled": False, "max_batch_size": 8, "inputs": inputs}
    admission.renew({"identity": [model]}, True, False, False)
    services: Any = dataclasses.replace(
        server.services,
        admission=admission,
        shared_memory=RemoteSharedMemory(),  # type: ignore[arg-type]
    )
    return services, both


async def http(
    server: Server,
    nursery: trio.Nursery,
    request: bytes,
    count: int,
    meter: Meter,
    token: str = "",
    front: bool = False,
) -> None:
    """`count` requests over a lean HTTP/1.1 connection, which asks for `token` if there is one."""
    from neptrio.transport.http1.connection import Http1Connection
    from neptrio.transport.rest.port import Port
    from neptrio.transport.wire import Wire

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    app: Any = None
    policy = None
    if token:
        request = request.replace(b"\r\n", f"\r\nAuthorization: Bearer {token}\r\n".encode(), 1)
        policy = _policy(server, token)
    services, turn = behind(server) if front else (server.services, server.loop.loop_pass.end)
    wire = Wire(ours, nursery, services.loop)
    connection = Http1Connection(wire, Port(services, app, policy))
    with meter:
        for _ in range(count):
            connection.pass_on(request)
            turn()
            if not (await _receive(theirs)).startswith(b"HTTP/1.1 200"):
                raise AssertionError("a request failed")
    theirs.close()
    ours.close()


def _policy(server: Server, token: str) -> Any:
    """The policy of a REST port of which only `token` may use inference."""
    from neptrio.service.tokens import Tokens, digest
    from neptrio.transport.header_policy import http_policy

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "auth.toml"
        kept = digest(token.encode()).hex()
        file.write_text(f'[[token]]\nname = "bench"\nhash = "sha256:{kept}"\nscopes = ["infer"]\n')
        return http_policy(server.settings, Tokens(file))


_view = memoryview(bytearray(1 << 20))  # a fresh buffer for every read would cost more than the request


async def _receive(sock: socket.socket) -> bytes:
    """What has arrived; almost always there already."""
    while True:
        try:
            return bytes(_view[: sock.recv_into(_view)])
        except BlockingIOError:
            await trio.lowlevel.wait_readable(sock)


class _Client:
    """The client's half of an HTTP/2 connection, on h2, with the frames of `batch` calls prepared."""

    def __init__(self, path: bytes, message: bytes) -> None:
        import h2.config
        import h2.connection

        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(1 << 30)
        self.path = path
        self.message = b"\0" + len(message).to_bytes(4, "big") + message
        self.stream_id = -1
        self.block = b""

    def head(self) -> list[tuple[bytes, bytes]]:
        return [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", self.path),
            (b":authority", b"127.0.0.1:8001"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", b"hotpath"),
        ]

    def calls(self, n: int) -> list[bytes]:
        """The bytes of n calls, each its own chunk."""
        made = []
        for _ in range(n):
            self.stream_id += 2
            if self.stream_id <= 3:
                self.h2.send_headers(self.stream_id, self.head())
                self.block = self.h2.data_to_send()[9:]  # from the second on, all by index
            number = self.stream_id.to_bytes(4, "big")
            made.append(
                len(self.block).to_bytes(3, "big")
                + b"\1\4"
                + number
                + self.block
                # data frames by hand: h2 would wait for window updates
                + len(self.message).to_bytes(3, "big")
                + b"\0\1"
                + number
                + self.message
            )
        return made


async def unary(
    server: Server, nursery: trio.Nursery, message: bytes, count: int, meter: Meter, front: bool = False
) -> None:
    """`count` ModelInfer calls on one connection, 32 at a time."""
    from neptrio.transport.grpc.connection import GrpcConnection
    from neptrio.transport.grpc.server import GrpcServer
    from neptrio.transport.wire import Wire

    services, turn = behind(server) if front else (server.services, server.loop.loop_pass.end)
    grpc = GrpcServer(services, server.verbs, socket.socket())
    client = _Client(b"/inference.GRPCInferenceService/ModelInfer", message)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        theirs.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
        ours.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
    connection = GrpcConnection(Wire(ours, nursery, services.loop), grpc)
    loop_pass = server.loop.loop_pass
    connection.session.receive(client.h2.data_to_send())
    chunks = client.calls(count)
    answered = 0
    with meter:
        for i in range(0, count, 32):
            while answered < i:
                answered += (await _receive(theirs)).count(b"OUTPUT1")
            connection.session.receive(b"".join(chunks[i : i + 32]))
            loop_pass.want_flush(connection)
            turn()
            answered += (await _receive(theirs)).count(b"OUTPUT1")
    if server.services.admission.lookup("identity", "").counters.snapshot()["inference_stats"]["fail"][
        "count"
    ]:
        raise AssertionError("a call failed")
    theirs.close()
    connection.session.connection_lost()
    ours.close()


async def engine(server: Server, count: int, meter: Meter) -> None:
    """`count` requests that a front end has decoded, 32 at a time: what is measured is the engine's part alone."""
    from neptrio.frontend.front_side import RemoteAdmission
    from neptrio.request.infer_request import InferRequest, InferResponse, Responder
    from neptrio.request.numpy_tensor import from_numpy

    class Answers(Responder):
        """Counts answers."""

        good = 0

        def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
            self.good += response.error is None and len(response.outputs or ()) == 2

    end, front = ends(server)
    admission = RemoteAdmission(front)
    answers = Answers()
    loop_pass = server.loop.loop_pass
    done = 0
    while done < count:
        step = min(count - done, 2000)
        for _ in range(step):
            request = InferRequest()
            request.model_name = "identity"
            request.inputs = [from_numpy(name, array) for name, array in WORK.inputs]
            admission.find(request, None)
            request.responder = answers
            admission.submit(request)
        last = done + step == count
        with meter if last else contextlib.nullcontext():
            while end.drain(32):
                loop_pass.end()
            loop_pass.end()
        while front.drain():
            pass
        done += step
    if answers.good != count:
        raise AssertionError(f"{count - answers.good} requests failed")


async def measure(server: Server, form: str, count: int, meter: Meter) -> float:
    """Microseconds of CPU per request."""
    form, _, more = form.partition("+")
    await server.verbs.trace.update({"trace_level": ["TIMESTAMPS" if more == "trace" else "OFF"]})
    async with trio.open_nursery() as nursery:
        if form == "engine":
            await engine(server, count, meter)
        elif form == "unary":
            await unary(server, nursery, grpc_message(WORK), count, meter, more == "front")
        else:
            body, length, _ = http_binary(WORK) if form == "binary" else http_json(WORK)
            token = "npt_" + "0" * 43 if more == "token" else ""
            await http(server, nursery, http_request(body, length), count, meter, token, more == "front")
        nursery.cancel_scope.cancel()
    return meter.seconds / count * 1e6


async def run(forms: list[str], count: int, rounds: int, meter: Meter) -> None:
    """Starts a server without fronts and measures."""
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp) / "identity"
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(CONFIG)
        server = Server(
            Settings(
                model_repository=(Path(tmp),),
                allow_http=False,
                allow_grpc=False,
                allow_metrics=False,
                trace_config=(f"triton,file={tmp}/trace.json", "triton,log-frequency=1000", "rate=1"),
            )
        )
        ready = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.serve, ready.set)
            await ready.wait()
            for form in forms:
                meter.counting = False
                await measure(server, form, min(count, 2000), meter)
                meter.counting = True
                best = min([await measure(server, form, count, meter) for _ in range(rounds)])
                print(f"{form:8} {best:6.2f} us of CPU per request", flush=True)
            server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", default="binary,json,unary")
    parser.add_argument("--count", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--marks", default="", help="library that switches callgrind on and off")
    options = parser.parse_args()
    trio.run(run, options.forms.split(","), options.count, options.rounds, Meter(options.marks))
