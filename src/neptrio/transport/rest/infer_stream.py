"""The verb infer_stream: an infer request in, any number of responses out. An extension of ours.

POST v2/models/M[/versions/V]/infer_stream takes what infer takes. Each response is the answer that infer would give,
with the parameter triton_final_response as over gRPC, as a server-sent event or, with `Accept: multipart/mixed`, as a
part. A model that ends without a last response gives one without outputs.

Rules:
 1. What refuses the request, and a first response that is an error, is answered as infer answers it: status and JSON.
    An error behind other responses is an event `error` (a part with an `error`), and the stream goes on.
 2. Responses are sent as they come. If the client reads slowly, its own stream waits, and the model with it.
 3. A client that disconnects cancels the request.
 4. Binary outputs are base64 in events, and bytes behind the JSON in parts, whose Inference-Header-Content-Length says
    where they begin.
"""

from __future__ import annotations

import secrets
from base64 import b64encode
from typing import Any

from neptrio.codec.http_json import dump_json, load_json
from neptrio.errors import Internal
from neptrio.request.infer_request import InferRequest, InferResponse
from neptrio.service import Services
from neptrio.transport.rest.disconnect import submitted, unless_gone
from neptrio.transport.rest.generate import EVENTS, ResponseQueue
from neptrio.transport.rest.infer import Answer, Headers, HttpInfer
from neptrio.transport.rest.routes import Route
from neptrio.transport.rest.times import CallTimes

FINAL = "triton_final_response"
MULTIPART = b"multipart/mixed"


class StreamQueue(ResponseQueue):
    """Keeps an empty final response, too."""

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        if response.null:
            if not final:
                return
            response = InferResponse([])
            response.model_name, response.model_version = request.model.name, request.model.version
            response.id = request.id
        super().respond(request, response, final)


class HttpInferStream(HttpInfer):
    """One infer_stream request."""

    times: CallTimes

    def __init__(self, services: Services, route: Route, headers: Headers) -> None:
        """Raises TritonError for a model that does not serve."""
        super().__init__(services, route, headers, stream=True)
        self._boundary = b""
        if MULTIPART in dict(headers).get(b"accept", b"").lower():
            self._boundary = secrets.token_hex(16).encode()

    async def run(self, body: Any, receive: Any, send: Any) -> Answer | None:
        """Answers the request: sends a stream and returns None, or returns status, headers and body of an error.

        Raises TritonError if the request is refused, Disconnected. Cancellation: cancels the request.
        """
        queue = StreamQueue()
        try:
            await submitted(self, self.times, body, receive, queue)
            answer: Answer | None = await unless_gone(receive, self._responses, queue, send)
            return answer
        finally:
            self.give_back()
            if not queue.final and self.request.responder is queue:
                self.services.admission.cancel(self.request)
                self.services.loop.loop_pass.end()

    async def _responses(self, queue: StreamQueue, send: Any) -> Answer | None:
        begun = False
        while (response := await queue.next()) is not None:
            if response.error is None:
                response.parameters = {**(response.parameters or {}), FINAL: queue.over}
            answer = self.encode(response, later=True)
            if answer is None:
                answer = await self.encode_later(response)
            status, headers, parts = answer
            if not begun:
                if status != 200:
                    self.times.answers(self.request)
                    return answer
                begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self._start_headers()})
            body = self._packed(status, headers, parts)
            with self.times.sending(self.request):
                await send({"type": "http.response.body", "body": body, "more_body": True})
        if not begun:
            raise Internal("the model ended the request without a response")
        self.times.over()  # before the client sees the end: settings it updates then find this trace finished
        await send(
            {"type": "http.response.body", "body": b"--%b--\r\n" % self._boundary if self._boundary else b""}
        )
        return None

    def _start_headers(self) -> Headers:
        if not self._boundary:
            return EVENTS
        return [(b"content-type", MULTIPART + b'; boundary="' + self._boundary + b'"')]

    def _packed(self, status: int, headers: Headers, parts: list[Any]) -> bytes:
        """One response as an event or a part."""
        if self._boundary:
            body = b"".join(parts)
            lines = [b"%b: %b\r\n" % (name.title(), value) for name, value in headers]
            return b"--%b\r\n%bContent-Length: %d\r\n\r\n%b\r\n" % (
                self._boundary, b"".join(lines), len(body), body,
            )  # fmt: skip
        name = b"" if status == 200 else b"event: error\n"
        text = bytes(parts[0]) if len(parts) == 1 else _with_base64(parts)
        return b"%bdata: %b\n\n" % (name, text)


def _with_base64(parts: list[Any]) -> bytes:
    """A response with binary outputs as JSON alone; `parts` are its JSON and the outputs' bytes, in order."""
    document = load_json(bytes(parts[0]))
    blobs = iter(parts[1:])
    for output in document["outputs"]:
        if "binary_data_size" in output.get("parameters", ()):
            output["base64"] = b64encode(memoryview(next(blobs)).cast("B")).decode()
    return bytes(dump_json(document))
