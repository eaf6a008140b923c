# The front end's end of the way to the engine, and what transports have there in place of the engine's admission.
from libc.stdint cimport int64_t, uint64_t

from neptrio.execution.admission cimport Admission
from neptrio.frontend.channel cimport FrontChannel
from neptrio.request.infer_request cimport InferRequest, InferResponse, ModelCore, Tensor
from neptrio.rings.body_area cimport BodyArea

cdef class Sent:
    """What the front end remembers of a request: request.scheduler_data."""

    cdef uint64_t id                 # 0 until it is sent
    cdef bint one_response
    cdef list bodies                 # [Tensor] that it named where they were received; None: none

cdef class FrontSide(FrontChannel):
    cdef BodyArea received_into      # where large bodies are received
    cdef object _streams             # ends of streams
    cdef readonly dict open          # id -> InferRequest  # type: dict[int, InferRequest]
    cdef InferRequest answering      # whose response is taken
    cdef bint is_last                # that is its final one
    cdef set failed_ones             # requests whose later responses nobody gets
    cdef list named                  # `bodies` of the request whose response is read
    cdef uint64_t number
    cdef public bint tells_clients   # requests of client addresses are limited
    cdef readonly int64_t answered   # requests with a final response, ever
    cdef int send_request(self, InferRequest request) except -1
    cdef bint lies_well(self, Tensor tensor) noexcept
    cdef tuple pairs(self)
    cdef object error(self)

cdef class RemoteAdmission(Admission):
    cdef readonly FrontSide end
    cdef dict models                 # (name, version) -> ModelCore, "" for the latest
    cdef dict versions               # name -> its versions in `models`
    cdef ModelCore unknown
