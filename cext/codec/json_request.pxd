# Infer requests in JSON: see json_request.pyx.
from neptrio.codec.json_reader cimport Stop
from neptrio.request.infer_request cimport InferRequest

cpdef bint decode_request(InferRequest r, body, header_length=*, shared_memory=*, Stop stop=*, binary=*, reserve=*) except -1
