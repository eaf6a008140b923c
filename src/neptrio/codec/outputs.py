"""What the client asked to be done with the outputs: only some, classified, into shared memory."""

from __future__ import annotations

from typing import Any

from neptrio._cext.request import InferRequest, InferResponse


def select(request: InferRequest, response: InferResponse, services: Any) -> None:
    """Keeps the requested outputs, in the order the backend made them."""
    if request.outputs is None or not response.outputs:
        return
    wanted = {o.name for o in request.outputs}
    if len(wanted) < len(response.outputs) or any(t.name not in wanted for t in response.outputs):
        response.outputs = [t for t in response.outputs if t.name in wanted]
