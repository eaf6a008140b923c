"""Request and reply headers as libnghttp2 keeps them.

The problem: a call has a dozen headers, of which the usual case needs only the path; as Python objects they would
cost more than the rest of the call. The choice: they stay in nghttp2's shared buffers, each with a reference, and are
checked in one walk; whoever wants to read one asks the block for it.

Rules:
 1. While headers come in, the session holds the references (Collected). When all are there, the references move to a
    HeaderBlock, which releases them when it is freed.
 2. Headers beyond the announced MAX_HEADER_LIST_SIZE are counted but not kept, and the block says so. Far beyond it
    the connection is ended.
Source: RFC 9113 (6.5.2, 10.5.1); gRPC over HTTP/2 for what makes a request a call.
"""
from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy

from neptrio.codec.digits cimport digits
from neptrio.transport.http2.nghttp2 cimport *

cdef enum Problem:   # what is wrong with a request's headers, see transport.http2.limits
    FINE = 0
    METHOD = 1
    CONTENT_TYPE = 2
    TE = 3
    HEADERS_TOO_LARGE = 4


cdef class HeaderBlock:
    """A request's headers, kept in nghttp2's buffers and converted only when they are read."""

    cdef int judge(self) noexcept:
        """Checks every header once, so that a call that needs none of them reads none again."""
        cdef int i, length
        cdef nghttp2_vec a, b
        cdef bint post = False, grpc = False, te = False
        cdef const char* name
        for i in range(self.n):
            a = nghttp2_rcbuf_get_buf(self.names[i])
            b = nghttp2_rcbuf_get_buf(self.values[i])
            name = <const char*>a.base
            length = <int>a.len
            if length == 7 and memcmp(name, b":method", 7) == 0:
                post = b.len == 4 and memcmp(b.base, b"POST", 4) == 0
            elif length == 12 and memcmp(name, b"content-type", 12) == 0:
                grpc = is_grpc(<const char*>b.base, b.len)
            elif length == 2 and memcmp(name, b"te", 2) == 0:
                te = b.len == 8 and memcmp(b.base, b"trailers", 8) == 0
            elif length == 12 and memcmp(name, b"grpc-timeout", 12) == 0:
                self.has_timeout = True
            elif not (name[0] == 58 or (length > 5 and memcmp(name, b"grpc-", 5) == 0)
                      or (length == 10 and memcmp(name, b"user-agent", 10) == 0)):
                self.has_custom = True
        if not post:
            return METHOD
        if not grpc:
            return CONTENT_TYPE
        return FINE if te else TE

    def plain_rest(self):
        # type: () -> tuple[bytes, int, int] | None
        """(host, Content-Length, Inference-Header-Content-Length or -1) of a REST request in the form that nearly all clients
        send; None for any other.

        Such a request is a POST to a path without escapes and query, names its host once, and announces its body. It has
        none of these headers: Expect, Origin, Sec-Fetch-Site, Neptrio-Timing, Content-Encoding, and Accept-Encoding only
        as `identity`. None of those that matter comes twice.
        """
        cdef int i
        cdef nghttp2_vec a, b
        cdef const char* name
        cdef size_t length
        cdef int64_t body = -1, header = -1
        cdef bint post = False, path = False
        cdef bytes host = None
        if self.problem == HEADERS_TOO_LARGE:
            return None
        for i in range(self.n):
            a = nghttp2_rcbuf_get_buf(self.names[i])
            b = nghttp2_rcbuf_get_buf(self.values[i])
            name = <const char*>a.base
            length = a.len
            if length == 7 and memcmp(name, b":method", 7) == 0:
                post = b.len == 4 and memcmp(b.base, b"POST", 4) == 0
            elif length == 5 and memcmp(name, b":path", 5) == 0:
                path = is_plain(<const char*>b.base, b.len)
            elif length == 10 and memcmp(name, b":authority", 10) == 0:
                host = (<char*>b.base)[: b.len]
            elif length == 14 and memcmp(name, b"content-length", 14) == 0:
                if body >= 0:
                    return None
                body = digits(<const char*>b.base, b.len)
                if body < 0:
                    return None
            elif length == 31 and memcmp(name, b"inference-header-content-length", 31) == 0:
                if header >= 0:
                    return None
                header = digits(<const char*>b.base, b.len)
                if header < 0:
                    return None
            elif length == 15 and memcmp(name, b"accept-encoding", 15) == 0:
                if b.len != 8 or memcmp(b.base, b"identity", 8) != 0:
                    return None
            elif ((length == 4 and memcmp(name, b"host", 4) == 0)
                    or (length == 6 and (memcmp(name, b"expect", 6) == 0 or memcmp(name, b"origin", 6) == 0))
                    or (length == 14 and (memcmp(name, b"sec-fetch-site", 14) == 0
                                          or memcmp(name, b"neptrio-timing", 14) == 0))
                    or (length == 16 and memcmp(name, b"content-encoding", 16) == 0)):
                return None
        if not post or not path or host is None or body < 0:
            return None
        return host, body, header

    def __dealloc__(self):
        cdef int i
        for i in range(self.n):
            nghttp2_rcbuf_decref(self.names[i])
            nghttp2_rcbuf_decref(self.values[i])
        free(self.names)
        free(self.values)

    def __call__(self) -> list:
        # type: () -> list[tuple[bytes, bytes]]
        """The headers as [(name, value)], pseudo-headers included."""
        cdef int i
        cdef nghttp2_vec a, b
        found = []
        for i in range(self.n):
            a = nghttp2_rcbuf_get_buf(self.names[i])
            b = nghttp2_rcbuf_get_buf(self.values[i])
            found.append(((<char*>a.base)[: a.len], (<char*>b.base)[: b.len]))
        return found

    def get(self, bytes name not None):
        # type: (...) -> bytes | None
        """The value of the first header of that name, or None."""
        cdef int i
        cdef nghttp2_vec a, b
        for i in range(self.n):
            a = nghttp2_rcbuf_get_buf(self.names[i])
            if a.len == <size_t>len(name) and memcmp(a.base, <const char*>name, a.len) == 0:
                b = nghttp2_rcbuf_get_buf(self.values[i])
                return (<char*>b.base)[: b.len]
        return None


