# The types of cext/codec/json_reader.pyx, which says what everything does.

from collections.abc import Container
from typing import Any

from typing_extensions import Buffer

from neptrio.errors import InvalidArgument

class ArrayText:
    @property
    def text(self) -> memoryview: ...
    @property
    def count(self) -> int: ...

class Reader: ...
class SyntaxRefused(InvalidArgument): ...

def kind_error(what: object, got: str, wanted: str) -> InvalidArgument: ...
def missing(key: str) -> InvalidArgument: ...
def load(
    data: Buffer,
    repeated: list[str] | None = ...,
    large: bool = ...,
    as_text: Container[str] | None = ...,
) -> Any: ...

class Stop:
    def ask(self) -> None: ...
