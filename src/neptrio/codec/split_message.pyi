# The types of cext/codec/split_message.pyx, which says what everything does.

from typing import Any

class SplitMessage:
    @property
    def head(self) -> bytes: ...
    @property
    def raws(self) -> list[Any]: ...
    def __len__(self) -> int: ...
