# The types of cext/request/validate.pyx, which says what everything does.

from neptrio.request.infer_request import InferRequest, ModelCore

def validate(r: InferRequest, m: ModelCore) -> None: ...
