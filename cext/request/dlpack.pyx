"""DLPack capsules for tensors in device memory, and tensors from capsules.

Tensors on the host go through numpy, which does not support device memory. For that the structure of the DLPack ABI
is written and read here (version 0, the one without flags, which every library still accepts).

Rules:
 1. An exported capsule holds a reference to its Tensor until the consumer calls the deleter, or until the capsule is
    freed without having been consumed.
 2. An imported tensor owns the capsule's structure and calls its deleter when it is freed.
 3. Only dense row-major tensors with datatypes of the server are imported; others are refused by name.
"""
from cpython.pycapsule cimport (
    PyCapsule_GetPointer,
    PyCapsule_IsValid,
    PyCapsule_New,
    PyCapsule_SetName,
)
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t
from libc.stdlib cimport calloc, free

from neptrio.request.infer_request cimport GPU_MEMORY, Tensor, element_size, times

from neptrio.request.infer_request import tensor_at
from neptrio.errors import InvalidArgument

cdef struct DLDevice:
    int32_t device_type
    int32_t device_id

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void* data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t* shape
    int64_t* strides
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor dl_tensor
    void* manager_ctx
    void (*deleter)(DLManagedTensor*) noexcept

CUDA = 2
_CODES = {  # our datatype -> (DLPack's code, bits)
    1: (6, 8), 2: (1, 8), 3: (1, 16), 4: (1, 32), 5: (1, 64), 6: (0, 8), 7: (0, 16), 8: (0, 32), 9: (0, 64),
    10: (2, 16), 11: (2, 32), 12: (2, 64), 14: (4, 16),
}
_DATATYPES = {pair: dtype for dtype, pair in _CODES.items()}


cdef void _delete(DLManagedTensor* managed) noexcept with gil:
    owner = <object>managed.manager_ctx
    free(managed.dl_tensor.shape)
    free(managed)
    Py_DECREF(owner)


cdef void _drop(object capsule) noexcept:
    """Destructor of a capsule: frees its structure if nobody has consumed it."""
    cdef DLManagedTensor* managed
    if PyCapsule_IsValid(capsule, b"dltensor"):
        managed = <DLManagedTensor*>PyCapsule_GetPointer(capsule, b"dltensor")
        if managed.deleter != NULL:
            managed.deleter(managed)


def export(Tensor tensor not None):
    """A capsule for the tensor's memory, without a copy. Raises InvalidArgument for BYTES tensors."""
    cdef DLManagedTensor* managed
    cdef Py_ssize_t i, rank = len(tensor.shape)
    pair = _CODES.get(tensor.dtype)
    if pair is None:
        raise InvalidArgument(f"tensor '{tensor.name}' holds strings, which DLPack cannot express")
    managed = <DLManagedTensor*>calloc(1, sizeof(DLManagedTensor))
    if managed == NULL:
        raise MemoryError
    managed.dl_tensor.shape = <int64_t*>calloc(max(rank, 1), sizeof(int64_t))
    if managed.dl_tensor.shape == NULL:
        free(managed)
        raise MemoryError
    for i in range(rank):
        managed.dl_tensor.shape[i] = tensor.shape[i]
    managed.dl_tensor.data = <void*>tensor.ptr
    managed.dl_tensor.device.device_type = CUDA if tensor.memory_kind == GPU_MEMORY else 1
    managed.dl_tensor.device.device_id = <int32_t>tensor.memory_id
    managed.dl_tensor.ndim = <int32_t>rank
    managed.dl_tensor.dtype.code = pair[0]
    managed.dl_tensor.dtype.bits = pair[1]
    managed.dl_tensor.dtype.lanes = 1
    managed.deleter = _delete
    managed.manager_ctx = <void*>tensor
    Py_INCREF(tensor)
    return PyCapsule_New(managed, b"dltensor", _drop)


cdef class Imported:
    """Owns the structure, and with it the memory, of an imported tensor."""

    cdef DLManagedTensor* managed

    def __dealloc__(self):
        if self.managed != NULL and self.managed.deleter != NULL:
            self.managed.deleter(self.managed)


def device_of(capsule) -> tuple:
    # type: (object) -> tuple[int, int]
    """(device type, device id) of a capsule that was not consumed. Raises InvalidArgument."""
    cdef DLManagedTensor* managed = _managed(capsule)
    return managed.dl_tensor.device.device_type, managed.dl_tensor.device.device_id


cdef DLManagedTensor* _managed(capsule) except NULL:
    if not PyCapsule_IsValid(capsule, b"dltensor"):
        raise InvalidArgument("expected a DLPack capsule that has not been consumed")
    return <DLManagedTensor*>PyCapsule_GetPointer(capsule, b"dltensor")


def take(str name not None, capsule):
    # type: (..., object) -> Tensor
    """A Tensor over the memory of a capsule, which is consumed by this. Raises InvalidArgument."""
    cdef DLManagedTensor* managed = _managed(capsule)
    cdef DLTensor* t = &managed.dl_tensor
    cdef Imported owner
    cdef int64_t count = 1
    cdef int i
    cdef bint empty = False     # without elements strides mean nothing, and each library has its own
    dtype = _DATATYPES.get((t.dtype.code, t.dtype.bits)) if t.dtype.lanes == 1 else None
    if dtype is None:
        raise InvalidArgument(
            f"tensor '{name}': DLPack type {t.dtype.code} with {t.dtype.bits} bits and {t.dtype.lanes} lanes has no "
            "datatype here")
    for i in range(t.ndim):
        empty = empty or t.shape[i] == 0
    for i in reversed(range(t.ndim)):
        if t.strides != NULL and not empty and t.shape[i] > 1 and t.strides[i] != count:
            raise InvalidArgument(f"tensor '{name}' is not contiguous; make it so before from_dlpack")
        count = times(count, t.shape[i])
    if count < 0:
        raise InvalidArgument(f"tensor '{name}' has the shape {[t.shape[i] for i in range(t.ndim)]}, which is impossible")
    owner = Imported.__new__(Imported)
    owner.managed = managed
    PyCapsule_SetName(capsule, b"used_dltensor")
    shape = tuple([t.shape[i] for i in range(t.ndim)])
    kind = 2 if t.device.device_type == CUDA else 0
    return tensor_at(name, dtype, shape, <size_t>t.data + t.byte_offset, count * element_size(dtype), owner, kind,
                     t.device.device_id)
