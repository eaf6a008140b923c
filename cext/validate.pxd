from neptrio._cext.request cimport InferRequest, ModelCore

cpdef validate(InferRequest r, ModelCore m)
