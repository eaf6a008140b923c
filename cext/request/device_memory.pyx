"""Tensors in device memory, for code that does not use CUDA: are there any, and how to copy them to the host.

The problem: inputs in CUDA shared memory regions, tensors between the steps of an ensemble, and states of sequences may
be in GPU memory. Kernel models use them there; all other code (other backends, traces, transports) must not touch them.
The choice: whoever opens a GPU registers its memory pool in `pools`, and whoever needs a tensor's bytes calls
on_host(). While no GPU is open all of this costs one comparison.

Rules:
 1. The address of a tensor with GPU_MEMORY is used only in cext/backends/kernel/cuda_*.pyx.
 2. An instance without `takes_device_memory` gets host tensors. Batch.execute() copies them on the instance's
    thread; for instances whose batches do not pass through there the device's thread does (execution/input_fetch.py).
 3. A copy has host memory of its own. The request then holds the copy, not the original.
"""
from neptrio.request.infer_request cimport GPU_MEMORY, InferRequest, Tensor

from neptrio.request.infer_request import tensor_at
from neptrio.errors import Internal, Reason, TritonError

pools = {}  # GPU number -> its DevicePool, while the GPU is open  # type: dict[int, Any]
cdef dict _pools = pools


cpdef bint in_use() noexcept:
    """True while a GPU is open; otherwise no tensor can be in device memory."""
    return len(_pools) > 0


def pool_of(int device):
    """The memory pool of an open GPU. Raises Internal when it is not open."""
    pool = _pools.get(device)
    if pool is None:
        raise Internal(f"a tensor lies on GPU {device}, which is not open", reason=Reason.BACKEND)
    return pool


cpdef Tensor on_host(Tensor tensor):
    """The tensor itself, or for a tensor in device memory a copy on the host. Releases the GIL while copying."""
    if tensor.memory_kind != GPU_MEMORY:
        return tensor
    block = pool_of(tensor.memory_id).fetch(tensor.address, tensor.nbytes)
    return tensor_at(tensor.name, tensor.dtype, tensor.shape, block.address, tensor.nbytes, block)


cdef bint on_device(InferRequest request):
    """True when an input of the request is in device memory."""
    cdef Tensor tensor
    for tensor in request.inputs:
        if tensor.memory_kind == GPU_MEMORY:
            return True
    return False


cpdef bint any_on_device(list requests):
    # type: (list[InferRequest]) -> bool
    """True when an input of any of the requests is in device memory."""
    cdef InferRequest request
    for request in requests:
        if on_device(request):
            return True
    return False


cpdef object fetch_inputs(list requests):
    # type: (list[InferRequest]) -> None
    """Replaces the requests' inputs that are in device memory by copies on the host (rule 2)."""
    cdef InferRequest request
    for request in requests:
        if on_device(request):
            request.inputs = [on_host(tensor) for tensor in request.inputs]


cpdef bint copied_out(Tensor tensor, region, offset):
    # type: (..., object, int) -> bool
    """Whether an output must be copied by the driver to get into a registered region: from the host to one on a GPU, which
    has an address, or from a GPU, unless it lies there already."""
    base = getattr(region, "address", None)
    if tensor.memory_kind != GPU_MEMORY:
        return base is not None
    return base is None or tensor.address != base + offset


def readable(tensors):
    # type: (Iterable[Tensor]) -> Iterable[Tensor]
    """The tensors on the host, for callers that must not fail: one that cannot be copied is returned as it is."""
    if not in_use():
        return tensors
    found = []
    for tensor in tensors:
        try:
            found.append(on_host(tensor))
        except TritonError:
            found.append(tensor)
    return found
