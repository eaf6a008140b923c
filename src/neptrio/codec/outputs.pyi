# The types of cext/codec/outputs.pyx, which says what everything does.

from neptrio.codec.shared_memory import WithSharedMemory
from neptrio.request.infer_request import InferRequest, InferResponse

def selects_slowly(request: InferRequest, response: InferResponse) -> bool: ...
def select(request: InferRequest, response: InferResponse, services: WithSharedMemory) -> None: ...
