"""The codec of ModelInferRequest messages, of calls that the fast path leaves and of streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neptrio.codec.inflate import Inflater, TooLong, Undecodable
from neptrio.codec.json_reader import Stop
from neptrio.codec.proto_request import decode_request, decodes_slowly
from neptrio.errors import TritonError
from neptrio.observe.timing import HEADER as TIMING
from neptrio.request.infer_request import Responder
from neptrio.transport.grpc import compression as compression
from neptrio.transport.grpc.calls import Call, apply_policy
from neptrio.transport.infer_call import InferCall, Reserve

if TYPE_CHECKING:
    from neptrio.transport.grpc.connection import GrpcConnection

LARGE_MESSAGE = 64 << 10  # whether decoding takes long is asked for larger ones only


class GrpcInfer(InferCall):
    """One message."""

    __slots__ = ("compressed", "connection", "headers")

    def __init__(self, call: Call, connection: GrpcConnection, compressed: bool) -> None:
        super().__init__(connection.services, connection)
        self.connection = connection
        self.headers = call.headers
        self.compressed = compressed

    def inflater(self, message: Any) -> Inflater | None:
        if not self.compressed:
            return None
        return compression.inflater(message, self.headers.get(b"grpc-encoding"))

    def refusal(self, message: Any, error: Undecodable | TooLong, most: int) -> TritonError:
        return compression.refusal(message, error, most)

    def slow(self, message: Any) -> bool:
        large = len(message) > LARGE_MESSAGE or len(message) >= self.services.shared_memory.large.least
        return large and decodes_slowly(message)

    def text_bytes(self, message: Any) -> int:
        return 0  # it is counted until it is answered, and says exactly what is made of it

    def decode(self, message: Any, memory: Any, stop: Stop | None = None, reserve: Reserve = None) -> None:
        if stop is None and len(message) > LARGE_MESSAGE:
            self.services.loop.lag.note("decoding a gRPC request", "", len(message))
        decode_request(self.request, message, memory, stop, reserve)

    def prepare(self, call: Call, responder: Responder, one_response: str | None, began_ns: int) -> None:
        """Does what precedes admission.submit(), for a decoded message. `one_response` refuses a decoupled model, None: any
        number of responses can be carried. Raises TritonError."""
        request, admission = self.request, self.services.admission
        if self.connection.forward is not None:
            apply_policy(self.connection, self.headers, request)
        admission.find(request, one_response)
        request.context = call
        request.responder = responder
        admission.received(request, began_ns)
        if self.headers.has_custom:
            self.read_wishes(self.headers, self.headers.get(TIMING))
