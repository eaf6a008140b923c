"""Tensors in GPU memory, as Python models see and return them.

Models get host tensors unless they ask otherwise, with Triton's parameter FORCE_CPU_ONLY_INPUT_TENSORS set to
"no": then inputs that lie on a GPU (a registered region, the step before in an ensemble) are given as they
are, is_cpu() is False and to_dlpack() hands them to torch, CuPy and the like. Outputs made with from_dlpack()
from memory on a GPU stay there when the next step or the client's region takes them there; otherwise
they are fetched, on the model's thread.

Only models in this process see device memory: an isolated model's tensors pass through shared memory.
"""

from __future__ import annotations

from typing import Any

import neptrio.request.device_memory as device_memory
import neptrio.request.dlpack as dlpack
import triton_python_backend_utils as utils
from neptrio.errors import TritonError
from neptrio.request.infer_request import Tensor
from triton_python_backend_utils import _tensor

CUDA = dlpack.CUDA
LEGACY_STREAM = 1  # CUDA's default stream: the other library orders its work before it, then we wait for it


def given(tensor: Tensor) -> utils.Tensor:
    """A tensor in device memory, in the type that models see."""
    device = (CUDA, int(tensor.memory_id))
    made: utils.Tensor = utils.Tensor._over(
        tensor.name, tensor.dtype, tensor.shape, tensor, dlpack.export, False, device
    )
    return made


def taken(name: str, source: Any) -> utils.Tensor | None:
    """A tensor over the device memory of another library's tensor. None if it is not on a GPU that the server uses.

    Raises TritonModelException for a layout or data type that is not supported.
    """
    if not device_memory.in_use():
        return None
    try:
        capsule = type(source).__name__ == "PyCapsule"
        kind, number = dlpack.device_of(source) if capsule else source.__dlpack_device__()
        if int(kind) != CUDA or int(number) not in device_memory.pools:
            return None
        tensor = dlpack.take(name, source if capsule else source.__dlpack__(stream=LEGACY_STREAM))
        device_memory.pool_of(int(number)).wait_default_stream()
    except AttributeError:
        return None  # from_dlpack says what is missing
    except TritonError as error:
        raise utils.TritonModelException(str(error)) from error
    return given(tensor)


_tensor.devices = taken
