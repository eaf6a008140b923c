"""One inference over HTTP: makes a request of headers and body, and status, headers and body of its response.

The ASGI app and our own HTTP/1.1 connection share it, so that both give the same answers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from neptrio.codec.compression import deflater, inflater, negotiate, refusal
from neptrio.codec.http_json import HEADER_LENGTH, decode_request, dump_json, encode_response
from neptrio.codec.inflate import Inflater, TooLong, Undecodable
from neptrio.codec.json_reader import Stop
from neptrio.codec.outputs import select, selects_slowly
from neptrio.codec.shared_memory import AskedFromThread, names_large_inputs
from neptrio.datatypes import BYTES
from neptrio.errors import Internal, InvalidArgument, TritonError
from neptrio.execution.admission import HTTP_ONE_RESPONSE
from neptrio.observe.timing import HEADER as TIMING
from neptrio.observe.timing import timing_headers
from neptrio.request.infer_request import InferRequest, InferResponse, Timestamp
from neptrio.service import Services
from neptrio.transport.infer_call import InferCall, Reserve, by_worker
from neptrio.transport.rest.body import SplitBody
from neptrio.transport.rest.routes import Route
from neptrio.transport.rest.times import CallTimes

log = logging.getLogger("neptrio.rest")

Headers = list[tuple[bytes, bytes]]
Answer = tuple[int, Headers, list[Any]]  # status, headers without content-length, and the body's buffers
JSON: Headers = [(b"content-type", b"application/json")]
BINARY = (b"content-type", b"application/octet-stream")
SEND_START = int(Timestamp.SEND_START)
LARGE_BODY = 4 << 10  # before decoding more, the queue is asked whether it has room for the request
COMPRESSED_HERE = 64 << 10  # bytes; compressing more takes milliseconds: workers do it
_NUMBER = re.compile(rb"([-+]?)([0-9]{0,20})")
DECODED_LATER = 256 << 10  # reading more JSON takes over a quarter of a millisecond: see docs/loop.md


def error_body(error: TritonError) -> list[bytes]:
    """The body of an error's answer, {"error": message}, as a list of buffers."""
    return [dump_json({"error": str(error)})]


def not_allowed(methods: tuple[str, ...], why: str = "") -> Answer:
    """The answer where only the method is wrong; `methods` are those that the path takes."""
    takes = ", ".join(methods)
    text = {"error": f"Method Not Allowed: {why or f'this path takes {takes}'}"}
    return 405, [*JSON, (b"allow", takes.encode())], [dump_json(text)]


def leading_int(value: bytes) -> int:
    """A header's number, read like C's atoi, as Triton does: what follows the digits is ignored, no digits are 0."""
    found = _NUMBER.match(value.strip())
    assert found is not None  # it matches everything
    return int(found[1] + (found[2] or b"0"))


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
    memory = AskedFromThread(services.shared_memory)

    def work(stop: Stop) -> tuple[bytes, list[Any] | None, int] | None:
        if selecting:
            select(request, response, memory)
        return encode_response(request, response, binary_default, False, stop)

    encoded = await by_worker(services, work, whose)
    assert encoded is not None
    return encoded


