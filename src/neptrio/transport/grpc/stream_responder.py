"""Where the responses to requests of ModelStreamInfer go: to their streams."""

from __future__ import annotations

from collections.abc import Callable

from neptrio.request.infer_request import InferRequest, InferResponse, Protocol, Responder


class StreamResponder(Responder):
    """Passes responses to the stream of their request, which is request.context."""

    def __init__(self) -> None:
        self.protocol = Protocol.GRPC_PROTOCOL

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        request.context.respond(request, response, final)

    def wait_for_room(self, request: InferRequest, callback: Callable[[], None]) -> bool:
        stream = request.context
        if stream.congested:
            stream.when_writable(callback)
            return True
        return False

    def waits_for_kernel(self, request: InferRequest, callback: Callable[[], None], stage: int) -> bool:
        stream = request.context
        if stage:
            return bool(stream.writer.when_taken(callback))
        return bool(stream.when_taken(callback, request.trace.answer_end))


RESPONDER = StreamResponder()
