# The types of cext/request/validate.pyx, which says what everything does; written by tools/make_stubs.py.
from neptrio.request.infer_request import InferRequest, ModelCore

def validate(r: InferRequest, m: ModelCore) -> None: ...
