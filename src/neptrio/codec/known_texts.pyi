# The types of cext/codec/known_texts.pyx, which says what everything does.

class Known:
    @property
    def binary_default(self) -> bool: ...

class KnownTexts:
    def __init__(self) -> None: ...
    @property
    def found(self) -> int: ...
