# ModelInferRequest messages: see proto_request.pyx.
from neptrio.codec.json_reader cimport Stop
from neptrio.request.infer_request cimport InferRequest

cpdef int decode_request(InferRequest r, message, shared_memory=*, Stop stop=*, reserve=*) except -1
