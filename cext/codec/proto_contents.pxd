# Tensor data in the typed fields of a ModelInferRequest (InferTensorContents), as a tensor's raw bytes.
from neptrio.codec.protobuf cimport Slice

# None for a tensor without data. `stop` may be NULL; Cancelled is raised when it becomes other than 0. `reserve` is
# called with the number of bytes before so many are allocated; it may be None.
cdef bytes read_contents(Slice contents, int dtype, str name, str model, const int* stop, object reserve)
