# The types of cext/codec/protobuf.pyx, which says what everything does; written by tools/make_stubs.py.
from typing_extensions import Buffer

from neptrio.errors import InvalidArgument

class WireError(InvalidArgument): ...

def well_formed(message: Buffer, most: int = 0) -> None: ...
