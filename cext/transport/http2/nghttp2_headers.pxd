# Header blocks passed to and from libnghttp2. A Collected holds a reference to each of its buffers; block_of() passes
# the references on to a HeaderBlock, drop() releases them.
from libc.string cimport memcmp

from neptrio.transport.http2.nghttp2 cimport *

cdef enum:
    MAX_HEADERS = 128
    MAX_REPLY_HEADERS = 64

cdef struct Collected:                     # the request headers received so far
    nghttp2_rcbuf* names[MAX_HEADERS]
    nghttp2_rcbuf* values[MAX_HEADERS]
    int n
    int path                               # index of :path, -1 when there is none
    Py_ssize_t bytes                       # their size as RFC 9113 counts it (6.5.2)
    Py_ssize_t limit                       # the size up to which headers are kept; more are only counted
    Py_ssize_t bomb                        # the size at which the connection is ended

cdef inline void drop(Collected* c) noexcept:
    cdef int i
    for i in range(c.n):
        nghttp2_rcbuf_decref(c.names[i])
        nghttp2_rcbuf_decref(c.values[i])
    c.n = 0
    c.bytes = 0
    c.path = -1

cdef inline bint collect(Collected* c, nghttp2_rcbuf* name, nghttp2_rcbuf* value) noexcept:
    """Keeps one more header; returns False when the connection must be ended."""
    cdef nghttp2_vec v = nghttp2_rcbuf_get_buf(name)
    cdef int i = c.n
    c.bytes += <Py_ssize_t>v.len + <Py_ssize_t>nghttp2_rcbuf_get_buf(value).len + 32
    if c.bytes > c.bomb:
        return False
    if i == MAX_HEADERS or c.bytes > c.limit:
        c.bytes += c.limit
        return True
    nghttp2_rcbuf_incref(name)
    nghttp2_rcbuf_incref(value)
    c.names[i] = name
    c.values[i] = value
    c.n = i + 1
    if v.len == 5 and memcmp(v.base, b":path", 5) == 0:
        c.path = i
    return True

cdef class HeaderBlock:
    cdef nghttp2_rcbuf** names
    cdef nghttp2_rcbuf** values
    cdef int n
    cdef readonly int problem          # 0 for a gRPC request, else why it is none (http2.limits.PROBLEMS)
    cdef readonly bint has_timeout
    cdef readonly bint has_custom      # there is metadata besides what every gRPC client sends
    cdef int judge(self) noexcept

cdef HeaderBlock block_of(Collected* c)
# as many as there is room for; borrowed from the list
cdef int reply_headers(nghttp2_nv* to, int room, list headers) except -1
