# The types of cext/backends/python/ring_reader.pyx, which says what everything does; written by tools/make_stubs.py.
from neptrio.rings.message import MessageReader
from neptrio.rings.ring import Segment

class AnswerReader(MessageReader):
    def __init__(self, segment: Segment, outputs: int, outputs_end: int) -> None: ...

class GivenBlock: ...
