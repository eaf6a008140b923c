# The engine's end of the way to one front end.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from neptrio.execution.admission cimport Admission
from neptrio.frontend.channel cimport FrontChannel
from neptrio.frontend.slow_inputs cimport SlowInputs
from neptrio.request.infer_request cimport InferRequest, InferResponse, Responder, Tensor

cdef class Open:
    """A request of the front end that is not answered."""

    cdef EngineSide end
    cdef uint64_t id
    cdef object key                  # the same as an object
    cdef uint32_t flags              # of its message
    cdef dict left                   # what of its inputs a worker takes up (slow_inputs); None: nothing
    cdef int64_t unread              # bytes of responses for which the client's connection has no room yet
    cdef list when_room              # called when there is room again; None: nobody waits
    cdef object client               # what limits of client addresses count it as; None: nothing
    cdef list given                  # [Tensor] as the message had them, if that lies in the front end's memory; else None
    cdef object line                 # deque of responses behind one that a worker classifies; None: none
    cdef bint selected               # the response that is sent is one that a worker has classified

cdef class EngineSide(FrontChannel):
    cdef Admission admission
    cdef object services
    cdef object host
    cdef readonly dict open          # id -> InferRequest  # type: dict[int, InferRequest]
    cdef dict streams                # id -> Stream
    cdef SlowInputs slow             # of the message that is read, and who waits for those of others
    cdef list leaving                # requests whose clients have left, until dispatch()
    cdef readonly int64_t begun      # before the front end was: nothing came earlier
    cdef object loop_pass
    cdef public bint tells_stages    # front ends write an access log
    cdef Responder http
    cdef Responder grpc
    cdef int let_send(self, Open open_) except -1
    cdef int received_request(self, uint64_t id) except -1
    cdef int admit(self, InferRequest request, Open open_) except -1
    cdef int refuse(self, Open open_, InferRequest request, error) except -1
    cdef int read_into(self, InferRequest request, uint32_t flags, Open open_) except -1
    cdef int respond(self, InferRequest request, InferResponse response, bint final) except -1
    cdef bint passes(self, Open open_, Tensor tensor) except -1
    cdef int answer(self, Open open_, InferRequest request, InferResponse response, bint final) except -1
