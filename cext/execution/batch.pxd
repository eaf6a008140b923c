# A batch: the requests that one execution of a model instance works on. Made on the trio thread, executed on an
# instance's thread (or on the trio thread), finished on the trio thread.
from libc.stdint cimport int64_t
from neptrio.loop.mailbox cimport Work, WorkItem
from neptrio.request.infer_request cimport InferRequest, InferResponse, ModelCore, Responder

cdef class Batch(WorkItem):
    cdef public ModelCore model
    cdef public list requests      # in arrival order  # type: list[InferRequest]
    cdef readonly list submitted   # the requests it was formed with; backends may replace `requests`  # type: list[InferRequest]
    cdef public object instance    # the Instance that executes it
    cdef public list responses     # one for each request, None until the model has answered it  # type: list[InferResponse | None]
    cdef public object error       # when the whole execution failed  # type: TritonError | None
    cdef public int64_t size       # sum of the requests' batch sizes
    cdef public str close_reason   # why the batcher closed it
    cdef public int64_t oldest_wait_ns
    cdef public bint count_execution
    cdef public list executions    # as its backend reports them: (batch size, four times); None: it does not  # type: list[tuple[int, ...]] | None
    cdef public bint fetching      # its inputs must be copied from a device before it is prepared (instance_core)
    cdef public bint copying       # tensors of traces must be copied before its model may write to them (instance_core)
    cdef public bint part          # of what its instance was given together, which goes on with the rest: it is not free yet
    cdef public bint off_loop      # expected to take long: must not run on the trio thread
    cdef public int64_t compute_start
    cdef public int64_t input_end
    cdef public int64_t output_start
    cdef public int64_t compute_end
    cdef int set_up(self, ModelCore model, list requests, str close_reason, int64_t oldest_wait_ns) except -1

cdef class Executor:
    cdef int back(self, Batch batch) except -1

cpdef hand_over(Responder responder, InferRequest request, InferResponse response, bint final)
cpdef complete(InferRequest request, InferResponse response, bint final)
cpdef accept(InferRequest request)
cdef int count_for_owner(InferRequest request) except -1
cdef int uncount(InferRequest request) except -1
cpdef refuse(InferRequest request)
