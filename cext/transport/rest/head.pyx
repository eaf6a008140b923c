"""The head of an HTTP request: its headers as they came, and those that infer requests need by their names.

HTTP/1.1 fills it from its parser's callbacks, HTTP/2 from a stream's headers. If that were Python code, the calls would cost
more than the parsing.
"""

from cpython.bytes cimport PyBytes_AS_STRING

from neptrio.codec.digits cimport digits

from neptrio.errors import InvalidArgument
from neptrio.limits import MAX_HEAD_BYTES, shown

cdef enum:
    COST = 64    # bytes that keeping a header takes beside its text

cdef int64_t MOST_BYTES = MAX_HEAD_BYTES

# those that are kept by name
cdef frozenset _READ = frozenset((
    b"accept-encoding", b"content-encoding", b"content-length", b"expect", b"host", b"inference-header-content-length",
    b"neptrio-timing", b"origin", b"sec-fetch-site", b"transfer-encoding",
))


class HeadTooLarge(Exception):
    """The headers are larger than a request's may be."""


cdef class RequestHead:
    """What has come of a head; begin with clear()."""

    cpdef int clear(self) except -1:
        """A request begins."""
        self.url = b""
        self.headers = []
        self.blanks = None
        self.read = {}
        self.hosts = 0
        self.chunked = False
        self.content_length = -1
        self.head_bytes = 0
        return 0

    cdef int count(self, Py_ssize_t n) except -1:
        self.head_bytes += n
        if self.head_bytes > MOST_BYTES:
            raise HeadTooLarge()
        return 0

    cpdef int add_url(self, bytes part) except -1:
        """The next part of the URL. Raises HeadTooLarge."""
        self.count(len(part))
        self.url = self.url + part if self.url else part
        return 0

    cpdef int aim(self, bytes host, bytes path) except -1:
        """The request line named both: the Host header does not count any more (RFC 9112, 3.2.2)."""
        self.url = path
        self.read[b"host"] = host
        self.headers = [(b"host", host)] + [header for header in self.headers if header[0].lower() != b"host"]
        self.hosts = 1
        self.blanks = None  # whose numbers have changed
        return 0

    cpdef list as_sent(self):
        # type: () -> list[tuple[bytes, bytes]]
        """The headers with the blanks that stood behind values, as a Triton server forwards them to models."""
        if self.blanks is None:
            return self.headers
        return [(name, self.blanks.get(i, value)) for i, (name, value) in enumerate(self.headers)]

    cpdef int add(self, bytes name, bytes value) except -1:
        """The next header. Raises HeadTooLarge, and InvalidArgument for a Content-Length that is no length."""
        cdef Py_ssize_t size = len(value)
        cdef bytes lower
        self.count(len(name) + size + COST)
        # the parser leaves blanks behind a value, which are none of it (RFC 9110, 5.5), except for models
        if size and (value[size - 1] == 32 or value[size - 1] == 9):
            if self.blanks is None:
                self.blanks = {}
            self.blanks[len(self.headers)] = value
            value = value.rstrip(b" \t")
        self.headers.append((name, value))
        lower = name.lower()
        if lower not in _READ:
            return 0
        if lower == b"host":
            self.hosts += 1
        elif lower == b"content-length":
            self.content_length = digits(PyBytes_AS_STRING(value), len(value))
            if self.content_length < 0:
                raise InvalidArgument("malformed HTTP request: Content-Length must be a number of up to 15 digits, got "
                                      f"'{shown(value.decode('latin-1'))}'")
        elif lower == b"transfer-encoding":
            self.chunked = True
        elif lower == b"accept-encoding" and lower in self.read:
            value = self.read[lower] + b"," + value
        self.read[lower] = value
        return 0

    cpdef object get(self, bytes name):
        # type: (...) -> bytes | None
        """The value of a header that is read here, by its name in lower case; of several the last, but all of
        Accept-Encoding."""
        return self.read.get(name)
