"""One inference over HTTP: headers and body -> request, response -> status, headers and body.

Shared by the ASGI app and the lean connection; neither adds a rule of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import trio

from neptrio.codec.compression import deflater, inflater, negotiate, refusal
from neptrio.codec.http_json import HEADER_LENGTH, decode_request, dump_json, encode_response
from neptrio.codec.inflate import Inflater, TooLong, Undecodable
from neptrio.codec.json_reader import Stop
from neptrio.codec.outputs import select
from neptrio.codec.shared_memory import SharedMemory
from neptrio.errors import Internal, InvalidArgument, TritonError
from neptrio.execution.admission import HTTP_ONE_RESPONSE
from neptrio.observe.propagation import asked
from neptrio.request.infer_request import InferRequest, InferResponse, Responder, Timestamp
from neptrio.service import Services
from neptrio.transport.header_policy import Forwarded
from neptrio.transport.rest.routes import Route

log = logging.getLogger("neptrio.rest")

Headers = list[tuple[bytes, bytes]]
JSON: Headers = [(b"content-type", b"application/json")]
BINARY = (b"content-type", b"application/octet-stream")
SEND_START = int(Timestamp.SEND_START)
LARGE_BODY = 4 << 10  # decoding more is worth asking first whether there is room for the request
ON_LOOP_BYTES = 64 << 10  # compressing more takes milliseconds, which belong on a thread; inflating too
DECODED_LATER = 256 << 10  # of JSON: reading more takes longer than a quarter of a millisecond (docs/loop.md)
ON_LOOP_CALLS = 32  # of zlib, for a body of many members


class AskedFromThread:
    """The shared memory service, for a worker's thread: it is asked on the loop."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def input_tensor(self, *arguments: Any) -> Any:
        """As the service's; the thread waits for it."""
        return trio.from_thread.run_sync(self._memory.input_tensor, *arguments)


def error_body(error: TritonError) -> list[bytes]:
    """{"error": message} as body buffers."""
    return [dump_json({"error": str(error)})]


def leading_int(value: bytes) -> int:
    """The header's number the way C's atoi reads it; 0 when there is none."""
    if value.isdigit():
        return int(value[:20])
    text = value.strip()
    sign, digits = 1, b""
    if text[:1] in (b"-", b"+"):
        sign, text = (-1 if text[:1] == b"-" else 1), text[1:]
    for i in range(min(len(text), 20)):
        if not text[i : i + 1].isdigit():
            break
        digits += text[i : i + 1]
    return sign * int(digits or b"0")


async def print_later(
    services: Services, request: InferRequest, response: InferResponse, binary_default: bool
) -> tuple[bytes, list[Any] | None, int]:
    """encode_response() by a worker. Cancellation ends it soon. Raises what that raises."""
    stop = Stop()
    try:
        encoded = await services.workers.run(
            lambda: encode_response(request, response, binary_default, False, stop)
        )
    except BaseException:
        stop.ask()
        raise
    assert encoded is not None
    return encoded


