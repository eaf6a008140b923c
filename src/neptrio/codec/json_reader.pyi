# The types of cext/codec/json_reader.pyx, which says what everything does; written by tools/make_stubs.py.
from collections.abc import Callable, Container
from typing import Any

from typing_extensions import Buffer

from neptrio.errors import InvalidArgument

class SyntaxRefused(InvalidArgument): ...

def kind_error(what: object, got: str, wanted: str) -> InvalidArgument: ...
def missing(key: str) -> InvalidArgument: ...
def too_long(key: str, name: str) -> InvalidArgument: ...
def too_many(things: str, where: str, most: int) -> InvalidArgument: ...

class Reader: ...

class ArrayText:
    @property
    def text(self) -> memoryview: ...
    @property
    def count(self) -> int: ...

class Stop:
    def ask(self) -> None: ...

def load(
    data: Buffer,
    repeated: list[str] | None = None,
    large: bool = False,
    as_text: Container[str] | None = None,
    reserve: Callable[[int], None] | None = None,
    bounded: bool = False,
) -> Any: ...
