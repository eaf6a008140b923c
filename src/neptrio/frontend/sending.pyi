# The types of cext/frontend/sending.pyx, which says what everything does.

from neptrio.loop.loop_pass_core import LoopPassCore
from neptrio.observe.trace import Trace, Tracing

class Awaited:
    @property
    def traces(self) -> dict[int, Trace]: ...

class Sends(Tracing):
    def attach(self, loop_pass: LoopPassCore) -> None: ...
    @property
    def open(self) -> set[int]: ...

class Sending(Trace): ...
