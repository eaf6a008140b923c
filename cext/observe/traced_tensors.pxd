# The tensors of one part of a trace. Trio thread only, until the trace is finished; then the writer's.
from libc.stdint cimport int64_t

cdef class TracedTensors:
    cdef readonly list rows          # (activity, number of a decoupled model's response, copy)  # type: list[tuple[str, int, TensorCopy]]
    cdef int64_t add(self, str activity, tensors, int response, Py_ssize_t limit, copier) except -1
    cdef dict queued(self)
