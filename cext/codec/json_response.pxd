# Infer responses in JSON: see json_response.pyx.
from neptrio.codec.json_reader cimport Stop
from neptrio.request.infer_request cimport InferRequest, InferResponse

cpdef tuple encode_response(InferRequest request, InferResponse response, bint binary_default, bint later=*, Stop stop=*)
