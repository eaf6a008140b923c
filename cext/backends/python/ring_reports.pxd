# What a model's process reports of its statistics, and what waits to be counted. Used on the trio thread.
from libc.stdint cimport uint64_t

from neptrio.backends.python.ring_sender cimport RingSender
from neptrio.execution.batch cimport Batch
from neptrio.observe.counters cimport ModelCounters
from neptrio.request.infer_request cimport InferRequest

cdef class ReportedSide(RingSender):
    cdef readonly dict open          # request id -> InferRequest that a sender answers  # type: dict[int, InferRequest]
    cdef readonly dict uncounted     # request id -> Stated: rule 1  # type: dict[int, Stated]
    cdef readonly dict measured      # batch's number -> [(batch size, three durations)]: rule 2  # type: dict[int, list[tuple[int, ...]]]
    cdef ModelCounters counters      # of the model, once a batch was sent
    cdef InferRequest find(self, uint64_t id)
    cdef int await_report(self, uint64_t id, InferRequest request) except -1
    cdef int count_the_rest(self) except -1
    cdef int measured_here(self, uint64_t number, Batch batch) except -1
    cdef list stated(self, uint64_t number)
    cdef int executed_before(self, uint64_t number, tuple row) except -1
    cdef int activity(self, uint64_t id) except -1
    cdef int reported(self, uint64_t place) except -1
