# The types of cext/frontend/channel.pyx, which says what everything does; written by tools/make_stubs.py.
from collections.abc import Callable

from neptrio.rings.channel import Channel
from neptrio.rings.ring import Segment

class Layout:
    to_engine: int
    to_front: int
    front_area: int
    engine_area: int
    area: int
    bodies: int
    size: int
    def __init__(self, area: int) -> None: ...

class FrontChannel(Channel):
    def __init__(
        self,
        segment: Segment,
        layout: Layout,
        engine: bool,
        bell: Callable[[], None],
        late: Callable[[], None],
    ) -> None: ...
    def close(self) -> None: ...
