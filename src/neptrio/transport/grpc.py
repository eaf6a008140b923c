"""The gRPC front: one task per connection feeds an HTTP/2 session; calls answer through it."""

from __future__ import annotations

import logging
import socket
from typing import Any

import trio
from grpclib.const import Status

from neptrio._cext.request import monotonic_ns
from neptrio.service import Services
from neptrio.transport.grpc_calls import HandlerCall, RefusedCall, StreamInfer, UnaryInfer
from neptrio.transport.grpc_service import InferenceHandlers
from neptrio.transport.http2_session import new_session
from neptrio.transport.link import Link, accept_loop

log = logging.getLogger("neptrio.grpc")

RECEIVE_BYTES = 256 << 10
MODEL_INFER = b"/inference.GRPCInferenceService/ModelInfer"
MODEL_STREAM_INFER = b"/inference.GRPCInferenceService/ModelStreamInfer"


class GrpcConnection:
    """One HTTP/2 connection."""

    def __init__(self, sock: socket.socket, server: GrpcServer, nursery: trio.Nursery) -> None:
        self.sock = sock
        self.services = server.services
        self.nursery = nursery
        self._handlers = server.handlers
        self._turn = server.services.loop.turn
        self._link = Link(sock, nursery)
        self._link.on_drained = self.flush_soon
        self._session = new_session(self.open_stream)
        self._scope = trio.CancelScope()

    def now(self) -> int:
        """Monotonic nanoseconds."""
        return int(monotonic_ns())

    def open_stream(self, session: Any, stream_id: int, path: bytes, headers: Any) -> Any:
        """The call object for a new stream."""
        if path == MODEL_INFER:
            return UnaryInfer(session, stream_id, headers, self)
        if path == MODEL_STREAM_INFER:
            return StreamInfer(session, stream_id, headers, self)
        handler = self._handlers.get(path)
        if handler is not None:
            return HandlerCall(session, stream_id, headers, self, handler)
        call = RefusedCall(session, stream_id, headers, Status.UNIMPLEMENTED)
        call.start()
        return call

    def want_flush(self) -> None:
        """There is output; it leaves when the turn ends."""
        self._turn.want_flush(self)

    def flush_soon(self) -> None:
        """There is output, and no turn is under way."""
        self._turn.want_flush(self)
        self._turn.end()

    def flush(self) -> None:
        """Sends what the session has, unless the peer does not keep up."""
        if not self._link.congested:
            self._link.send(self._session.data_to_send())
            if self._session.finished:
                self._scope.cancel()

    async def run(self) -> None:
        """Serves the connection until either side ends it."""
        buffer = bytearray(RECEIVE_BYTES)
        view = memoryview(buffer)
        session, sock = self._session, self.sock
        try:
            with self._scope:
                self.flush()
                while not self._link.broken:
                    await trio.lowlevel.wait_readable(sock)
                    try:
                        n = sock.recv_into(buffer)
                    except (BlockingIOError, InterruptedError):
                        continue
                    if n == 0:
                        break
                    session.receive(view[:n])
                    self._turn.want_flush(self)
                    self._turn.end()
                    if session.dead:
                        break
        except (OSError, trio.ClosedResourceError):
            pass
        finally:
            session.connection_lost()
            self._turn.end()
            with trio.move_on_after(1) as scope:
                scope.shield = True
                await self._link.drained()
            self._link.fail()
            sock.close()

    def start_drain(self) -> None:
        """GOAWAY: no new calls, open ones finish."""
        self._session.start_drain()
        self.flush()

    def finish_drain(self) -> None:
        """The final GOAWAY."""
        self._session.finish_drain()
        self.flush()

    @property
    def open_calls(self) -> int:
        """Calls that are not finished."""
        return len(self._session.streams)

    def close(self) -> None:
        """Ends the connection now."""
        self._scope.cancel()


class GrpcServer:
    """Accepts gRPC connections and drains them."""

    def __init__(self, services: Services, listener: socket.socket) -> None:
        self.services = services
        self.handlers: dict[bytes, Any] = {
            path.encode(): handler
            for servicer in InferenceHandlers.all(services)
            for path, handler in servicer.__mapping__().items()
        }
        self._listener = listener
        self._connections: set[GrpcConnection] = set()
        self._accepting = trio.CancelScope()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled."""
        async with trio.open_nursery() as nursery:
            task_status.started()
            with self._accepting:
                await accept_loop(self._listener, lambda sock: nursery.start_soon(self._serve, sock, nursery))
            self._listener.close()
            await trio.sleep_forever()

    async def _serve(self, sock: socket.socket, nursery: trio.Nursery) -> None:
        connection = GrpcConnection(sock, self, nursery)
        self._connections.add(connection)
        try:
            await connection.run()
        except Exception:
            log.exception("a gRPC connection failed")
        finally:
            self._connections.discard(connection)

    async def drain(self) -> None:
        """Stops accepting, sends GOAWAY and lets open calls finish."""
        self._accepting.cancel()
        for connection in list(self._connections):
            connection.start_drain()
        while any(connection.open_calls for connection in self._connections):
            await trio.sleep(0.01)
        for connection in list(self._connections):
            connection.finish_drain()
            connection.close()
