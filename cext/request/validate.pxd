from neptrio.request.infer_request cimport InferRequest, ModelCore

cpdef validate(InferRequest r, ModelCore m)

# Walks over the elements of large BYTES tensors, without the GIL, so that validate() need not. For worker threads.
# Stops early when `stop` becomes other than 0.
cdef int walk_strings(list tensors, const int* stop) except -1
