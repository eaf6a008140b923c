from neptrio.request.infer_request cimport InferRequest, ModelCore

cpdef validate(InferRequest r, ModelCore m)
