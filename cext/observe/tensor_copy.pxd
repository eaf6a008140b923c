# A traced tensor's elements. Made on the trio thread; make() and omit() may be called by any thread.
from neptrio.request.infer_request cimport Tensor

cdef class TensorCopy:
    cdef readonly str name
    cdef readonly int dtype
    cdef readonly tuple shape        # of the tensor, also where fewer elements are copied  # type: tuple[int, ...]
    cdef readonly Py_ssize_t nbytes  # of the tensor
    cdef readonly Py_ssize_t size    # bytes that are copied: those up to the limit
    cdef readonly bytes raw          # the copy; None before it is made, and where it could not be  # type: bytes | None
    cdef readonly str omitted        # why there is no copy, or None  # type: str | None
    cdef public object text          # what observe.trace_record made of it  # type: tuple[bytes, bytes, bytes] | None
    cdef const char* address         # where the elements lay
    cdef Tensor tensor               # None once they are copied
    cdef object lock                 # held by whoever copies; None once that is done
    cdef bint same(self, Tensor tensor)
