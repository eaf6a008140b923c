# A session of ONNX Runtime's C library, and tensors that use memory made by the library.
from libc.stdint cimport int64_t
from neptrio.backends.onnx.api cimport Feed, Status
from neptrio.request.infer_request cimport Tensor

cdef class OnnxTensor(Tensor):
    cdef void* value             # released together with the tensor; `ptr` is its memory, unless that was copied

cdef class OnnxSession:
    cdef void* session
    cdef list keep               # the names as bytes
    cdef readonly tuple inputs        # ValueInfo of each input that every run needs  # type: tuple[ValueInfo, ...]
    cdef readonly tuple initializers  # ValueInfo of each input with a default  # type: tuple[ValueInfo, ...]
    cdef readonly tuple outputs       # ValueInfo  # type: tuple[ValueInfo, ...]
    cdef list feed_names         # str, inputs before initializers; a Feed's slot is an index
    cdef list output_names
    cdef const char** c_feed_names
    cdef int* feed_types         # ONNX's element types
    cdef const char** c_output_names
    cdef int* output_types       # the protocol's datatypes
    cdef int read_signature(self) except -1
    cdef const char* kept(self, str name) except NULL
    cdef object value_info(self, int which, size_t i)

cdef Status make_value(OnnxSession session, Feed* feed, void** value) noexcept nogil
cdef OnnxTensor tensor_of(OnnxSession session, int output, void* value)
cdef int keep_apart(OnnxTensor t, const Feed* feed) except -1