class HttpInfer(InferCall):
    """One inference request and its answer, step by step. Every step raises TritonError if it refuses the request.

    The steps are take(), submit(), encode(). Two have a twin that works on a worker's thread: take_later() (InferCall),
    encode_later() where encode() returns None; and compress_later() follows if `encoding` is set after encoding.
    """

    __slots__ = (
        "_accept",
        "_binary_default",
        "_content_encoding",
        "_header_length",
        "_one_response",
        "_selecting",
        "encoding",
        "hold",
        "receive_start",
        "times",
    )

    def __init__(
        self,
        services: Services,
        route: Route,
        headers: Headers,
        get: Callable[[bytes], bytes | None] | None = None,
        stream: bool = False,
        whose: object = None,
    ) -> None:
        """`get` finds one of the headers by its name in lower case; without it all are in lower case, as ASGI has them.
        `stream`: any number of responses can be carried, each as it is; else a decoupled model is refused."""
        super().__init__(services, whose)
        if get is None:
            get = dict(headers).get
        self.times: CallTimes | None = None  # of the call of the app that this is, if it is one
        self.receive_start = 0  # when its first byte came, if it is none
        self.hold: Callable[[int], None] | None = None  # told of the bytes that its body was inflated to
        self.request.model_name = route.model
        self.request.model_version = route.version
        self._one_response = None if stream else HTTP_ONE_RESPONSE
        services.admission.find(self.request, self._one_response)
        self.read_wishes(lambda: headers, get(TIMING))
        self._binary_default = False
        length = get(HEADER_LENGTH)
        self._header_length = None if length is None else leading_int(length)
        self._content_encoding = get(b"content-encoding")
        self._selecting = False  # encode_later() chooses and classifies outputs too
        self.encoding = ""
        self._accept = None if stream else get(b"accept-encoding")

    # ------------------------------------------------------------ the codec of bodies

    def inflater(self, body: Any) -> Inflater | None:
        if self._content_encoding is None:
            return None
        encoding = self._content_encoding.decode("latin-1").strip()
        return inflater(encoding, body, self.services.settings.http_max_input_size)

    def refusal(self, body: Any, error: Undecodable | TooLong, most: int) -> TritonError:
        assert self._content_encoding is not None
        return refusal(self._content_encoding.decode("latin-1").strip(), most, error)

    def begin(self, body: Any) -> None:
        request, admission = self.request, self.services.admission
        if self.inflated and self.hold is not None:
            self.hold(self.inflated)
        if self.times is not None:
            self.times.stamp(admission, request)
        else:
            admission.received(request, self.receive_start)
        if self._header_length is not None and not 0 <= self._header_length <= len(body):
            raise InvalidArgument(
                f"inference header size should be in range (0, {len(body)}), got: {self._header_length}"
            )
        if len(body) > LARGE_BODY and not admission.tracer.unread:
            request.model.scheduler.expect_room()

    def slow(self, body: Any) -> bool:
        if len(body) >= self.services.shared_memory.large.least and names_large_inputs(self._json(body)):
            return True
        if len(body) <= DECODED_LATER:
            return False
        if self._header_length is None or self._header_length > DECODED_LATER:
            return True
        # the lengths of very many strings are to be read
        return any(spec.dtype == BYTES for spec in self.request.model.input_specs)

    def _json(self, body: Any) -> Any:
        """The JSON of the plain body, or at least its beginning."""
        if isinstance(body, SplitBody):
            return body.text
        return body if len(body) <= DECODED_LATER else memoryview(body)[:DECODED_LATER]

    def text_bytes(self, body: Any) -> int:
        # strings take about as much as their text
        return len(body) if self._header_length is None else self._header_length

    def decode(self, body: Any, memory: Any, stop: Stop | None = None, reserve: Reserve = None) -> None:
        if stop is None and len(body) > LARGE_BODY:
            self.services.loop.lag.note("decoding an HTTP request", self.request.model_name, len(body))
        binary: Any = None
        if isinstance(body, SplitBody):
            body, binary = body.text, body.binary
        self._binary_default = decode_request(
            self.request, body, self._header_length, memory, stop, binary, reserve
        )

    # ------------------------------------------------------------ other steps

    async def take_later(self) -> None:
        await super().take_later()
        if not self.request.model.ready:  # it may have been replaced meanwhile, by a decoupled one
            self.services.admission.find(self.request, self._one_response)

    async def compress_later(
        self, body: list[Any], unless: Callable[[], bool] = lambda: False
    ) -> list[Any] | None:
        """The body compressed by the workers as `encoding` says. Stops and returns None if `unless()` becomes true."""
        made = deflater(self.encoding, body)
        return made.out if await self.services.workers.finish(made.step, unless, self.whose) else None

    def encode(self, response: InferResponse, later: bool = False) -> Answer | None:
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
                select(request, response, self.services)
            encoded = encode_response(request, response, self._binary_default, later)
        except Exception as error:
            return self._encoding_failed(error)
        return None if encoded is None else self._encoded(*encoded)

    async def encode_later(self, response: InferResponse) -> Answer:
        """What encode() returns, made by a worker. Cancellation: asks the worker to stop."""
        try:
            encoded = await print_later(
                self.services, self.request, response, self._binary_default, self._selecting, self.whose
            )
        except Exception as error:
            return self._encoding_failed(error)
        return self._encoded(*encoded)

    def _json_headers(self) -> Headers:
        request = self.request
        if request.trace is None and request.timing is None:
            return JSON
        return [*JSON, *(request.trace.headers if request.trace else ()), *timing_headers(request)]

    def _encoding_failed(self, error: Exception) -> Answer:
        if isinstance(error, TritonError):
            return error.code.http, self._json_headers(), error_body(error)
        log.error("encoding a response of model '%s' failed", self.request.model_name, exc_info=error)
        internal = Internal(f"internal error: {type(error).__name__}: {error}")
        return 500, self._json_headers(), error_body(internal)

    def _encoded(self, head: bytes, blobs: list[Any] | None, binary_bytes: int) -> Answer:
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
                if len(head) + binary_bytes <= COMPRESSED_HERE:
                    made = deflater(self.encoding, body)
                    made.step()
                    body, self.encoding = list(made.out), ""
        return 200, headers, body