cdef bint is_plain(const char* path, size_t n) noexcept:
    """True for a path without escapes and query."""
    cdef size_t i
    cdef char c
    for i in range(n):
        c = path[i]
        if not (97 <= c <= 122 or 65 <= c <= 90 or 48 <= c <= 57 or c == 45 or c == 46 or c == 47 or c == 95):
            return False
    return True


cdef bint is_grpc(const char* value, size_t n) noexcept:
    """True for application/grpc, alone or followed by +proto or parameters."""
    if n < 16 or memcmp(value, b"application/grpc", 16) != 0:
        return False
    if n == 16 or value[16] == 59:
        return True
    return n >= 22 and memcmp(value + 16, b"+proto", 6) == 0 and (n == 22 or value[22] == 59)


cdef HeaderBlock block_of(Collected* c):
    """The headers as an object; `c` keeps none, but still knows where :path was and how many bytes came."""
    cdef HeaderBlock block = HeaderBlock.__new__(HeaderBlock)
    cdef size_t size = c.n * sizeof(void*)
    block.names = <nghttp2_rcbuf**>malloc(size + 1)
    block.values = <nghttp2_rcbuf**>malloc(size + 1)
    if block.names == NULL or block.values == NULL:
        raise MemoryError
    memcpy(block.names, c.names, size)
    memcpy(block.values, c.values, size)
    block.n = c.n
    c.n = 0
    block.problem = HEADERS_TOO_LARGE if c.bytes > c.limit else block.judge()
    return block


cdef int reply_headers(nghttp2_nv* to, int room, list headers) except -1:
    cdef int n = 0
    cdef bytes name, value
    for name, value in headers:
        if n >= room:
            break
        to[n].name = <uint8_t*>name
        to[n].namelen = len(name)
        to[n].value = <uint8_t*>value
        to[n].valuelen = len(value)
        to[n].flags = NGHTTP2_NV_FLAG_NONE
        n += 1
    return n
