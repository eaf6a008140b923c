# The types of cext/frontend/channel.pyx, which says what everything does.

from collections.abc import Callable

from neptrio.rings.message import MessageReader
from neptrio.rings.ring import Segment

class Layout:
    to_engine: int
    to_front: int
    front_area: int
    engine_area: int
    area: int
    size: int
    def __init__(self, area: int) -> None: ...

class Lease: ...

class Channel(MessageReader):
    def __init__(
        self,
        segment: Segment,
        layout: Layout,
        engine: bool,
        bell: Callable[[], None],
        late: Callable[[], None],
    ) -> None: ...
    def look(self) -> bool: ...
    def comes(self, spin_ns: int) -> bool: ...
    def drain(self, at_once: int = ...) -> bool: ...
    def close(self) -> None: ...
    def statistics(self) -> dict[str, int]: ...
    @property
    def closed(self) -> bool: ...
    @property
    def wakes(self) -> int: ...
    @property
    def received(self) -> int: ...
    @property
    def sent(self) -> int: ...
