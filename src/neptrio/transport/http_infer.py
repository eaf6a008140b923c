"""One inference over HTTP: headers and body -> request, response -> status, headers and body.

Shared by the ASGI app and the lean connection; neither adds a rule of its own.
"""

from __future__ import annotations

from typing import Any

from neptrio._cext.request import InferRequest, InferResponse, Responder
from neptrio.codec import json_infer
from neptrio.codec.json_infer import HEADER_LENGTH, dump_json
from neptrio.codec.outputs import select
from neptrio.errors import InvalidArgument, TritonError, Unsupported
from neptrio.service import Services
from neptrio.transport.routes import Route

Headers = list[tuple[bytes, bytes]]
JSON: Headers = [(b"content-type", b"application/json")]


def error_body(error: TritonError) -> list[bytes]:
    """{"error": message} as body buffers."""
    return [dump_json({"error": str(error)})]


def _leading_int(value: bytes) -> int:
    """The header's number the way C's atoi reads it; 0 when there is none."""
    text = value.strip()
    sign, digits = 1, b""
    if text[:1] in (b"-", b"+"):
        sign, text = (-1 if text[:1] == b"-" else 1), text[1:]
    for i in range(len(text)):
        if not text[i : i + 1].isdigit():
            break
        digits += text[i : i + 1]
    return sign * int(digits or b"0")


class HttpInfer:
    """Raises TritonError at every step that refuses the request."""

    def __init__(self, services: Services, route: Route, headers: Headers) -> None:
        self._services = services
        self.request = InferRequest()
        self.request.model_name = route.model
        self.request.model_version = route.version
        self.request.model = services.inference.lookup(route.model, route.version)
        if self.request.model.decoupled:
            raise Unsupported("HTTP end point doesn't support models with decoupled transaction policy")
        self._binary_default = False
        self._header_length: int | None = None
        for name, value in headers:
            if name == HEADER_LENGTH:
                self._header_length = _leading_int(value)

    def submit(self, body: bytes, responder: Responder) -> None:
        """Decodes the body and submits the request."""
        if self._header_length is not None and not 0 <= self._header_length <= len(body):
            raise InvalidArgument(
                f"inference header size should be in range (0, {len(body)}), got: {self._header_length}"
            )
        self._binary_default = json_infer.decode_request(
            self.request, body, self._header_length, self._services.shared_memory
        )
        self.request.responder = responder
        self._services.inference.submit(self.request)

    def encode(self, response: InferResponse) -> tuple[int, Headers, list[Any]]:
        """(status, headers without content-length, body buffers)."""
        try:
            if response.error is not None:
                raise response.error
            select(self.request, response, self._services)
            headers, body = json_infer.encode_response(self.request, response, self._binary_default)
        except TritonError as error:
            return error.code.http, JSON, error_body(error)
        return 200, headers, body
