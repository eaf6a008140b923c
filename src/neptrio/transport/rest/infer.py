"""One inference over HTTP: makes a request of headers and body, and status, headers and body of its response.

The ASGI app and our own HTTP/1.1 connection share it, so that both give the same answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from neptrio.codec.compression import deflater, inflater, negotiate, refusal
from neptrio.codec.http_json import HEADER_LENGTH, decode_request, dump_json, encode_response
from neptrio.codec.inflate import Inflater, TooLong, Undecodable
from neptrio.codec.json_reader import Stop
from neptrio.codec.outputs import select, selects_slowly
from neptrio.codec.shared_memory import AskedFromThread, names_large_inputs
from neptrio.datatypes import BYTES
from neptrio.errors import Cancelled, Internal, InvalidArgument, TritonError
from neptrio.execution.admission import HTTP_ONE_RESPONSE
from neptrio.observe.propagation import asked
from neptrio.observe.timing import HEADER as TIMING
from neptrio.observe.timing import timing_headers, wish
from neptrio.request.infer_request import InferRequest, InferResponse, Responder, Timestamp
from neptrio.service import Services
from neptrio.transport.header_policy import Forwarded
from neptrio.transport.rest.body import SplitBody
from neptrio.transport.rest.room import Room
from neptrio.transport.rest.routes import Route
from neptrio.transport.rest.times import CallTimes

log = logging.getLogger("neptrio.rest")

Headers = list[tuple[bytes, bytes]]
JSON: Headers = [(b"content-type", b"application/json")]
BINARY = (b"content-type", b"application/octet-stream")
SEND_START = int(Timestamp.SEND_START)
LARGE_BODY = 4 << 10  # before decoding more, the queue is asked whether it has room for the request
ON_LOOP_BYTES = 64 << 10  # compressing or inflating more takes milliseconds: workers do it
DECODED_LATER = 256 << 10  # reading more JSON takes over a quarter of a millisecond: see docs/loop.md
ON_LOOP_CALLS = 32  # of zlib, when the loop inflates: a body may consist of very many tiny compressed parts


def error_body(error: TritonError) -> list[bytes]:
    """The body of an error's answer, {"error": message}, as a list of buffers."""
    return [dump_json({"error": str(error)})]


def leading_int(value: bytes) -> int:
    """A header's number, read like C's atoi, as Triton does: what follows the digits is ignored, no digits are 0."""
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
    services: Services,
    request: InferRequest,
    response: InferResponse,
    binary_default: bool,
    selecting: bool,
    whose: object,
) -> tuple[bytes, list[Any] | None, int]:
    """encode_response() on a worker's thread for the connection `whose`, after select() with `selecting`. Raises what these
    raise.

    Cancellation: asks the worker to stop; it does so before it prints much more.
    """
    stop = Stop()
    memory = AskedFromThread(services.shared_memory)

    def work() -> tuple[bytes, list[Any] | None, int] | None:
        if selecting:
            select(request, response, memory)
        return encode_response(request, response, binary_default, False, stop)

    try:
        encoded = await services.workers.run(work, whose)
    except BaseException:
        stop.ask()
        raise
    assert encoded is not None
    return encoded


