# The types of cext/codec/class_strings.pyx, which says what everything does; written by tools/make_stubs.py.
from typing_extensions import Buffer

def class_strings(values: Buffer, indices: Buffer, kind: str, labels: list[bytes]) -> Buffer: ...
