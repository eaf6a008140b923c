"""One inference over HTTP: headers and body -> request, response -> status, headers and body.

Shared by the ASGI app and the lean connection; neither adds a rule of its own.
"""

from __future__ import annotations

import logging
from typing import Any

import trio

from neptrio._cext.request import InferRequest, InferResponse, Responder
from neptrio.codec.compression import compress, decompress, negotiate
from neptrio.codec.http_json import HEADER_LENGTH, decode_request, dump_json, encode_response
from neptrio.codec.outputs import select
from neptrio.errors import Internal, InvalidArgument, TritonError, Unsupported
from neptrio.observe.propagation import asked
from neptrio.service import Services
from neptrio.stamps import Stamp
from neptrio.transport.routes import Route

log = logging.getLogger("neptrio.rest")

Headers = list[tuple[bytes, bytes]]
JSON: Headers = [(b"content-type", b"application/json")]
BINARY = (b"content-type", b"application/octet-stream")
RECV_START = int(Stamp.RECV_START)
RECV_END = int(Stamp.RECV_END)
SEND_START = int(Stamp.SEND_START)
LARGE_BODY = 4 << 10  # decoding more is worth asking first whether there is room for the request
ON_LOOP_BYTES = 64 << 10  # compressing more takes milliseconds, which belong on a thread


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


class HttpInfer:
    """Raises TritonError at every step that refuses the request.

    After encode(), `encoding` names the compression that is still to be applied to the body:
    that of a large one belongs on a worker thread (compress_later).
    """

    __slots__ = (
        "_accept",
        "_binary_default",
        "_content_encoding",
        "_header_length",
        "_services",
        "encoding",
        "forwarded",
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
        self.forwarded: dict[str, str] | None = None  # parameters made of headers
        self.request = InferRequest()
        self.request.model_name = route.model
        self.request.model_version = route.version
        model = services.inference.lookup(route.model, route.version)
        self.request.model = model
        if model.decoupled:
            raise Unsupported("HTTP end point doesn't support models with decoupled transaction policy")
        self._binary_default = False
        self._header_length = header_length
        self._content_encoding = content_encoding
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
        if services.inference.trace_headers:
            made.request.asked = asked(headers)
        return made

    def large_compressed(self, body: Any) -> bool:
        """True when the body should be decompressed on a worker thread (decompress_later)."""
        return self._content_encoding is not None and len(body) > ON_LOOP_BYTES

    async def decompress_later(self, body: Any) -> Any:
        """The plain body, made on a worker thread. Raises TritonError."""
        return await trio.to_thread.run_sync(self._plain, body)

    def _plain(self, body: Any) -> Any:
        if self._content_encoding is None:
            return body
        encoding, self._content_encoding = self._content_encoding.decode("latin-1").strip(), None
        return decompress(encoding, body, self._services.settings.http_max_input_size)

    async def compress_later(self, body: list[Any]) -> list[Any]:
        """The body compressed as `encoding` says, on a worker thread."""
        return [await trio.to_thread.run_sync(compress, self.encoding, body)]

    def submit(self, body: Any, responder: Responder, receive_start: int = 0) -> None:
        """Decodes the body and submits the request."""
        request = self.request
        request.stamp(RECV_START, receive_start)
        request.stamp(RECV_END)
        body = self._plain(body)
        header_length = None
        if self._header_length is not None:
            header_length = leading_int(self._header_length)
            if not 0 <= header_length <= len(body):
                raise InvalidArgument(
                    f"inference header size should be in range (0, {len(body)}), got: {header_length}"
                )
        if len(body) > LARGE_BODY and not self._services.inference.tracing:
            request.model.scheduler.expect_room()
        self._binary_default = decode_request(request, body, header_length, self._services.shared_memory)
        if self.forwarded is not None:
            request.parameters = {**(request.parameters or {}), **self.forwarded}
        request.responder = responder
        self._services.inference.submit(request)

    def encode(self, response: InferResponse) -> tuple[int, Headers, list[Any]]:
        """(status, headers without content-length, body buffers)."""
        request = self.request
        request.stamp(SEND_START)
        plain = JSON if request.trace is None else [*JSON, *request.trace.headers]
        if response.error is not None:
            return response.error.code.http, plain, error_body(response.error)
        try:
            if request.outputs is not None:
                select(request, response, self._services)
            head, blobs, binary_bytes = encode_response(request, response, self._binary_default)
        except TritonError as error:
            return error.code.http, plain, error_body(error)
        except Exception as error:
            log.exception("encoding a response of model '%s' failed", request.model_name)
            return 500, plain, error_body(Internal(f"internal error: {type(error).__name__}: {error}"))
        headers: Headers = plain
        body = [head]
        if binary_bytes:
            headers = [BINARY, (HEADER_LENGTH, b"%d" % len(head)), *plain[1:]]
            body += blobs
        if self._accept is not None:
            self.encoding = negotiate(self._accept)
            if self.encoding:
                headers = [*headers, (b"content-encoding", self.encoding.encode())]
                if len(head) + binary_bytes <= ON_LOOP_BYTES:
                    body = [compress(self.encoding, body)]
                    self.encoding = ""
        return 200, headers, body