class HttpInfer:
    """One inference request and its answer, step by step. Every step raises TritonError if it refuses the request.

    The steps are plain(), submit(), encode(). Each has a twin that works on a worker's thread, so that large bodies do
    not hold up the loop: inflate_later() where plain() returns None; decode_later() and submit_decoded() where
    is_large() says so; encode_later() where encode() returns None; compress_later() if `encoding` is set after
    encoding.

    The bytes a body inflates to are counted in the server's budget. The caller must call give_back() when the request
    is answered or dropped.
    """

    __slots__ = (
        "_accept",
        "_binary_default",
        "_content_encoding",
        "_header_length",
        "_inflater",
        "_kept",
        "_selecting",
        "_services",
        "_worked_on",
        "encoding",
        "forwarded",
        "inflated",
        "request",
        "times",
        "whose",
    )

    def __init__(
        self,
        services: Services,
        route: Route,
        headers: Headers,
        get: Callable[[bytes], bytes | None] | None = None,
        stream: bool = False,
    ) -> None:
        """`get` finds one of the headers by its name in lower case; without it all are in lower case, as ASGI has them.
        `stream`: any number of responses can be carried, each as it is; else a decoupled model is refused."""
        if get is None:
            get = dict(headers).get
        self._services = services
        self.forwarded: Forwarded | None = None  # headers that become parameters of the request
        self.times: CallTimes | None = None  # of the call of the app that this is, if it is one
        self.request = InferRequest()
        # the connection, where it is known; what one has of the workers' threads is its share
        self.whose: object = self.request
        self.request.model_name = route.model
        self.request.model_version = route.version
        services.admission.find(self.request, None if stream else HTTP_ONE_RESPONSE)
        if services.admission.tracer.trace_headers:
            self.request.asked = asked(headers)
        timing = get(TIMING)
        if timing is not None:
            self.request.timing = wish(timing)
        self._binary_default = False
        self._header_length = get(HEADER_LENGTH)
        self._content_encoding = get(b"content-encoding")
        self._inflater: Inflater | None = None
        self._selecting = False  # encode_later() chooses and classifies outputs too
        self._kept = 0  # bytes that its tensors hold of the server's budget
        self._worked_on = False  # a worker decodes it
        self.inflated = 0  # bytes that this request has counted in the server's budget
        self.encoding = ""
        self._accept = None if stream else get(b"accept-encoding")

    def plain(self, body: Any) -> Any:
        """The body without compression; None if inflating it takes long, so that inflate_later() must do it.

        Raises TritonError if the body cannot be inflated.
        """
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
        """The body without compression, inflated by the workers. Raises TritonError if it cannot be inflated."""
        assert self._inflater is not None and self._content_encoding is not None
        made, self._inflater = self._inflater, None
        try:
            content = await self._services.inflating.inflate(made, self.whose)
        except (Undecodable, TooLong) as error:
            encoding = self._content_encoding.decode("latin-1").strip()
            limit = self._services.settings.http_max_input_size
            raise refusal(encoding, limit, error) from None
        self.inflated = len(content)
        return content

    def give_back(self) -> None:
        """Returns the bytes of the inflated body, and of tensors that workers made, to the server's budget."""
        if self.inflated:
            self._services.inflating.release(self.inflated)
            self.inflated = 0
        if self._kept:
            self._services.held.let_go(self._kept)
            self._kept = 0

    def _keep(self, size: int) -> None:
        if not self._worked_on:
            raise Cancelled  # nobody would give the bytes back
        self._services.held.keep(size)
        self._kept += size

    async def compress_later(
        self, body: list[Any], unless: Callable[[], bool] = lambda: False
    ) -> list[Any] | None:
        """The body compressed by the workers as `encoding` says. Stops and returns None if `unless()` becomes true."""
        made = deflater(self.encoding, body)
        return made.out if await self._services.workers.finish(made.step, unless, self.whose) else None

    def submit(self, body: Any, responder: Responder, receive_start: int = 0) -> None:
        """Decodes the plain body and submits the request."""
        header_length = self._begin(body, receive_start)
        if len(body) > LARGE_BODY:
            self._services.loop.lag.note("decoding an HTTP request", self.request.model_name, len(body))
        memory = self._services.shared_memory
        binary: Any = None
        if isinstance(body, SplitBody):
            body, binary = body.text, body.binary
        decoded = decode_request(self.request, body, header_length, memory, None, binary)
        self.submit_decoded(decoded, responder)

    def is_large(self, body: Any) -> bool:
        """Whether decoding the plain body takes so long that decode_later() must do it."""
        if self._services.shared_memory.large.count and names_large_inputs(self._json(body)):
            return True
        if len(body) <= DECODED_LATER:
            return False
        if self._header_length is None or leading_int(self._header_length) > DECODED_LATER:
            return True
        # the lengths of very many strings are to be read
        return any(spec.dtype == BYTES for spec in self.request.model.input_specs)

    def _json(self, body: Any) -> Any:
        """The JSON of the plain body, or at least its beginning."""
        if isinstance(body, SplitBody):
            return body.text
        return body if len(body) <= DECODED_LATER else memoryview(body)[:DECODED_LATER]

    async def decode_later(self, body: Any, receive_start: int = 0) -> bool:
        """Decodes a large body on a worker's thread; submit_decoded() needs what it returns.

        Raises TritonError, and Overloaded when the tensors would take more than the server may hold. Cancellation: asks
        the worker to stop; it does so before it reads much more.
        """
        header_length = self._begin(body, receive_start)
        stop = Stop()
        request = self.request
        memory = AskedFromThread(self._services.shared_memory)
        binary: Any = None
        if isinstance(body, SplitBody):
            body, binary = body.text, body.binary
        self._worked_on = True
        room = Room(self._keep)
        # strings take about as much as their text
        room.reserve_here(len(body) if header_length is None else header_length)
        try:
            return await self._services.workers.run(
                lambda: decode_request(request, body, header_length, memory, stop, binary, room.reserve),
                self.whose,
            )
        except BaseException:
            stop.ask()
            raise
        finally:
            self._worked_on = False

    def _begin(self, body: Any, receive_start: int) -> int | None:
        """Does what precedes decoding. Returns the length of the JSON in bytes; None if the whole body is JSON."""
        request = self.request
        if self.times is not None:
            self.times.stamp(self._services.admission, request)
        else:
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
        """Submits the decoded request. `binary_default` is what decoding returned: outputs are binary by default."""
        request = self.request
        self._binary_default = binary_default
        if self.forwarded is not None:
            self.forwarded.into(request)
        request.responder = responder
        self._services.admission.submit(request)

    def encode(self, response: InferResponse, later: bool = False) -> tuple[int, Headers, list[Any]] | None:
        """Status, headers without content-length, and the body's buffers.

        With `later`, None if classifying outputs or printing the JSON takes so long that encode_later() must do it.
        """
        request = self.request
        request.stamp(SEND_START)
        if response.error is not None:
            headers = [*self._json_headers(), *response.error.headers]
            return response.error.code.http, headers, error_body(response.error)
        try:
            if request.outputs is not None:
                if later and selects_slowly(request, response):
                    self._selecting = True
                    return None
                select(request, response, self._services)
            encoded = encode_response(request, response, self._binary_default, later)
        except Exception as error:
            return self._encoding_failed(error)
        return None if encoded is None else self._encoded(*encoded)

    async def encode_later(self, response: InferResponse) -> tuple[int, Headers, list[Any]]:
        """What encode() returns, made by a worker. Cancellation: asks the worker to stop."""
        try:
            encoded = await print_later(
                self._services, self.request, response, self._binary_default, self._selecting, self.whose
            )
        except Exception as error:
            return self._encoding_failed(error)
        return self._encoded(*encoded)

    def _json_headers(self) -> Headers:
        request = self.request
        if request.trace is None and request.timing is None:
            return JSON
        return [*JSON, *(request.trace.headers if request.trace else ()), *timing_headers(request)]

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
