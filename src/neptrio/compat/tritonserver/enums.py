"""The enumerations of the interface. Their numbers are those of Triton's C interface and of DLPack."""

from __future__ import annotations

from enum import IntEnum


class DataType(IntEnum):
    """The datatype of a tensor's elements."""

    INVALID = 0
    BOOL = 1
    UINT8 = 2
    UINT16 = 3
    UINT32 = 4
    UINT64 = 5
    INT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    FP16 = 10
    FP32 = 11
    FP64 = 12
    BYTES = 13
    BF16 = 14


class MemoryType(IntEnum):
    """Where a tensor lies."""

    CPU = 0
    CPU_PINNED = 1
    GPU = 2


class DLDeviceType(IntEnum):
    """The devices of DLPack that have a memory type here."""

    kDLCPU = 1
    kDLCUDA = 2
    kDLCUDAHost = 3


class ModelControlMode(IntEnum):
    """Who decides which models are loaded."""

    NONE = 0
    POLL = 1
    EXPLICIT = 2


class RateLimitMode(IntEnum):
    """Whether instances take turns by rate_limiter priority and resources."""

    OFF = 0
    EXEC_COUNT = 1


class LogFormat(IntEnum):
    """How log lines begin."""

    DEFAULT = 0
    ISO8601 = 1


class InstanceGroupKind(IntEnum):
    """Where instances of a model run."""

    AUTO = 0
    CPU = 1
    GPU = 2
    MODEL = 3


class MetricFormat(IntEnum):
    """The format of Server.metrics()."""

    PROMETHEUS = 0


class MetricKind(IntEnum):
    """What a custom metric counts."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class ModelBatchFlag(IntEnum):
    """Whether the first dimension of a model's tensors is the batch."""

    UNKNOWN = 1
    FIRST_DIM = 2


class ModelTxnPropertyFlag(IntEnum):
    """How many responses a request has: one, or any number."""

    ONE_TO_ONE = 1
    DECOUPLED = 2
