# The types of cext/rings/packet.pyx, which says what everything does; written by tools/make_stubs.py.

class MessageWriter:
    @property
    def used(self) -> int: ...
    @property
    def data(self) -> int: ...
