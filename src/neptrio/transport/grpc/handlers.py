"""Calls other than the two inference ones: each is a task that runs a generated grpclib handler.

HandlerCall has the part of grpclib's server Stream that handlers use: recv_message, send_message,
send_initial_metadata, send_trailing_metadata, cancel, `async for`, and the attributes metadata, deadline, user_agent
and peer.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.metadata import Deadline, encode_metadata

from neptrio.codec.control_sizes import check_sizes
from neptrio.codec.descriptors import message_class, pool
from neptrio.codec.protobuf import WireError, well_formed
from neptrio.errors import Code, InvalidArgument, TritonError
from neptrio.limits import message_bytes, most_entries
from neptrio.loop.workers import Workers
from neptrio.transport.grpc import compression as compression
from neptrio.transport.grpc.calls import SHUTTING_DOWN, Call
from neptrio.transport.grpc.decoding import LARGE_MESSAGE
from neptrio.transport.grpc.fast_path import CARDINALITY
from neptrio.transport.grpc.message_stream import GrpcStream
from neptrio.transport.grpc.status import (
    OK_HEADERS,
    OK_TRAILERS,
    decode_metadata,
    error_trailers,
    status_trailers,
    timeout_ns,
)
from neptrio.transport.header_policy import MODEL_FIELDS
from neptrio.transport.http2.session import Headers, Http2Session
from neptrio.transport.reservation import Kept

if TYPE_CHECKING:
    from neptrio.service.tokens import Account
    from neptrio.transport.grpc.connection import GrpcConnection

log = logging.getLogger("neptrio.grpc")

INBOX_MESSAGES = 16  # more stay with the client, by flow control, until the handler takes some
ONE_MESSAGE = "a unary call carries one request message, got a second one"
PARSED_HERE = 1024  # bytes; each element of a list takes the generated classes tens of microseconds
COPIES = 4  # of a large message: as it came, as protobuf reads and writes it, in the generated classes
OUTPUT_BYTES = 1 << 20  # a handler's send_message() waits while more than this is unsent


@cache
def request_class(path: bytes) -> Any:
    """The protobuf class of a call's requests; `path` is /PACKAGE.SERVICE/METHOD. None if proto/ has no such method."""
    service, _, method = path.decode().removeprefix("/").partition("/")
    try:
        found = pool().FindServiceByName(service).methods_by_name[method]
    except KeyError:
        return None
    return message_class(found.input_type.full_name)


def as_declared(message: Any) -> bytes:
    """The bytes of a request without anything that its declaration lacks.

    The generated classes differ from protobuf in two ways: they accept a field whose wire type is not the declared one,
    and give None for a map's entry without a value. Protobuf ignores such a field, and such an entry has the default
    value. So protobuf reads and writes the message once before the generated classes parse it.
    """
    message.DiscardUnknownFields()
    plain: bytes = message.SerializeToString()
    return plain


class Peer:
    """The client's end of the connection, with the interface of grpclib's Peer."""

    def __init__(self, address: Any) -> None:
        self._address = address

    def addr(self) -> Any:
        """The client's address, as getpeername() returns it."""
        return self._address

    def cert(self) -> None:
        """None: handlers do not see client certificates."""


