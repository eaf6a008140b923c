# The types of cext/backends/python/ring_reader.pyx, which says what everything does; written by tools/make_stubs.py.
from neptrio.rings.channel import Channel

class AnswerReader(Channel):
    @property
    def copied(self) -> int: ...
    @property
    def in_place(self) -> int: ...

class GivenBlock: ...
