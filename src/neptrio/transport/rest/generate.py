"""The verbs generate and generate_stream: a JSON object in, a JSON object or server-sent events out.

Rules (docs/protocol/observed.md 7):
 1. An error that refuses the request before it is submitted is answered with that error's own status.
 2. The first response fixes the status: 200, or 400 when it is an error of the model.
 3. generate expects exactly one response. With any other number the body is an error, but the status stays 200, as a
    Triton server answers.
 4. generate_stream sends every response as it comes. If the client reads slowly, only its own stream waits.
 5. A client that disconnects cancels the request.
 6. A trace records each response when it is sent. Responses that are never sent are not recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import trio

from neptrio.codec import generate
from neptrio.codec.http_json import dump_json
from neptrio.codec.json_reader import Stop
from neptrio.errors import InvalidArgument, TritonError
from neptrio.observe.timing import HEADER as TIMING
from neptrio.observe.timing import timing_headers
from neptrio.request.back_pressure import let_send
from neptrio.request.infer_request import InferRequest, InferResponse, Protocol, Responder
from neptrio.service import Services
from neptrio.transport.infer_call import InferCall, Reserve, by_worker
from neptrio.transport.rest.disconnect import submitted, unless_gone
from neptrio.transport.rest.infer import JSON, Answer, Headers
from neptrio.transport.rest.routes import Route
from neptrio.transport.rest.times import CallTimes

EVENTS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
DECODED_HERE = 64 << 10  # reading more JSON takes over a quarter of a millisecond: see docs/loop.md
PRINTED_HERE = 32 << 10  # and so does printing more bytes of tensors
WAITING_BYTES = 1 << 20  # of responses that are not sent yet; above this the model waits before it sends more
NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
)


class ResponseQueue(Responder):
    """Keeps a request's responses in order until the one task that reads them takes them."""

    def __init__(self) -> None:
        self.protocol = Protocol.HTTP_PROTOCOL
        self._responses: deque[InferResponse] = deque()
        self._waiting_bytes = 0
        self._room: list[Callable[[], None]] = []
        self._changed = trio.Event()
        self.final = False

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        if request.trace is not None:
            request.trace.defer()  # the reading task sends it later, and records when
        if not response.null:
            self._responses.append(response)
            self._waiting_bytes += _size(response)
        self.final = self.final or final
        self._changed.set()

    def wait_for_room(self, request: InferRequest, callback: Callable[[], None]) -> bool:
        if self._waiting_bytes <= WAITING_BYTES or request.cancelled:
            return False
        self._room.append(callback)
        return True

    @property
    def over(self) -> bool:
        """Whether next() has nothing more to return: what it returned last was the final response."""
        return self.final and not self._responses

    async def next(self) -> InferResponse | None:
        """Waits for the next response; None after the last."""
        while not self._responses:
            if self.over:
                return None
            self._changed = trio.Event()
            await self._changed.wait()
        response = self._responses.popleft()
        self._waiting_bytes -= _size(response)
        if self._waiting_bytes <= WAITING_BYTES:
            room, self._room = self._room, []
            let_send(room)
        return response


def _size(response: InferResponse) -> int:
    return 1024 + sum(tensor.nbytes for tensor in response.outputs or ())


def _payload(response: InferResponse, stop: Stop | None = None) -> tuple[bytes, bool]:
    """The response as a JSON object, and whether it is an error."""
    if response.error is not None:
        return dump_json({"error": str(response.error)}), True
    try:
        return generate.encode(response, stop), False
    except TritonError as error:  # which is not kept: its traceback refers to this frame
        return dump_json({"error": str(error)}), True


class HttpGenerate(InferCall):
    """One generate or generate_stream request."""

    times: CallTimes  # of the call of the app that this is

    def __init__(self, services: Services, route: Route, headers: Headers) -> None:
        """Raises TritonError for a model that does not serve."""
        super().__init__(services)
        self._stream = route.verb == "generate_stream"
        for name, value in headers:
            if name == b"content-encoding" and value.strip() not in (b"", b"identity"):
                raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
        self.request.model_name = route.model
        self.request.model_version = route.version
        services.admission.find(self.request, None)
        self.read_wishes(lambda: headers, dict(headers).get(TIMING))

    async def run(self, body: Any, receive: Any, send: Any) -> Answer | None:
        """Answers the request. Sends a stream itself and returns None; otherwise returns status, headers and body.

        Raises TritonError if the request is refused, Disconnected. Cancellation: cancels the request.
        """
        self.times.stamp(self.services.admission, self.request)
        try:
            return await self._run(body, receive, send)
        finally:
            self.give_back()

    def slow(self, body: Any) -> bool:
        return len(body) > DECODED_HERE

    def decode(self, body: Any, memory: Any, stop: Stop | None = None, reserve: Reserve = None) -> None:
        generate.decode(self.request, body, stop is not None, reserve)

    async def _run(self, body: Any, receive: Any, send: Any) -> Answer | None:
        queue = ResponseQueue()
        await submitted(self, self.times, body, receive, queue)
        answer: Answer | None = None
        try:
            if self._stream:
                await unless_gone(receive, self._events, queue, send)
            else:
                answer = await unless_gone(receive, self._single, queue)
                self.times.answers(self.request)
        finally:
            if not queue.final:
                self.services.admission.cancel(self.request)
                self.services.loop.loop_pass.end()
        return answer

    async def _payload(self, response: InferResponse) -> tuple[bytes, bool]:
        """_payload(), by a worker if printing takes long."""
        if _size(response) <= PRINTED_HERE:
            return _payload(response)
        return await by_worker(self.services, lambda stop: _payload(response, stop), self)

    async def _single(self, queue: ResponseQueue) -> Answer:
        payloads: list[tuple[bytes, bool]] = []
        count = 0
        while (response := await queue.next()) is not None:
            count += 1
            if count == 1:
                payloads.append(await self._payload(response))
        failed = bool(payloads) and payloads[0][1]
        if count != 1 and not failed:
            return 200, JSON, [dump_json({"error": NOT_ONE})]
        return 400 if failed else 200, [*JSON, *timing_headers(self.request)], [payloads[0][0]]

    async def _events(self, queue: ResponseQueue, send: Any) -> None:
        response = await queue.next()
        payload, failed = await self._payload(response) if response is not None else (b"", False)
        status = 400 if failed else 200
        await send({"type": "http.response.start", "status": status, "headers": EVENTS})
        while response is not None:
            body = generate.event(payload)
            with self.times.sending(self.request):
                await send({"type": "http.response.body", "body": body, "more_body": True})
            response = await queue.next()
            if response is not None:
                payload, _ = await self._payload(response)
        self.times.over()  # before the client sees the end: settings it updates then find this trace finished
        await send({"type": "http.response.body", "body": b""})