class HandlerCall(Call):
    """A call served by a grpclib handler."""

    def __init__(
        self,
        session: Http2Session,
        stream_id: int,
        headers: Headers,
        connection: GrpcConnection,
        handler: Any,
        path: bytes,
    ) -> None:
        self._most = message_bytes(path, connection.services.settings.max_load_bytes)
        GrpcStream.__init__(self, session, stream_id, headers)
        self.max_message_bytes = self._most
        self._kept = Kept(connection.services.held)  # for what large messages become
        self.keeps = True
        self._connection = connection
        self._handler = handler  # None until the handlers' modules are imported
        self._path = path
        self._inbox: deque[tuple[bytes, bool]] = deque()
        self._received = 0
        self._news = trio.Event()
        self._writable = trio.Event()
        self._scope = trio.CancelScope()
        self._request: Any = None  # the last message, for the audit log
        self._outcome: list[tuple[bytes, bytes]] | None = None
        self.deadline: Any = None
        self.user_agent = (headers.get(b"user-agent") or b"").decode("latin-1")
        self.peer = Peer(connection.wire.peer)
        self.metadata: Any = None
        self.caller: Account | None = None  # whose the last message is, where clients are known
        connection.wire.start(self._run)

    def set_deadline(self, value: bytes) -> None:
        super().set_deadline(value)
        if not self.refused:
            self.deadline = Deadline.from_timeout(timeout_ns(value) / 1e9)

    def release(self) -> None:
        self.stop_clock()
        self._scope.cancel()
        self._writable.set()

    # ------------------------------------------------------------ what the session calls

    def on_message(self, message: bytes, compressed: bool) -> None:
        self._received += 1
        if (
            self._received > 1
            and self._handler is not None
            and not self._handler.cardinality.client_streaming
        ):
            self._inbox.clear()
            self.refuse(CARDINALITY.grpc.value, ONE_MESSAGE)
            return
        if not self.queued():
            return
        self._inbox.append((message, compressed))
        if len(self._inbox) >= INBOX_MESSAGES:
            self.paused = True
        self._news.set()

    def on_half_close(self) -> None:
        self._news.set()

    def on_writable(self) -> None:
        self._writable.set()

    def on_drain(self) -> None:
        """Ends a streaming call, because it may wait for its client, or send news to it, for ever."""
        if self._handler is None:
            return  # _find_handler() comes back here when the handler is known
        cardinality = self._handler.cardinality
        if cardinality.server_streaming or cardinality.client_streaming:
            self.refuse(Status.UNAVAILABLE.value, SHUTTING_DOWN)

    # ------------------------------------------------------------ what the handler calls

    async def recv_message(self) -> Any:
        """Waits for the next request message; None at the end of the input. Raises GRPCError and TritonError."""
        while not self._inbox:
            if self.input_ended or self.refused:
                if not self._handler.cardinality.client_streaming:
                    if self._received == 0:
                        raise TritonError("a unary call carries one request message, got none", CARDINALITY)
                    if self._received > 1:  # on_message() dropped both
                        raise TritonError(ONE_MESSAGE, CARDINALITY)
                return None
            self._news = trio.Event()
            await self._news.wait()
        raw, compressed = self._inbox.popleft()
        if not self._inbox:
            self.taken()
        if self.paused and not self._inbox:
            self.session.resume_input(self)
            self._connection.flush_soon()
        if compressed:
            encoding = self.headers.get(b"grpc-encoding")
            raw = await compression.inflated(raw, encoding, self._most, self._connection)
        return await self.read(raw)

    async def read(self, raw: bytes) -> Any:
        """The request of a message's bytes, checked. Raises GRPCError and TritonError."""
        if len(raw) > LARGE_MESSAGE:
            self._kept.keep(COPIES * len(raw))
        message = [raw]
        del raw
        found = await parsed(
            self._path, self._handler, message, self._connection.services.workers, self._connection
        )
        self._request = found
        self.caller = self._connection.check_message(self._path.decode("latin-1"), self.headers, found)
        return found

    async def send_initial_metadata(self, *, metadata: Any = None) -> None:
        """Sets the headers of the reply; they leave with its first message or its end."""
        self.send_headers([*OK_HEADERS, *encoded(metadata)])

    async def send_message(self, message: Any) -> None:
        """Queues a reply message; waits while the client does not read what was sent before."""
        body = bytes(message)
        self.send_segments([b"\0" + len(body).to_bytes(4, "big") + body])
        self._connection.flush_soon()
        while self.out_bytes > OUTPUT_BYTES and not self.ended:
            self._writable = trio.Event()
            await self._writable.wait()

    async def send_trailing_metadata(
        self,
        *,
        status: Status = Status.OK,
        status_message: str | None = None,
        status_details: Any = None,
        metadata: Any = None,
    ) -> None:
        """Sets the status and metadata that the call ends with when the handler returns."""
        self.set_outcome([*status_trailers(status, status_message or ""), *encoded(metadata)])

    def set_outcome(self, trailers: list[tuple[bytes, bytes]]) -> None:
        """Sets the trailers that the call ends with when the handler returns."""
        self._outcome = trailers

    def tell(self, failure: TritonError | None) -> None:
        """Tells the audit log that the call has ended; `failure`: why it was refused, None if it was not."""
        self._connection.record(self._path, self.headers, self._request, failure)
        if self.access is not None and self._request is not None:
            field = MODEL_FIELDS.get(self._path.decode("latin-1").rpartition("/")[2])
            if field is not None:
                self.access.model = getattr(self._request, field)
                self.access.version = getattr(self._request, "version", "")

    async def cancel(self) -> None:
        """Ends the call with RST_STREAM."""
        self.session.reset(self)
        self._connection.flush_soon()

    def __aiter__(self) -> HandlerCall:
        return self

    async def __anext__(self) -> Any:
        message = await self.recv_message()
        if message is None:
            raise StopAsyncIteration
        return message

    async def _find_handler(self) -> None:
        """Waits until the handlers are imported, and makes the checks that need the call's handler.

        Raises GRPCError UNIMPLEMENTED if the method is unknown, and TritonError.
        """
        self._handler = await self._connection.handler(self._path)
        if self._handler is None:
            raise GRPCError(Status.UNIMPLEMENTED)
        if self._received > 1 and not self._handler.cardinality.client_streaming:
            raise TritonError(ONE_MESSAGE, CARDINALITY)
        if self._connection.draining:
            self.on_drain()

    async def _run(self) -> None:
        trailers = OK_TRAILERS
        failure: TritonError | None = None
        with self._scope:
            try:
                if self.headers.has_custom:
                    self.metadata = decode_metadata(self.headers())
                else:
                    self.metadata = decode_metadata([])
                if self._handler is None:
                    await self._find_handler()
                await self._handler.func(self)
            except Exception as error:
                trailers, failure = failed(error)
        if self._scope.cancelled_caught:
            failure = TritonError("the call was cancelled", Code.CANCELLED)
        self._kept.over()
        self.tell(failure)
        del failure  # its traceback holds this call, which would hold it
        self._request = None
        self.stop_clock()
        self.taken()
        if not self.ended and self.trailers is None:
            if self._scope.cancelled_caught:
                trailers = status_trailers(Status.CANCELLED, "the call was cancelled")
            elif trailers is OK_TRAILERS and self._outcome is not None:
                trailers = self._outcome
            self.finish(trailers)
            self._connection.flush_soon()


