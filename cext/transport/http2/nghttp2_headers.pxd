# Header blocks on their way in and out of libnghttp2. A Collected holds a reference to every buffer
# in it; block_of() hands them over to a HeaderBlock, drop() gives them back.
from libc.string cimport memcmp

from neptrio.transport.http2.nghttp2 cimport (
    nghttp2_nv,
    nghttp2_rcbuf,
    nghttp2_rcbuf_decref,
    nghttp2_rcbuf_get_buf,
    nghttp2_rcbuf_incref,
    nghttp2_vec,
)

cdef enum:
    MAX_HEADERS = 128
    MAX_REPLY_HEADERS = 64

cdef struct Collected:                     # the request headers that came so far
    nghttp2_rcbuf* names[MAX_HEADERS]
    nghttp2_rcbuf* values[MAX_HEADERS]
    int n
    int path                               # index of :path, -1 when there is none
    Py_ssize_t bytes                       # what the peer pays for them (RFC 9113, 6.5.2)
    Py_ssize_t limit                       # of those: what is beyond it is counted, not kept
    Py_ssize_t bomb                        # of those: the connection ends here

cdef inline void drop(Collected* c) noexcept:
    cdef int i
    for i in range(c.n):
        nghttp2_rcbuf_decref(c.names[i])
        nghttp2_rcbuf_decref(c.values[i])
    c.n = 0
    c.bytes = 0
    c.path = -1

cdef inline bint collect(Collected* c, nghttp2_rcbuf* name, nghttp2_rcbuf* value) noexcept:
    """Keeps one more header; False when the peer has to be sent away."""
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
    cdef readonly int problem          # why it is no gRPC request (http2.limits.PROBLEMS), 0 when it is one
    cdef readonly bint has_timeout
    cdef readonly bint has_custom      # metadata beyond what every gRPC client sends
    cdef int judge(self) noexcept

cdef HeaderBlock block_of(Collected* c)
cdef int reply_headers(nghttp2_nv* to, list headers) except -1   # the first 64; borrowed from the list
