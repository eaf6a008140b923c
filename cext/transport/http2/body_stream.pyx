"""One HTTP request on an HTTP/2 stream, without I/O: its DATA are one body.

A body that was announced is received into memory of its size, which it uses as it comes; one that was not is gathered in a
buffer that grows. The rules of transport/http2/stream hold. Subclasses implement on_body, on_too_large and on_no_room,
on_reset and on_writable.

Rules:
 1. The body's bytes are counted from when there is room for them (coming), then as unfinished until body() takes it, then as served until the request is answered.
 2. With a `budget` in the account, bodies of more than ASKED bytes are received only while there is room for them
    (service.held_bytes): it is asked before the first byte of an announced one, and again for each ASKED_STEP.
 3. After on_too_large() or on_no_room() what still comes is dropped.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.string cimport memcpy

from neptrio.transport.http2.stream cimport Stream


cdef enum:
    ASKED = 32 << 10       # bytes of a body that the budget is not asked for
    ASKED_STEP = 256 << 10


cdef class BodyStream(Stream):
    """Base of REST's streams."""

    # ------------------------------------------------------------ for subclasses

    def on_body(self):
        """Called when the whole body has come."""

    def on_too_large(self):
        """Called when the body is larger than `limit`."""

    def on_no_room(self, error):
        # type: (TritonError) -> None
        """Called when the server has no room for the body (TritonError)."""

    # ------------------------------------------------------------ incoming

    cpdef int expect(self, Py_ssize_t announced, Py_ssize_t limit) except -1:
        """Begins to receive a body of `announced` bytes, -1 for an unknown number, of at most `limit`."""
        self.expected = announced
        self.limit = limit
        self.ask_at = ASKED
        if announced > limit:
            self.refused = True
            self.on_too_large()
        elif announced > ASKED and self.account.budget is not None:
            self.ask_at = ASKED_STEP
            if self.room(announced):
                self.expect_input(announced)
        return 0

    cdef bint room(self, Py_ssize_t size) except -1:
        """Asks for room; `size`: for how many bytes that were not asked for yet."""
        error = self.account.budget.problem(size)
        if error is None:
            return True
        self.refused = True
        self.drop_input()
        self.on_no_room(error)
        return False

    cdef int feed(self, const char* data, Py_ssize_t n) except -1:
        if self.refused or n == 0:
            return 0
        if n > self.limit - self.have or (self.expected >= 0 and n > self.expected - self.have):
            self.refused = True
            self.drop_input()
            self.on_too_large()
            return 0
        if self.message is None:
            if self.expected >= 0:
                self.message = PyBytes_FromStringAndSize(NULL, self.expected)
                self.at = PyBytes_AS_STRING(self.message)
            else:
                self.message = bytearray()
        if self.at == NULL:
            (<bytearray>self.message).extend(data[:n])
        elif self.at + self.have != data:
            memcpy(self.at + self.have, data, n)
        self.have += n
        self.account.count_in(n)
        self.came(n)
        if self.have > self.ask_at and self.account.budget is not None:
            self.ask_at += ASKED_STEP
            if self.expected >= 0:
                self.room(0)
            elif self.room(ASKED_STEP):
                self.expect_input(ASKED_STEP)
        return 0

    cpdef int end_of_input(self) except -1:
        if not self.refused:
            self.on_body()
        return 0

    cpdef object body(self):
        # type: () -> bytes | bytearray
        """The body that has come: bytes, or a bytearray of its own. It counts as served from now on."""
        cdef object message = self.message
        cdef Py_ssize_t n = self.have
        self.message = None
        self.at = NULL
        self.have = 0
        self.account.count_in(-n)
        self.came(self.coming)
        if n:
            self.serve(n)
        if message is None:
            return b""
        return message if n == len(message) else message[:n]

    cdef bint lacks(self, Py_ssize_t n) noexcept:
        return self.at != NULL and self.expected - self.have >= n

    cdef char* place(self, Py_ssize_t* n) noexcept:
        if self.refused or self.at == NULL:
            return NULL
        n[0] = self.expected - self.have
        return self.at + self.have

    cdef int drop_input(self) except -1:
        self.account.count_in(-self.have)
        self.came(self.coming)
        self.have = 0
        if self.account.filling is self:
            self.account.filling = None
        self.message = None
        self.at = NULL
        return 0

    @property
    def input_held(self) -> int:
        """Bytes of a body that is not whole."""
        return self.have
