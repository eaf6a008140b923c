# Makes batches for one instance of an ONNX model.
from neptrio.backends.onnx.batch cimport Timing, WorkMemory
from neptrio.backends.onnx.session cimport OnnxSession
from neptrio.request.infer_request cimport InferRequest

cdef class OnnxBuilder:
    cdef str name
    cdef bint batching
    cdef bint on_thread
    cdef OnnxSession session
    cdef list names          # of the inputs that a request may have
    cdef list served_names   # of the outputs in the configuration, and of states
    cdef tuple served        # indices of the outputs in `served_names`
    cdef dict output_index   # name -> index of those outputs
    cdef tuple states        # indices of the outputs that hold a sequence's state
    cdef dict timings
    cdef list last_parts     # the shapes of the previous run, and the Timing found for them
    cdef Timing last_timing
    cdef WorkMemory memory
    cdef tuple wanted(self, list requests, list members)
    cdef list tensors_of(self, InferRequest r)
    cdef Timing timing_of(self, list parts)
    cdef list sort(self, list tensors)
