# ModelInferResponse messages: see proto_response.pyx.
from neptrio.request.infer_request cimport InferResponse

cpdef list encode_response(InferResponse response, bint streamed=*, bint final=*)
