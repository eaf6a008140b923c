"""Reads JSON text with a Triton server's rules.

The problem: clients see rapidjson's error texts with their offsets, and send NaN literals, duplicate keys, byte-order
marks and invalid UTF-8; none of the fast JSON libraries for Python follows these rules. The choice: a cursor that walks
over the text once and gives each value to whoever asks for it, without building objects in between. load() builds
them where they are wanted.

Rules:
 1. Errors are rapidjson's texts at rapidjson's offsets (docs/protocol/observed.md 3), and what codec/json_place.py adds.
 2. More than 100 levels of nesting are refused, which also bounds the recursion.
 3. Strings that are not UTF-8 survive a round trip byte for byte (surrogateescape).
 4. Of duplicate keys the first one counts.
 5. NaN, Infinity and -Infinity are numbers.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint64_t
from libc.string cimport memcmp

from neptrio.codec.json_strings cimport decoded, hex4
from neptrio.codec.number_text cimport (
    NUMBER_EXPONENT,
    NUMBER_FRACTION,
    NUMBER_HUGE,
    NUMBER_INTEGER,
    NUMBER_INVALID,
    NUMBER_OK,
    Number,
    parse_number,
)

from neptrio import limits
from neptrio.codec.json_place import LOOKED_AT, place
from neptrio.errors import Cancelled, InvalidArgument
from neptrio.limits import shown

cdef Py_ssize_t MOST_DIMENSIONS = limits.MOST_DIMENSIONS
cdef Py_ssize_t LONGEST_NAME = limits.LONGEST_NAME
cdef Py_ssize_t MOST_VALUES = limits.MOST_VALUES

cdef enum:
    LONG_BYTES = 64 << 10    # reading more takes longer than waiting for the GIL
    # inputs or parameters between two calls that let other threads run: a fraction of a millisecond
    STEPS = 256
    # what load() makes is counted: an element with its object, and so many bytes at once
    ELEMENT_BYTES = 96
    COUNTED_BYTES = 1 << 20


class SyntaxRefused(InvalidArgument):
    """The text is not valid JSON."""


def kind_error(what, got, wanted):
    # type: (object, str, str) -> InvalidArgument
    """The error `Unable to parse 'x': attempt to access JSON non-a as b`."""
    return InvalidArgument(f"Unable to parse '{what}': attempt to access JSON non-{got} as {wanted}")


def out_of_range(what, kind, value):
    # type: (object, str, object) -> InvalidArgument
    """The error for a value that is no unsigned integer of 64 bits: kind_error(), which for a number names the range."""
    error = kind_error(what, kind, kind)
    if type(value) is not int:
        return error
    # Python prints no number of more than 4,300 digits
    got = shown(str(value)) if value.bit_length() < 4096 else f"a number of {value.bit_length()} bits"
    return InvalidArgument(f"{error}, expected 0 to {(1 << 64) - 1}, got: {got}")


def missing(str key):
    # type: (...) -> InvalidArgument
    """The error for a document without the member `key`."""
    return InvalidArgument(
        f"Unable to parse '{key}': attempt to access non-existing object member '{key}'")


def too_long(str key, str name):
    # type: (..., ...) -> InvalidArgument
    """The error for the name of a model, tensor, region or parameter that nothing can have."""
    return InvalidArgument(f"'{key}' has {len(name)} characters, the most is {LONGEST_NAME}: '{shown(name)}'")


def too_many(str things, str where, Py_ssize_t most):
    # type: (..., ..., ...) -> InvalidArgument
    """The error for a list with more elements than it may have."""
    return InvalidArgument(f"'{where}' has more than {most} {things}, which is the most that are allowed")


cdef inline bint _enter(Reader s, int close) noexcept nogil:
    """Moves past an opening bracket. Returns False, and moves past `close` too, when nothing is between them."""
    s.at += 1
    s.space()
    if s.peek() == close:
        s.at += 1
        return False
    return True


cdef inline bint _more(Reader s, int close, const char* missing_comma) except -1 nogil:
    """Moves past a comma. Returns False, and moves past `close`, when that comes instead."""
    cdef int c
    s.space()
    c = s.peek()
    if c == b",":
        s.at += 1
        s.space()
        return True
    if c != close:
        s.fail(missing_comma, s.at)
    s.at += 1
    return False


cdef class Reader:
    """See json_reader.pxd."""

    cdef int fail(self, const char* reason, Py_ssize_t at) except -1 nogil:
        with gil:
            text = (<bytes>reason).decode("ascii")
            begin = (<const char*>self.text)[:min(self.end, at + 1, LOOKED_AT + 2)]
            raise SyntaxRefused(f"failed to parse the request JSON buffer: {text} at {at}{place(begin, at)}")

    cdef int breathe(self) except -1:
        if self.stop != NULL and self.stop[0]:
            return self.stopped()
        self.steps += 1
        if self.steps >= STEPS:
            self.steps = 0
            with nogil:
                pass
        return 0

    cdef int stopped(self) except -1 nogil:
        with gil:
            raise Cancelled()

    cdef int too_deep(self) except -1 nogil:
        with gil:
            return self.fail(f"Nesting deeper than {MAX_DEPTH} levels.".encode(), self.at)

    cdef int begin(self) except -1:
        if self.end >= 3 and memcmp(self.text, b"\xef\xbb\xbf", 3) == 0:
            self.at = 3
        self.space()
        if self.at >= self.end:
            self.fail("The document is empty.", self.at)
        return 0

    cdef int finish(self) except -1:
        self.space()
        if self.at < self.end:
            self.fail("The document root must not be followed by other values.", self.at)
        return 0

    cdef int _member(self) except -1 nogil:
        cdef Py_ssize_t start = self.at + 1
        if self.peek() != b'"':
            self.fail("Missing a name for object member.", self.at)
        self.skip_string(&self.name_escaped)
        self.name = self.text + start
        self.name_length = self.at - 1 - start
        self.space()
        if self.peek() != b":":
            self.fail("Missing a colon after a name of object member.", self.at)
        self.at += 1
        self.space()
        return 0

    cdef bint first_member(self) except -1 nogil:
        if not _enter(self, b"}"):
            return False
        self._member()
        return True

    cdef bint next_member(self) except -1 nogil:
        if not _more(self, b"}", "Missing a comma or '}' after an object member."):
            return False
        self._member()
        return True

    cdef bint first_element(self) except -1 nogil:
        return _enter(self, b"]")

    cdef bint next_element(self) except -1 nogil:
        return _more(self, b"]", "Missing a comma or ']' after an array element.")

    cdef bint named(self, const char* name, Py_ssize_t n) noexcept:
        if self.name_escaped:
            return self.name_text().encode("utf-8", "surrogateescape") == name[:n]
        return self.name_length == n and memcmp(self.name, name, n) == 0

    cdef str name_text(self):
        return decoded(self.name, self.name_length, self.name_escaped)

    cdef int skip(self, int depth) except -1 nogil:
        cdef int c = self.peek()
        cdef bint escaped
        cdef Number number
        if c == b'"':
            return self.skip_string(&escaped)
        if c == b"{" or c == b"[":
            if depth >= MAX_DEPTH:
                self.too_deep()
            if c == b"{":
                if self.first_member():
                    self.skip(depth + 1)
                    while self.next_member():
                        self.skip(depth + 1)
            elif self.first_element():
                self.skip(depth + 1)
                while self.next_element():
                    self.skip(depth + 1)
            return 0
        if c == b"t":
            return self._word(b"true", 4)
        if c == b"f":
            return self._word(b"false", 5)
        if c == b"n":
            return self._word(b"null", 4)
        return self.number(&number)

    cdef int leaves(self, Py_ssize_t* count, int depth) except -1 nogil:
        if self.peek() != b"[":
            count[0] += 1
            return self.skip(depth)
        if depth >= MAX_DEPTH:
            self.too_deep()
        if self.first_element():
            self.leaves(count, depth + 1)
            while self.next_element():
                self.leaves(count, depth + 1)
        return 0

    cdef ArrayText array_text(self):
        cdef ArrayText made = ArrayText.__new__(ArrayText)
        cdef Py_ssize_t start = self.at
        if self.large and self.end - self.at > LONG_BYTES:
            with nogil:
                self.leaves(&made.count, 1)
        else:
            self.leaves(&made.count, 1)
        made.text = self.whole[start:self.at]
        return made

    cdef int skip_value(self, int depth) except -1:
        cdef int c = self.peek()
        if self.large and self.end - self.at > LONG_BYTES and (c == b"[" or c == b"{"):
            with nogil:
                self.skip(depth)
            return 0
        return self.skip(depth)

    cdef int _word(self, const char* word, Py_ssize_t n) except -1 nogil:
        cdef Py_ssize_t i
        for i in range(n):
            if self.peek() != word[i]:
                self.fail("Invalid value.", self.at)
            self.at += 1
        return 0

    cdef int number(self, Number* out) except -1 nogil:
        cdef const unsigned char* start = self.text + self.at
        cdef const unsigned char* stop = parse_number(start, self.text + self.end, out)
        if out.error != NUMBER_OK:
            if out.error == NUMBER_INVALID:
                self.fail("Invalid value.", stop - self.text)
            if out.error == NUMBER_FRACTION:
                self.fail("Miss fraction part in number.", stop - self.text)
            if out.error == NUMBER_EXPONENT:
                self.fail("Miss exponent in number.", stop - self.text)
            self.fail("Number too big to be stored in double.", self.at)
        self.at = stop - self.text
        return 0

    cdef int skip_string(self, bint* escaped) except -1 nogil:
        cdef Py_ssize_t at = self.at + 1, escape
        cdef unsigned char c
        cdef int code
        escaped[0] = False
        while True:
            at = past_ordinary(self.text + at, self.text + self.end) - self.text
            if at >= self.end:
                break
            c = self.text[at]
            if c == b'"':
                self.at = at + 1
                return 0
            if c == b"\\":
                escaped[0] = True
                escape = at
                c = self.text[at + 1] if at + 1 < self.end else 0
                if c == b"u":
                    code = hex4(self.text + at + 2) if at + 6 <= self.end else -1
                    if code < 0:
                        self.fail("Incorrect hex digit after \\u escape in string.", escape)
                    at += 6
                    if 0xD800 <= code <= 0xDFFF:
                        if code > 0xDBFF or at + 2 > self.end or memcmp(self.text + at, b"\\u", 2) != 0:
                            self.fail("The surrogate pair in string is invalid.", escape)
                        code = hex4(self.text + at + 2) if at + 6 <= self.end else -1
                        if code < 0:
                            self.fail("Incorrect hex digit after \\u escape in string.", escape)
                        if not 0xDC00 <= code <= 0xDFFF:
                            self.fail("The surrogate pair in string is invalid.", escape)
                        at += 6
                    continue
                if c == b'"' or c == b"\\" or c == b"/" or c == b"b" or c == b"f" or c == b"n" or c == b"r" \
                        or c == b"t":
                    at += 2
                    continue
                self.fail("Invalid escape character in string.", escape)
            if c == 0:
                break
            self.fail("Invalid encoding in string.", at)
        return self.fail("Missing a closing quotation mark in string.", at)

    cdef str string(self):
        cdef Py_ssize_t start = self.at + 1
        cdef bint escaped
        self.skip_string(&escaped)
        return decoded(self.text + start, self.at - 1 - start, escaped)

    cdef int built(self, Py_ssize_t size) except -1:
        self.made += size
        if self.made >= COUNTED_BYTES:
            size, self.made = self.made, 0
            self.reserve(size)
        return 0

    cdef object value(self, int depth):
        cdef int c = self.peek()
        cdef Number n
        cdef Py_ssize_t start
        cdef dict members
        cdef list items
        cdef str name
        cdef Py_ssize_t begin = self.at
        if self.bounded:
            self.values += 1
            if self.values > MOST_VALUES:
                raise too_many("values", "the document", MOST_VALUES)
        if c == b'"':
            name = self.string()
            if self.counts:
                self.built(ELEMENT_BYTES + self.at - begin)
            return name
        if self.counts:
            self.built(ELEMENT_BYTES)
        if c == b"{" or c == b"[":
            if depth >= MAX_DEPTH:
                self.too_deep()
            if c == b"{":
                members = {}
                if self.first_member():
                    while True:
                        name = self.name_text()
                        if self.counts:
                            self.built(ELEMENT_BYTES + self.name_length)
                        if depth == 0 and self.as_text is not None and self.peek() == b"[" and name in self.as_text:
                            item = self.array_text()
                        else:
                            item = self.value(depth + 1)
                        if self.large:
                            self.breathe()
                        if name not in members:
                            members[name] = item
                        elif depth == 0 and self.repeated is not None:
                            self.repeated.append(name)
                        if not self.next_member():
                            break
                return members
            items = []
            if self.first_element():
                items.append(self.value(depth + 1))
                while self.next_element():
                    items.append(self.value(depth + 1))
                    if self.large:
                        self.breathe()
            return items
        if c == b"t":
            self._word(b"true", 4)
            return True
        if c == b"f":
            self._word(b"false", 5)
            return False
        if c == b"n":
            self._word(b"null", 4)
            return None
        start = self.at
        self.number(&n)
        if n.kind == NUMBER_INTEGER:
            return -<object>n.magnitude if n.negative else n.magnitude
        if n.kind == NUMBER_HUGE:
            return int((<const char*>self.text)[start:self.at])
        return n.real

    # ------------------------------------------------------------ values of a known kind

    cdef str string_at(self, Py_ssize_t at, str key):
        if at < 0:
            raise missing(key)
        self.at = at
        if self.peek() != b'"':
            raise kind_error(key, "string", "string")
        return self.string()

    cdef str name_at(self, Py_ssize_t at, str key):
        cdef str name = self.string_at(at, key)
        if len(name) > LONGEST_NAME:
            raise too_long(key, name)
        return name

    cdef uint64_t unsigned(self, str key, str verb="parse") except? 0xFFFFFFFFFFFFFFFF:
        cdef Number n
        cdef int c = self.peek()
        if c == b"-" or 48 <= c <= 57:
            self.number(&n)
            if n.kind == NUMBER_INTEGER and (not n.negative or n.magnitude == 0):
                return n.magnitude
        raise InvalidArgument(
            f"Unable to {verb} '{key}': attempt to access JSON non-unsigned-integer as unsigned-integer")

    cdef bint boolean(self, str key) except -1:
        cdef int c = self.peek()
        if c != b"t" and c != b"f":
            raise kind_error(key, "boolean", "boolean")
        self.skip(0)
        return c == b"t"

    cdef tuple shape_at(self, Py_ssize_t at):
        cdef list dims = []
        cdef uint64_t d
        if at < 0:
            raise missing("shape")
        self.at = at
        if self.peek() != b"[":
            raise kind_error("shape", "array", "array")
        if self.first_element():
            while True:
                d = self.unsigned("shape")
                if d > 0x7FFFFFFFFFFFFFFF:
                    raise InvalidArgument(f"Unable to parse 'shape': {d} is out of range [0, 9223372036854775807]")
                if len(dims) == MOST_DIMENSIONS:
                    raise too_many("dimensions", "shape", MOST_DIMENSIONS)
                dims.append(d)
                if not self.next_element():
                    break
        return tuple(dims)


cdef class ArrayText:
    """The text of a JSON array."""


cdef class Stop:
    """Ends reading or printing on another thread."""

    def ask(self):
        """Nobody waits for the request any more."""
        self.asked = 1


def load(data, list repeated=None, bint large=False, as_text=None, reserve=None, bint bounded=False):
    # type: (Buffer, list[str] | None, ..., Container[str] | None, Callable[[int], None] | None, ...) -> Any
    """Parses a JSON document into Python objects. Raises SyntaxRefused (an InvalidArgument).

    Names that the document's outermost object has more than once are appended to `repeated`. With `large` this is
    called on a worker's thread, and lets other threads run in between. Arrays of the outermost object's members that
    are in the container `as_text` become ArrayText, without objects for their elements. `reserve(bytes)` is called before
    about so many are allocated for objects, a mebibyte at a time; load() raises what it raises. With `bounded`
    a document with more than MOST_VALUES values raises InvalidArgument: taking millions of objects apart stops the loop.
    """
    cdef Py_buffer view
    cdef Reader r = Reader()
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if view.len == 0:
            r.fail("The document is empty.", 0)
        r.text = <const unsigned char*>view.buf
        r.end = view.len
        r.repeated = repeated
        r.large = large
        r.bounded = bounded
        if as_text is not None:
            r.as_text = as_text
            r.whole = memoryview(data).cast("B")
        if reserve is not None:
            r.reserve = reserve
            r.counts = True
        r.begin()
        value = r.value(0)
        r.finish()
        return value
    finally:
        PyBuffer_Release(&view)
