"""The head of an HTTP/1.1 request, collected from the parser's callbacks.

httptools calls back for every header; if these were Python methods, the calls would cost more than the parsing. The
connection extends this class with what happens when the head and the message are complete. Headers that infer
requests need have attributes; all headers are in `headers` as they came (names in their original case).
"""

from neptrio.request.infer_request cimport now_ns


class HeadTooLarge(Exception):
    """The headers are larger than a request's may be."""


cdef inline bint _is(bytes name, const char* lower, Py_ssize_t n) noexcept:
    """Compares two names of equal length, ignoring case."""
    cdef const char* p = name
    cdef Py_ssize_t i
    cdef char c
    for i in range(n):
        c = p[i]
        if 65 <= c <= 90:
            c += 32
        if c != lower[i]:
            return False
    return True


cdef class RequestHead:
    """Protocol object for httptools.HttpRequestParser."""

    def on_message_begin(self):
        self.url = b""
        self.headers = []
        self.header_length = None
        self.content_encoding = None
        self.accept_encoding = None
        self.expect = None
        self.host = None
        self.hosts = 0
        self.origin = None
        self.fetch_site = None
        self.timing = None
        self.in_message = True
        self.head_complete = False
        self.chunked = False
        self.content_length = -1
        self.head_bytes = 0
        if self.parts:
            self.parts = 0  # it began with the first of them
        else:
            self.receive_start = now_ns()

    def on_url(self, bytes url):
        self.head_bytes += len(url)
        if self.head_bytes > self.head_limit:
            raise HeadTooLarge()
        self.url = self.url + url if self.url else url

    def on_header(self, bytes name, bytes value):
        cdef Py_ssize_t n = len(name)
        cdef Py_ssize_t size = len(value)
        self.head_bytes += n + size + 64   # what it costs to keep, not only its text
        if self.head_bytes > self.head_limit:
            raise HeadTooLarge()
        if self.head_complete:
            return                               # trailers
        # the parser leaves blanks behind a value, which are none of it (RFC 9110, 5.5)
        if size and (value[size - 1] == 32 or value[size - 1] == 9):
            value = value.rstrip(b" \t")
        self.headers.append((name, value))
        if n == 14:
            if _is(name, b"content-length", n):
                self.content_length = int(value)
            elif _is(name, b"sec-fetch-site", n):
                self.fetch_site = value
            elif _is(name, b"neptrio-timing", n):
                self.timing = value
        elif n == 31:
            if _is(name, b"inference-header-content-length", n):
                self.header_length = value
        elif n == 16:
            if _is(name, b"content-encoding", n):
                self.content_encoding = value
        elif n == 15:
            if _is(name, b"accept-encoding", n):
                self.accept_encoding = value if self.accept_encoding is None else self.accept_encoding + b"," + value
        elif n == 17:
            if _is(name, b"transfer-encoding", n):
                self.chunked = True
        elif n == 6:
            if _is(name, b"expect", n):
                self.expect = value
            elif _is(name, b"origin", n):
                self.origin = value
        elif n == 4:
            if _is(name, b"host", n):
                self.host = value
                self.hosts += 1
