# The types of cext/backends/python/ring_reports.pyx, which says what everything does; written by tools/make_stubs.py.
from typing import Any

from neptrio.backends.python.ring_sender import RingSender
from neptrio.observe.stated import Stated
from neptrio.request.infer_request import InferRequest
from neptrio.rings.ring import Segment

class ReportedSide(RingSender):
    @property
    def open(self) -> dict[int, InferRequest]: ...
    @property
    def uncounted(self) -> dict[int, Stated]: ...
    @property
    def measured(self) -> dict[int, list[tuple[int, ...]]]: ...
    def __init__(self, segment: Segment, layout: Any, host: Any) -> None: ...
