"""Tensors of Python models: inputs as numpy views, outputs taken over without a copy.

The problem: a model may write to its inputs and may keep a reference to the array it returned,
and both times somebody else may be reading the same memory. Copying always would be safe and
slow.

Rules:
 1. An input is given as a writable view when nobody but the request can see its memory: the
    owner is the message or body it came in, or what was read of a shared memory region. Otherwise
    (another request's tensor) the model gets a copy of its own.
 2. An output is taken without a copy when the response, its tensor and its array are referenced
    by nobody but the response list, all the way down to the array that owns the memory, or to
    an input view. Everything else is copied: the model may write to it again. How many references that makes is a
    matter of the compiler's and the interpreter's version, and of the functions on the way, so it is not written down but
    measured (measure()).
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo

from neptrio.request.file_part cimport FilePart
from neptrio.request.infer_request cimport Tensor

import numpy as np

from neptrio import datatypes
from neptrio.request.numpy_tensor import join_bytes, to_numpy
from triton_python_backend_utils._request import InferenceResponse
from triton_python_backend_utils._tensor import Tensor as PythonTensor

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(object)

cdef object _ndarray = np.ndarray
cdef dict _NUMPY = datatypes.NUMPY
cdef object _frombuffer = np.frombuffer


@cython.freelist(64)
cdef class InputView:
    """The writable buffer behind an input's array; keeps the tensor alive."""

    cdef Tensor tensor
    cdef bint readonly

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void*>self.tensor.ptr, self.tensor.nbytes, self.readonly, flags)


cpdef bint private(Tensor tensor):
    """True when only the request that holds the tensor can see its memory (rule 1)."""
    owner = tensor.owner
    if type(owner) is memoryview:
        owner = (<object>owner).obj
    return type(owner) is bytes or type(owner) is bytearray or type(owner) is FilePart


cdef object _view(Tensor tensor, bint readonly):
    if tensor.dtype == 13:
        return to_numpy(tensor)
    dtype = _NUMPY[tensor.dtype]
    if tensor.nbytes == 0:
        return np.empty(tensor.shape, dtype)
    cdef InputView view = InputView.__new__(InputView)
    view.tensor = tensor
    view.readonly = readonly
    array = _frombuffer(view, dtype)
    if len(tensor.shape) != 1:
        array = array.reshape(tensor.shape)
    return array


def writable(Tensor tensor not None):
    # type: (...) -> np.ndarray[Any, Any]
    """A writable array over the tensor's own memory (string tensors: a new array)."""
    return _view(tensor, False)


def readonly(Tensor tensor not None):
    # type: (...) -> np.ndarray[Any, Any]
    """A read-only array over the tensor's memory (string tensors: a new array)."""
    return _view(tensor, True)


def copied(Tensor tensor not None):
    # type: (...) -> np.ndarray[Any, Any]
    """An array of its own with the tensor's elements."""
    return to_numpy(tensor) if tensor.dtype == 13 else _view(tensor, True).copy()


cdef struct Sole:
    # how many references there are, here, to what belongs to a response and to nobody else
    Py_ssize_t response
    Py_ssize_t tensors
    Py_ssize_t tensor
    Py_ssize_t array
    Py_ssize_t base

cdef Sole _most
cdef bint _measuring = False


def measure(object answer not None):
    # type: (Callable[[Callable[[], list[Any]]], object]) -> None
    """Counts the references to what nobody else has: `answer(execute)` takes what execute() returns the way
    that models' responses go, to outputs(). Before the first model runs; until then everything is copied."""
    global _measuring
    _measuring = True
    try:
        answer(_specimen)
    finally:
        _measuring = False


def _specimen():
    array = np.zeros(2, np.uint8)[:1]
    return [InferenceResponse([PythonTensor("", array)])]


cdef bint _exclusive(object array):
    """True when nobody but its tensor has `array`, and nobody shares the memory below it (rule 2)."""
    if _measuring:
        _most.array = Py_REFCNT(array)
    if Py_REFCNT(array) > _most.array:
        return False
    base = array.base
    while base is not None:
        if type(base) is InputView or type(base) is bytes:
            return True
        if _measuring:
            _most.base = Py_REFCNT(base)
        if type(base) is not _ndarray or Py_REFCNT(base) > _most.base:  # the array below's `base` and ours
            return False
        base = base.base
    return True


def take(str name, int dtype, object holder, bint sole):
    # type: (..., ..., ..., ...) -> Tensor
    """An output tensor over holder._array, copied unless rule 2 allows to take it as it is.

    `sole` says that holder itself is referenced by nobody else.
    """
    array = holder._array
    if type(array) is not _ndarray:
        array = np.asarray(array)
        sole = False
    cdef tuple shape = array.shape
    if dtype == 13:
        return Tensor(name, dtype, shape, join_bytes(array.reshape(-1).tolist()))
    wanted = _NUMPY[dtype]
    if array.dtype != wanted or not array.flags.c_contiguous:
        array = array.astype(wanted, order="C")
    elif not sole or not _exclusive(array):
        array = array.copy()
    if array.nbytes == 0:
        return Tensor(name, dtype, shape, b"")
    return Tensor(name, dtype, shape, array.reshape(-1).view(_UINT8))


_UINT8 = np.uint8


def outputs(object response, names, bint sole):
    # type: (..., Collection[str] | None, ...) -> list[Tensor]
    """The output tensors of a model's response that are called for (all when `names` is None).

    `sole` says that the caller and those above it have the only references besides that of the list: as many as
    measure() has found.
    """
    cdef list made = []
    cdef list tensors = response._tensors
    if _measuring:
        _most.response, _most.tensors = Py_REFCNT(response), Py_REFCNT(tensors)
    sole = sole and Py_REFCNT(response) <= _most.response and Py_REFCNT(tensors) <= _most.tensors
    for tensor in tensors:
        if _measuring:
            _most.tensor = Py_REFCNT(tensor)
        if names is None or tensor._name in names:
            if tensor._array is None and not tensor.is_cpu():
                made.append(tensor._source.renamed(tensor._name))
                continue
            if tensor._array is None:
                tensor._array = tensor.as_numpy()
            made.append(take(tensor._name, tensor._dtype, tensor, sole and Py_REFCNT(tensor) <= _most.tensor))
    return made


def as_configured(object request, list tensors):
    # type: (InferRequest, list[Tensor] | None) -> bool
    """Whether the outputs are those that the client named, or else all that the configuration has, each once, of its datatypes
    and numbers of dimensions. True as well for an answer without data of a decoupled model."""
    cdef Tensor tensor
    cdef tuple expected
    cdef dict types
    cdef Py_ssize_t found = 0
    types = getattr(request.model, "output_types", None)  # tests have models that know none
    if types is None or tensors is None or (not tensors and request.model.decoupled):
        return True
    for tensor in tensors:
        expected = types.get(tensor.name)
        if expected is None:
            if tensor.name not in request.model.state_outputs:
                return False
            continue
        found += 1
        if tensor.dtype != <int>expected[0] or (
                <int>expected[1] >= 0 and len(tensor.shape) != <int>expected[1]):
            return False
    if found < (len(types) if request.outputs is None else len(request.outputs)):
        return False
    return len(tensors) == 1 or distinct(tensors)


cdef bint distinct(list tensors) except -1:
    """Whether no two of them have one name."""
    cdef Py_ssize_t i, j
    if len(tensors) > 4:
        return len({(<Tensor>tensor).name for tensor in tensors}) == len(tensors)
    for i in range(1, len(tensors)):
        for j in range(i):
            if (<Tensor>tensors[i]).name == (<Tensor>tensors[j]).name:
                return False
    return True
