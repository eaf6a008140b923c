"""Whatever compiled code writes through a pointer, it knows where the room ends: read from the signatures in cext/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CEXT = Path(__file__).resolve().parents[2] / "cext"
FUNCTION = re.compile(
    r"^[ ]*(?:cdef|cpdef) (?!class|extern|enum|struct|union)[^\n(=]*?(\w+)\(([^()]*(?:\([^()]*\)[^()]*)*)\)",
    re.M,
)
# a place that is written through: bytes that are not const, and arrays of headers
PLACE = re.compile(r"^(?:unsigned char|char|uint8_t|nghttp2_nv)\s?\*\s?\w")
# what says where it ends: its end, or how many bytes (or headers) it has
END = re.compile(r"\b(?:end|limit|room|size|n|nbytes|length)$")
# functions whose places end where their types say so, each with the reason
FIXED = {
    "_double": "PRINT_ROOM bytes, which print_double() has compared",
    "digits_backwards": "an array of 48 characters, its callers' own",
    "eight": "eight characters, of a room that its callers have compared",
    "_element": "json_tensor: one element, of a block of `count` elements that _fill() counts",
    "decoded": "3 bytes for each of `quads` groups",
    "wrote": "json_writer: it writes nothing, but compares where writing ended",
    "copy": "rings: the `used` bytes that were taken from the area for this packet",
    "copy_offering": "as copy()",
}


def writers(text: str) -> list[tuple[str, list[str]]]:
    """(name, parameters) of each function that has a parameter to write through."""
    found = []
    for name, inside in FUNCTION.findall(text):
        parameters = [" ".join(one.split()) for one in inside.split(",")]
        if any(PLACE.match(one) for one in parameters):
            found.append((name, parameters))
    return found


def boundless(text: str) -> list[str]:
    """The names of those that take no end."""
    return [name for name, parameters in writers(text) if not any(END.search(one) for one in parameters)]


@pytest.mark.parametrize(
    "source", sorted(CEXT.rglob("*.p[yx][xd]")), ids=lambda path: str(path.relative_to(CEXT))
)
def test_every_writer_takes_the_end_of_its_room(source: Path) -> None:
    without = [name for name in boundless(source.read_text()) if name not in FIXED]
    assert not without, f"{source.relative_to(CEXT)}: {without} write through a pointer without its end"


def test_the_exceptions_are_still_there() -> None:
    seen = {name for source in CEXT.rglob("*.p[yx][xd]") for name in boundless(source.read_text())}
    assert seen >= FIXED.keys()


def test_what_is_found() -> None:
    """Otherwise the test above could not fail."""
    assert boundless("cdef char* put(char* out, double value) noexcept nogil:\n") == ["put"]
    assert boundless(
        "cdef inline int put(self, const char* p,\n             uint8_t* target) except -1:\n"
    ) == ["put"]
    assert boundless("cdef char* put(char* out, char* end, double value) noexcept nogil:\n") == []
    assert writers("cdef int read(const char* p, Py_ssize_t* at):\n") == []


def test_text_is_printed_by_the_bounded_functions() -> None:
    """C's own functions that print without knowing any room are used nowhere."""
    for source in CEXT.rglob("*.p[yx][xd]"):
        assert not re.search(r"\b(?:sprintf|vsprintf|strcpy|strcat|stpcpy|gets)\(", source.read_text()), (
            source
        )