def failed(error: Exception) -> tuple[list[tuple[bytes, bytes]], TritonError]:
    """The trailers of a call whose handler raised `error`, and what the audit log is told. To be called while it is handled."""
    if isinstance(error, TritonError):
        return error_trailers(error), error
    if isinstance(error, GRPCError):
        return status_trailers(error.status, error.message or ""), TritonError(error.message or "")
    log.exception("a gRPC handler failed")
    text = f"{type(error).__name__}: {error}"
    return status_trailers(Status.INTERNAL, text), TritonError(text)


async def parsed(path: bytes, handler: Any, message: list[bytes], workers: Workers, whose: object) -> Any:
    """The request that the only bytes of `message` are; it is emptied, to keep no third copy of a load request's files.

    A worker reads a large one, for the connection `whose`. Raises GRPCError, and InvalidArgument for sizes that are not
    allowed.
    """
    read = partial(_parse, path, handler, message)
    try:
        return await workers.run(read, whose) if len(message[0]) > PARSED_HERE else read()
    except InvalidArgument as error:
        if isinstance(error, WireError):
            raise GRPCError(Status.INVALID_ARGUMENT, f"cannot parse the request message: {error}") from None
        raise
    except Exception as error:
        raise GRPCError(Status.INVALID_ARGUMENT, f"cannot parse the request message: {error}") from None


def _parse(path: bytes, handler: Any, message: list[bytes]) -> Any:
    well_formed(message[0], most_entries(path) + 16)
    declared = request_class(path)
    if declared is not None:
        made = declared.FromString(message.pop())
        check_sizes(path, made)
        message.append(as_declared(made))
    return handler.request_type.parse(message.pop())


def encoded(metadata: Any) -> list[tuple[bytes, bytes]]:
    if not metadata:
        return []
    return [(key.encode(), value.encode()) for key, value in encode_metadata(metadata)]
