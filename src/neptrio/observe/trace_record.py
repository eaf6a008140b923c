"""One sampled request as it is traced: its points in time, its tensors, its place in the tree.

The problem: a trace must show true times without slowing the path. The choice: times are read from
the request's own timestamp array when it is done; what the array cannot hold (responses of decoupled
models) is noted as it happens. Text is made on the writer's thread.

Rules:
 1. A Group is one trace for sampling and for files: a root request with all its ensemble steps and
    BLS calls. It is finished when every part has ended.
 2. Ids grow from parent to child.
 3. A part ends with its final response; a root with a front when that response has been sent.
 4. Timestamps of a part are in time order.
Source: spec/trace-file.md, spec/observed.md 11, the trace guide.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from neptrio import datatypes
from neptrio._cext.grpc_stream import GrpcStream
from neptrio._cext.request import InferRequest, InferResponse, Tensor, monotonic_ns
from neptrio.observe.trace_settings import Scope
from neptrio.stamps import Stamp

REQUEST_STAMPS = ((Stamp.REQUEST_START, "REQUEST_START"), (Stamp.QUEUE_START, "QUEUE_START"))
COMPUTE_STAMPS = tuple(
    (stamp, stamp.name)
    for stamp in (Stamp.COMPUTE_START, Stamp.COMPUTE_INPUT_END, Stamp.COMPUTE_OUTPUT_START, Stamp.COMPUTE_END)
)
COMPUTE_START = int(Stamp.COMPUTE_START)
RECV_START = int(Stamp.RECV_START)
RECV_END = int(Stamp.RECV_END)
REQUEST_END = int(Stamp.REQUEST_END)
SEND_START = int(Stamp.SEND_START)
RECEIVE = {"HTTP": "RECV", "GRPC": "WAITREAD"}


class Copied:
    """A tensor's bytes at the moment it was traced, no more than the limit."""

    __slots__ = ("activity", "dtype", "name", "nbytes", "raw", "shape")

    def __init__(self, activity: str, tensor: Tensor, limit: int) -> None:
        self.activity = activity
        self.name = tensor.name
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.nbytes = tensor.nbytes
        try:
            self.raw: bytes | None = bytes(memoryview(tensor)[:limit])
        except BufferError:  # in GPU memory: fetching it would stop the loop
            self.raw = None


class Group:
    """A root request's trace with those of its children."""

    __slots__ = ("open", "parts", "scope", "timestamps", "tracer")

    def __init__(self, tracer: Any, scope: Scope) -> None:
        self.tracer = tracer
        self.scope = scope
        self.timestamps = "TIMESTAMPS" in scope.level
        self.parts: list[Trace] = []
        self.open = 0


_IDS = count(1)


