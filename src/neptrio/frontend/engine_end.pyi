# The types of cext/frontend/engine_end.pyx, which says what everything does.

from collections.abc import Callable
from typing import Any

from neptrio.errors import Code, Reason
from neptrio.frontend.channel import Channel, Layout
from neptrio.frontend.sending import Awaited
from neptrio.request.infer_request import InferRequest, InferResponse, Responder
from neptrio.rings.ring import Segment

CODES: list[Code]
REASONS: list[Reason]

class Open: ...

class FrontResponder(Responder):
    def __init__(self, protocol: int) -> None: ...
    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> Any: ...
    def wait_for_room(self, request: InferRequest, callback: Callable[[], None]) -> bool: ...

class Stream:
    sequences: dict[Any, Any]
    def __init__(self) -> None: ...
    def end(self) -> None: ...

class EngineEnd(Channel):
    def __init__(
        self,
        segment: Segment,
        layout: Layout,
        bell: Callable[[], None],
        late: Callable[[], None],
        services: Any,
        host: Any,
    ) -> None: ...
    def dispatch(self, now_ns: int) -> None: ...
    def cancel(self, request: InferRequest) -> None: ...
    def selected(
        self, request: InferRequest, response: InferResponse, final: bool, error: Exception | None
    ) -> None: ...
    def gone(self) -> None: ...
    @property
    def begun(self) -> int: ...
    @property
    def awaited(self) -> Awaited: ...
    @property
    def open(self) -> dict[int, InferRequest]: ...
    @property
    def under_way(self) -> int: ...