class HttpInfer:
    """Raises TritonError at every step that refuses the request.

    A compressed body goes through plain(), and inflate_later() where that returns None. What it inflated to is
    counted in the server's budget until give_back(), which is owed once the request is answered or gone.
    After encode(), `encoding` names the compression that is still to be applied to the body:
    that of a large one belongs on a worker thread (compress_later).
    """

    __slots__ = (
        "_accept",
        "_binary_default",
        "_content_encoding",
        "_header_length",
        "_inflater",
        "_services",
        "encoding",
        "forwarded",
        "inflated",
        "request",
    )

    def __init__(
        self,
        services: Services,
        route: Route,
        header_length: bytes | None,
        content_encoding: bytes | None,
        accept_encoding: bytes | None,
    ) -> None:
        self._services = services
        self.forwarded: Forwarded | None = None  # parameters made of headers
        self.request = InferRequest()
        self.request.model_name = route.model
        self.request.model_version = route.version
        services.admission.find(self.request, HTTP_ONE_RESPONSE)
        self._binary_default = False
        self._header_length = header_length
        self._content_encoding = content_encoding
        self._inflater: Inflater | None = None
        self.inflated = 0  # bytes that are counted in the budget
        self.encoding = ""
        self._accept = accept_encoding

    @classmethod
    def from_headers(cls, services: Services, route: Route, headers: Headers) -> HttpInfer:
        """From ASGI headers (lower-case names)."""
        found = dict(headers)
        made = cls(
            services,
            route,
            found.get(HEADER_LENGTH),
            found.get(b"content-encoding"),
            found.get(b"accept-encoding"),
        )
        if services.admission.tracer.trace_headers:
            made.request.asked = asked(headers)
        return made

    def plain(self, body: Any) -> Any:
        """The plain body, None when inflating it is not for the loop (inflate_later). Raises TritonError."""
        if self._content_encoding is None:
            return body
        limit = self._services.settings.http_max_input_size
        encoding = self._content_encoding.decode("latin-1").strip()
        made = inflater(encoding, body, limit)
        if made is None:
            return body
        if len(body) <= ON_LOOP_BYTES:
            try:
                if made.step(ON_LOOP_BYTES, ON_LOOP_CALLS):
                    return made.content
            except (Undecodable, TooLong) as error:
                raise refusal(encoding, limit, error) from None
        self._inflater = made
        return None

    async def inflate_later(self) -> Any:
        """The plain body, made by the workers. Raises TritonError."""
        assert self._inflater is not None and self._content_encoding is not None
        made, self._inflater = self._inflater, None
        try:
            content = await self._services.inflating.inflate(made)
        except (Undecodable, TooLong) as error:
            encoding = self._content_encoding.decode("latin-1").strip()
            limit = self._services.settings.http_max_input_size
            raise refusal(encoding, limit, error) from None
        self.inflated = len(content)
        return content

    def give_back(self) -> None:
        """The request is answered or gone, and what it was inflated to with it."""
        if self.inflated:
            self._services.inflating.release(self.inflated)
            self.inflated = 0

    async def compress_later(
        self, body: list[Any], unless: Callable[[], bool] = lambda: False
    ) -> list[Any] | None:
        """The body compressed as `encoding` says, by the workers; None when `unless()` came true before."""
        made = deflater(self.encoding, body)
        return made.out if await self._services.workers.finish(made.step, unless) else None

    def submit(self, body: Any, responder: Responder, receive_start: int = 0) -> None:
        """Decodes the plain body and submits the request."""
        header_length = self._begin(body, receive_start)
        if len(body) > LARGE_BODY:
            self._services.loop.lag.note("decoding an HTTP request", self.request.model_name, len(body))
        memory = self._services.shared_memory
        self.submit_decoded(decode_request(self.request, body, header_length, memory), responder)

    def is_large(self, body: Any) -> bool:
        """Whether decoding the plain body is not for the loop (decode_later)."""
        if len(body) <= DECODED_LATER:
            return False
        return self._header_length is None or leading_int(self._header_length) > DECODED_LATER

    async def decode_later(self, body: Any, receive_start: int = 0) -> bool:
        """Decodes a large body by the workers; submit_decoded() takes what it returns.

        Cancellation: ends the decoding at the worker's next stretch. Raises TritonError.
        """
        header_length = self._begin(body, receive_start)
        stop = Stop()
        request = self.request
        memory = cast(SharedMemory, AskedFromThread(self._services.shared_memory))
        try:
            return await self._services.workers.run(
                lambda: decode_request(request, body, header_length, memory, stop)
            )
        except BaseException:
            stop.ask()
            raise

    def _begin(self, body: Any, receive_start: int) -> int | None:
        """What precedes decoding; the length of the JSON, None where all is."""
        request = self.request
        self._services.admission.received(request, receive_start)
        header_length = None
        if self._header_length is not None:
            header_length = leading_int(self._header_length)
            if not 0 <= header_length <= len(body):
                raise InvalidArgument(
                    f"inference header size should be in range (0, {len(body)}), got: {header_length}"
                )
        if len(body) > LARGE_BODY and not self._services.admission.tracer.tracing:
            request.model.scheduler.expect_room()
        return header_length

    def submit_decoded(self, binary_default: bool, responder: Responder) -> None:
        """Submits the request that was decoded."""
        request = self.request
        self._binary_default = binary_default
        if self.forwarded is not None:
            self.forwarded.into(request)
        request.responder = responder
        self._services.admission.submit(request)

    def encode(self, response: InferResponse, later: bool = False) -> tuple[int, Headers, list[Any]] | None:
        """(status, headers without content-length, body buffers).

        None where `later` and printing the JSON is not for the loop: encode_later() does it then.
        """
        request = self.request
        request.stamp(SEND_START)
        if response.error is not None:
            return response.error.code.http, self._json_headers(), error_body(response.error)
        try:
            if request.outputs is not None:
                select(request, response, self._services)
            encoded = encode_response(request, response, self._binary_default, later)
        except Exception as error:
            return self._encoding_failed(error)
        return None if encoded is None else self._encoded(*encoded)

    async def encode_later(self, response: InferResponse) -> tuple[int, Headers, list[Any]]:
        """encode() once more where it returned None, by a worker. Cancellation ends the worker's printing."""
        try:
            encoded = await print_later(self._services, self.request, response, self._binary_default)
        except Exception as error:
            return self._encoding_failed(error)
        return self._encoded(*encoded)

    def _json_headers(self) -> Headers:
        return JSON if self.request.trace is None else [*JSON, *self.request.trace.headers]

    def _encoding_failed(self, error: Exception) -> tuple[int, Headers, list[Any]]:
        if isinstance(error, TritonError):
            return error.code.http, self._json_headers(), error_body(error)
        log.error("encoding a response of model '%s' failed", self.request.model_name, exc_info=error)
        internal = Internal(f"internal error: {type(error).__name__}: {error}")
        return 500, self._json_headers(), error_body(internal)

    def _encoded(
        self, head: bytes, blobs: list[Any] | None, binary_bytes: int
    ) -> tuple[int, Headers, list[Any]]:
        plain = self._json_headers()
        headers: Headers = plain
        body: list[Any] = [head]
        if binary_bytes:
            headers = [BINARY, (HEADER_LENGTH, b"%d" % len(head)), *plain[1:]]
            body += blobs or ()
        if self._accept is not None:
            self.encoding = negotiate(self._accept)
            if self.encoding:
                headers = [*headers, (b"content-encoding", self.encoding.encode())]
                if len(head) + binary_bytes <= ON_LOOP_BYTES:
                    made = deflater(self.encoding, body)
                    made.step()
                    body, self.encoding = list(made.out), ""
        return 200, headers, body
