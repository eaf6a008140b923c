"""The in-process Python interface of Triton (`import tritonserver`), served by this server.

    import neptrio.compat.tritonserver as tritonserver

    server = tritonserver.Server(model_repository="models").start(wait_until_ready=True)
    for response in server.model("simple").infer(inputs={"INPUT0": array}):
        print(numpy.from_dlpack(response.outputs["OUTPUT0"]))

Names, arguments and behaviour are those of the public package; the code is ours and stands on neptrio.embedded.
docs/compat-tritonserver.md says what is supported, accepted without an effect, or refused.
"""

from __future__ import annotations

from neptrio.compat.tritonserver.enums import DataType as DataType
from neptrio.compat.tritonserver.enums import DLDeviceType as DLDeviceType
from neptrio.compat.tritonserver.enums import InstanceGroupKind as InstanceGroupKind
from neptrio.compat.tritonserver.enums import LogFormat as LogFormat
from neptrio.compat.tritonserver.enums import MemoryType as MemoryType
from neptrio.compat.tritonserver.enums import MetricFormat as MetricFormat
from neptrio.compat.tritonserver.enums import MetricKind as MetricKind
from neptrio.compat.tritonserver.enums import ModelBatchFlag as ModelBatchFlag
from neptrio.compat.tritonserver.enums import ModelControlMode as ModelControlMode
from neptrio.compat.tritonserver.enums import ModelTxnPropertyFlag as ModelTxnPropertyFlag
from neptrio.compat.tritonserver.enums import RateLimitMode as RateLimitMode
from neptrio.compat.tritonserver.errors import AlreadyExistsError as AlreadyExistsError
from neptrio.compat.tritonserver.errors import InternalError as InternalError
from neptrio.compat.tritonserver.errors import InvalidArgumentError as InvalidArgumentError
from neptrio.compat.tritonserver.errors import NotFoundError as NotFoundError
from neptrio.compat.tritonserver.errors import TritonError as TritonError
from neptrio.compat.tritonserver.errors import UnavailableError as UnavailableError
from neptrio.compat.tritonserver.errors import UnknownError as UnknownError
from neptrio.compat.tritonserver.errors import UnsupportedError as UnsupportedError
from neptrio.compat.tritonserver.memory import MemoryAllocator as MemoryAllocator
from neptrio.compat.tritonserver.memory import MemoryBuffer as MemoryBuffer
from neptrio.compat.tritonserver.metrics import Metric as Metric
from neptrio.compat.tritonserver.metrics import MetricFamily as MetricFamily
from neptrio.compat.tritonserver.model import Model as Model
from neptrio.compat.tritonserver.options import ModelLoadDeviceLimit as ModelLoadDeviceLimit
from neptrio.compat.tritonserver.options import Options as Options
from neptrio.compat.tritonserver.options import RateLimiterResource as RateLimiterResource
from neptrio.compat.tritonserver.request import InferenceRequest as InferenceRequest
from neptrio.compat.tritonserver.response import AsyncResponseIterator as AsyncResponseIterator
from neptrio.compat.tritonserver.response import InferenceResponse as InferenceResponse
from neptrio.compat.tritonserver.response import ResponseIterator as ResponseIterator
from neptrio.compat.tritonserver.server import ModelDictionary as ModelDictionary
from neptrio.compat.tritonserver.server import Server as Server
from neptrio.compat.tritonserver.tensor import Tensor as Tensor
