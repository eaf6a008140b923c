"""Tensors in device memory, for code that does not use CUDA: whether there are any, and how they come to the host.

The problem: inputs in CUDA shared memory regions, tensors between the steps of an ensemble and the
state of sequences lie on a GPU. Kernel models take them there; everybody else (other backends, the
traces, the transports) must not touch them. The choice: whoever opens a GPU enters the GPU's memory pool in
`pools`, and whoever needs a tensor's bytes calls on_host(). Without a GPU all of this is one comparison.

Rules:
 1. A tensor in GPU_MEMORY is never read through its address outside of cext/backends/kernel/cuda_*.pyx.
 2. An instance that does not say `takes_device_memory` gets host tensors: Batch.execute() fetches them on
    the instance's thread, InstanceCore.make_batch() for instances that never come through there.
 3. A fetched tensor is a copy in host memory of its own. A request keeps the copy, not the original.
"""
from neptrio.request.infer_request cimport GPU_MEMORY, InferRequest, Tensor

from neptrio.request.infer_request import tensor_at
from neptrio.errors import Internal, Reason, TritonError

pools = {}  # GPU -> its DevicePool, while something has it open
cdef dict _pools = pools


cpdef bint in_use() noexcept:
    """True while a GPU is open: only then can there be tensors in device memory."""
    return len(_pools) > 0


def pool_of(int device):
    """The pool of a GPU that is open. Raises Internal."""
    pool = _pools.get(device)
    if pool is None:
        raise Internal(f"a tensor lies on GPU {device}, which is not open", reason=Reason.BACKEND)
    return pool


cpdef Tensor on_host(Tensor tensor):
    """The tensor itself, or a copy in host memory of one on a device. Releases the GIL while copying."""
    if tensor.memory_kind != GPU_MEMORY:
        return tensor
    block = pool_of(tensor.memory_id).fetch(tensor.address, tensor.nbytes)
    return tensor_at(tensor.name, tensor.dtype, tensor.shape, block.address, tensor.nbytes, block)


cpdef object fetch_inputs(list requests):
    """Puts copies in host memory in the place of the requests' inputs in device memory (rule 2)."""
    cdef InferRequest request
    cdef Tensor tensor
    for request in requests:
        for tensor in request.inputs:
            if tensor.memory_kind == GPU_MEMORY:
                request.inputs = [on_host(t) for t in request.inputs]
                break


def readable(tensors):
    """The tensors on the host, for callers that must not fail: one that cannot be fetched stays where it is."""
    if not in_use():
        return tensors
    found = []
    for tensor in tensors:
        try:
            found.append(on_host(tensor))
        except TritonError:
            found.append(tensor)
    return found