class Trace:
    """One request of a group; lies in request.trace."""

    __slots__ = (
        "_deferred", "_ended", "_flushing", "_front", "_group", "_left", "_responses", "error", "headers", "id",
        "identity",
        "parent", "request", "tensors", "times",
    )  # fmt: skip

    def __init__(self, group: Group, request: InferRequest, parent: int) -> None:
        self.id = next(_IDS)
        self.parent = parent
        self.request: InferRequest | None = request
        self.identity = ("", 0, "")
        self.headers: tuple[tuple[bytes, bytes], ...] = ()  # of the answer
        self.error = ""
        self.tensors: list[Copied] = []
        self.times: list[tuple[int, str]] = []
        self._group = group
        self._front = ""
        if request.timestamp(RECV_START) and not parent:
            self._front = "GRPC" if isinstance(request.context, GrpcStream) else "HTTP"
        self._responses: list[int] = []  # since the last flush: the times when they were made
        self._deferred = self._left = False
        self._flushing = False
        self._ended = False
        group.parts.append(self)
        group.open += 1
        if "TENSORS" in group.scope.level:
            self._copy("TENSOR_QUEUE_INPUT", request.inputs)

    @property
    def group(self) -> Group:
        """The trace this part belongs to."""
        return self._group

    def _copy(self, activity: str, tensors: Any) -> None:
        limit = self._group.tracer.tensor_bytes
        self.tensors += [Copied(activity, tensor, limit) for tensor in tensors or ()]

    def answering(self, response: InferResponse, final: bool) -> None:
        """The request is being answered; called by complete() before the responder is."""
        request = self.request
        if request is None:
            return
        if response.error is not None and not self.error:
            self.error = str(response.error)
        if "TENSORS" in self._group.scope.level:
            if final and request.timestamp(COMPUTE_START) and not request.composing:
                self._copy("TENSOR_BACKEND_INPUT", request.inputs)
            self._copy("TENSOR_BACKEND_OUTPUT", response.outputs)
        if self._front and not request.cancelled and not response.null:
            self._responses.append(monotonic_ns())

    def answered(self, final: bool) -> None:
        """The responder has been called; the rest follows when the turn has sent its output."""
        if final:
            self._ended = True
            if not self._front:
                self.close()
                return
        if not self._deferred and not self._flushing:
            self._flushing = True
            self._group.tracer.turn.want_flush(self)

    def defer(self) -> None:
        """The front sends later than this turn and calls left() when it has, or never will."""
        self._deferred = not self._left

    def left(self) -> None:
        """A front that deferred has sent its answer, or its client is gone."""
        self._left, self._deferred = True, False
        self.sent()

    def flush(self) -> None:
        """Called by the turn after the connection that the answer went to."""
        self._flushing = False
        self.sent()

    def sent(self) -> None:
        """What was answered so far has been handed to the network."""
        request = self.request
        if request is None:
            return
        now = monotonic_ns()
        for made in self._responses:
            start = request.timestamp(SEND_START)
            self.times += [
                (made, "INFER_RESPONSE_COMPLETE"),
                (start if made <= start <= now else made, f"{self._front}_SEND_START"),
                (now, f"{self._front}_SEND_END"),
            ]
        self._responses = []
        if self._ended:
            self.close()

    def refused(self, error: BaseException) -> None:
        """The scheduler did not take the request: it ends here."""
        request = self.request
        if request is not None:
            self.error = str(error)
            request.stamp(REQUEST_END)
            self.close()

    def close(self) -> None:
        """Reads the request's timestamps and lets go of it."""
        request = self.request
        if request is None:
            return
        self.request = None
        self._read(request)
        group = self._group
        group.open -= 1
        if not group.open:
            group.tracer.finished(group)

    def _read(self, request: InferRequest) -> None:
        self.identity = (request.model.name, int(request.model.version), request.id)
        if not self._group.timestamps:
            self.times = []
            return
        times = []
        if self._front:
            receive = f"{self._front}_{RECEIVE[self._front]}"
            times += [(request.timestamp(RECV_START), receive + "_START")]
            times += [(request.timestamp(RECV_END), receive + "_END")]
        stamps = REQUEST_STAMPS if request.composing else REQUEST_STAMPS + COMPUTE_STAMPS
        times += [(request.timestamp(stamp), name) for stamp, name in stamps]
        times.append((request.timestamp(REQUEST_END), "REQUEST_END"))
        self.times = sorted([t for t in times if t[0]] + self.times, key=lambda t: t[0])

    def document(self) -> list[dict[str, Any]]:
        """The objects of the trace file. Any thread."""
        name, version, request_id = self.identity
        top: dict[str, Any] = {"model_name": name, "model_version": version, "id": self.id}
        if self.parent:
            top["parent_id"] = self.parent
        if request_id:
            top["request_id"] = request_id
        if self.error:
            top["error"] = self.error
        if self.times:
            top["timestamps"] = [{"name": what, "ns": ns} for ns, what in self.times]
        return [top, *(
            {"model_name": name, "model_version": version, "id": self.id, "activity": t.activity,
             "tensor": tensor_document(t)} for t in self.tensors
        )]  # fmt: skip


def tensor_document(copied: Copied) -> dict[str, Any]:
    """name, data (comma-joined text), shape and dtype.

    A tensor above the size limit has the elements that fit, `shape` is their number and
    `truncated_from` the tensor's shape. BF16 is written as FP32, which holds all its values.
    """
    import numpy as np

    from neptrio.codec.numpy_tensor import split_bytes

    dtype = copied.dtype
    made: dict[str, Any] = {"name": copied.name, "data": "", "shape": ",".join(map(str, copied.shape)),
                            "dtype": datatypes.NAME[dtype]}  # fmt: skip
    raw = copied.raw
    if raw is None:
        made["omitted"] = "the tensor is in GPU memory"
        return made
    if dtype == datatypes.BYTES:
        elements: list[Any] = []
        at = 0
        while at + 4 <= len(raw) and at + 4 + (size := int.from_bytes(raw[at : at + 4], "little")) <= len(
            raw
        ):
            at += 4 + size
        elements = split_bytes(raw[:at])
        texts = [
            '"' + e.decode(errors="backslashreplace").replace("\\", "\\\\").replace('"', '\\"') + '"'
            for e in elements
        ]
    else:
        item = datatypes.ITEM_SIZE[dtype]
        array = np.frombuffer(raw[: len(raw) // item * item], dtype=datatypes.NUMPY[dtype])
        if dtype == datatypes.BF16:
            array = array.astype(np.float32)
            made["dtype"], made["source_dtype"] = "FP32", "BF16"
        if array.dtype.kind == "b":
            array = array.view(np.uint8)
        texts = [str(value) for value in array]
    made["data"] = ",".join(texts)
    if copied.nbytes > len(raw):
        made["truncated_from"] = made["shape"]
        made["shape"] = str(len(texts))
    return made
