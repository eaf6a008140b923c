# Batches of ONNX models that execute without the GIL.
from libc.stdint cimport int64_t
from neptrio.execution.batch cimport Batch
from neptrio.loop.mailbox cimport Work
from neptrio.backends.onnx.api cimport Feed, Status
from neptrio.backends.onnx.session cimport OnnxSession

cdef struct Piece:           # one request's part of one input
    const char* source
    size_t nbytes

cdef struct Input:
    Feed feed
    bint copy                # its pieces are copied one after the other into the work memory
    int first_piece
    int n_pieces

cdef struct Run:             # requests that are executed together, usually the whole batch
    int first_input
    int n_inputs
    int first_output
    int n_outputs
    Status status
    char* detached           # work memory in which one of its outputs is, owned by the run

cdef struct WorkMemory:      # where inputs are gathered; grows, never shrinks
    char* at
    size_t size

cdef struct OnnxWork:
    WorkMemory* memory
    Run* runs
    int n_runs
    Input* inputs
    Piece* pieces
    int64_t* dims
    const char** input_names
    void** input_values
    const char** output_names
    int* outputs             # indices of the session's outputs
    void** output_values
    int64_t times[4]

cdef class Timing:           # the mean time of executions with the same shapes and outputs
    cdef readonly double mean_ns

cdef class OnnxBatch(Batch):
    cdef OnnxSession session
    cdef object builder      # the builder, whose work memory it uses
    cdef list members        # for each run: [index of a request]
    cdef list timings        # for each run: its Timing
    cdef OnnxWork c
    cdef object allocate(self, Py_ssize_t requests, Py_ssize_t slots, Py_ssize_t dims, Py_ssize_t outputs)
    cpdef conclude(self)
    cdef int answer(self, Run* run, list members) except -1

cdef void run_onnx(Work* work) noexcept nogil
