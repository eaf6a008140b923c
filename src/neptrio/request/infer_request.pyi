# The types of cext/request/infer_request.pyx, which says what everything does; written by tools/make_stubs.py.
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
from typing_extensions import Buffer

from neptrio.errors import TritonError

class DataType(IntEnum):
    DT_INVALID = 0
    DT_BOOL = 1
    DT_UINT8 = 2
    DT_UINT16 = 3
    DT_UINT32 = 4
    DT_UINT64 = 5
    DT_INT8 = 6
    DT_INT16 = 7
    DT_INT32 = 8
    DT_INT64 = 9
    DT_FP16 = 10
    DT_FP32 = 11
    DT_FP64 = 12
    DT_BYTES = 13
    DT_BF16 = 14

class Timestamp(IntEnum):
    RECV_START = 0
    RECV_END = 1
    REQUEST_START = 2
    QUEUE_START = 3
    COMPUTE_START = 4
    COMPUTE_INPUT_END = 5
    COMPUTE_OUTPUT_START = 6
    COMPUTE_END = 7
    REQUEST_END = 8
    SEND_START = 9
    SEND_END = 10
    CACHE_LOOKUP_START = 11
    CACHE_LOOKUP_END = 12
    CACHE_INSERT_START = 13
    CACHE_INSERT_END = 14
    RESPONSE_COMPLETE = 15

class RequestState(IntEnum):
    TAKEN = 0
    QUEUED = 1
    DONE = 2

class MemoryKind(IntEnum):
    CPU_MEMORY = 0
    PINNED_MEMORY = 1
    GPU_MEMORY = 2

class Protocol(IntEnum):
    NO_PROTOCOL = 0
    HTTP_PROTOCOL = 1
    GRPC_PROTOCOL = 2

def monotonic_ns() -> int: ...
def jump_clock(ns: int) -> int: ...

class Export: ...

class Tensor:
    name: str
    dtype: int
    shape: tuple[int, ...]
    owner: Any
    @property
    def nbytes(self) -> int: ...
    memory_kind: int
    memory_id: int
    def __init__(
        self,
        name: str,
        dtype: int,
        shape: tuple[int, ...],
        buffer: Buffer | np.ndarray[Any, Any] | None = None,
        writable: bool = False,
    ) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def count(self) -> int: ...
    @property
    def address(self) -> int: ...
    def tobytes(self) -> bytes: ...
    def renamed(self, name: str) -> Tensor: ...
    def reshaped(self, shape: tuple[int, ...]) -> Tensor: ...

def alias(tensor: Tensor, name: str, shape: tuple[int, ...]) -> Tensor: ...
def tensor_at(
    name: str,
    dtype: int,
    shape: tuple[int, ...],
    address: int,
    nbytes: int,
    owner: object,
    memory_kind: int = 0,
    memory_id: int = 0,
) -> Tensor: ...

class RequestedOutput:
    name: str
    binary: int
    class_count: int
    shm_region: str | None
    shm_place: Any
    shm_offset: int
    shm_byte_size: int
    keep_on_device: bool
    def __init__(self, name: str) -> None: ...

class Responder:
    protocol: int
    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None: ...
    def wait_for_room(self, request: InferRequest, callback: Callable[[], None]) -> bool: ...
    def waits_for_kernel(self, request: InferRequest, callback: Callable[[], None], stage: int) -> bool: ...

class Owner:
    name: str
    open: int
    most: int
    generation: int
    def __init__(self, name: str) -> None: ...
    def too_many(self) -> Exception: ...

class InferRequest:
    model_name: str
    model_version: str
    id: str
    parameters: dict[str, Any] | None
    inputs: list[Tensor]
    outputs: list[RequestedOutput] | None
    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool
    priority: int
    timeout_us: int
    want_empty_final: bool
    batch_size: int
    model: Any
    responder: Responder
    scheduler: Any
    scheduler_data: Any
    batch: Any
    trace: Any
    asked: Any
    context: Any
    stream: Any
    parent: InferRequest | None
    owner: Owner | None
    cache_key: bytes | None
    state: int
    cancelled: bool
    still_read: bool
    on_cancel: Callable[[], object] | None
    owed: bool
    release_flags: int
    collect_statistics: bool
    deadline_ns: int
    responses: int
    cancelled_ns: int
    input_bytes: int
    cache_hit: bool
    composing: bool
    stated: Any
    failure: TritonError | None
    timing: bool | dict[str, int] | None
    def stamp(self, which: int, ns: int = 0) -> None: ...
    def timestamp(self, which: int) -> int: ...
    def input_named(self, name: str) -> Tensor | None: ...

class InferResponse:
    model_name: str
    model_version: str
    id: str
    parameters: dict[str, Any] | None
    outputs: list[Tensor] | None
    error: TritonError | None
    null: bool
    produced_ns: int
    def __init__(
        self,
        outputs: list[Tensor] | None = None,
        error: TritonError | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None: ...

class InputSpec:
    name: str
    dtype: int
    dims: tuple[int, ...]
    optional: bool
    ragged: bool
    fixed_elements: int
    def __init__(
        self, name: str, dtype: int, dims: tuple[int, ...], optional: bool = False, ragged: bool = False
    ) -> None: ...

class ModelCore:
    name: str
    version: str
    platform: str
    max_batch_size: int
    input_specs: list[InputSpec]
    input_index: dict[str, InputSpec]
    output_names: set[str]
    required_inputs: int
    decoupled: bool
    ready: bool
    scheduler: Any
    counters: Any
    inflight: int
    input_reshapes: Any
    tells_times: bool
    reshape_outputs: Callable[[list[Tensor]], list[Tensor]] | None
    on_idle: Callable[[], object] | None
    def __init__(self, name: str, version: str) -> None: ...
    def set_inputs(self, specs: list[InputSpec]) -> None: ...
    def take_back(self, request: InferRequest) -> bool: ...
    def body_source(self) -> None: ...
