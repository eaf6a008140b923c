"""The heads of plain infer requests: read in one pass over their bytes, and known when they come again.

The problem: a client sends the same head in every request to a model, and reading it was an eighth of a small request's
instructions. The choice: a connection keeps the last head that it took, with what was read from it, and a request that
begins with the very same bytes is not read again.

Rules:
 1. What a head says follows from its bytes alone. Whether a connection takes it (host, size of the body, who sends it)
    does not, and is decided by the connection: each keeps only heads that it took.
 2. A head is kept when it comes for the second time in a row. So heads that differ from request to request cost a hash.
 3. Heads with which clients say who they are are read anew each time (fast_path, rule 4).
 4. Connections share the texts of heads, since most clients of a server send the same; so an idle connection keeps a pointer.
Source: the rules of cext/transport/http1/fast_path.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcmp

from neptrio.codec.digits cimport digits
from neptrio.request.hashed cimport hash_of

from neptrio import limits

cdef enum:
    MOST_HEAD = 8 << 10    # most bytes of a request's head
    MOST_KEPT = 1024       # heads: clients send few, and others must not make memory grow

cdef Py_ssize_t LONGEST_REPEATED = limits.LONGEST_REPEATED
cdef dict _heads = {}      # text -> KnownHead

# 1: a character of a header's name, 2: of a value or a path. Letters are mapped to lower case.
cdef unsigned char[256] _NAME
cdef unsigned char[256] _PATH


def _tables():
    cdef int c
    for c in range(256):
        _NAME[c] = 0
        _PATH[c] = 0
    for c in b"abcdefghijklmnopqrstuvwxyz0123456789-":
        _NAME[c] = c
        _PATH[c] = 1
    for c in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ":
        _NAME[c] = c + 32
        _PATH[c] = 1
    for c in b"_./":
        _PATH[c] = 1


_tables()


cdef inline bint _spells(const char* p, const char* lower, Py_ssize_t n) noexcept:
    """True when the name at `p` equals `lower`, ignoring case."""
    cdef Py_ssize_t i
    for i in range(n):
        if _NAME[<unsigned char>p[i]] != <unsigned char>lower[i]:
            return False
    return True


cdef bint read_head(const char* p, Py_ssize_t n, bint asks_who, Head* head) except -1:
    """Reads the head at the front of the buffer; whether it is that of a plain request, and whole. `asks_who`: an
    Authorization header is a token, which is not looked at otherwise."""
    cdef Py_ssize_t at = 5, length
    cdef Py_ssize_t limit = n if n < MOST_HEAD else MOST_HEAD
    cdef const char* name
    cdef const char* value
    cdef const char* end
    head.host = head.token = NULL
    head.host_length = head.token_length = 0
    head.content_length = head.header_length = -1
    if n < 32 or memcmp(p, b"POST /v2/models/", 16) != 0:
        return False
    while at < limit and _PATH[<unsigned char>p[at]]:
        at += 1
    if at + 11 > limit or memcmp(p + at, b" HTTP/1.1\r\n", 11) != 0:
        return False
    head.path_end = at
    at += 11
    while True:
        if at + 2 > limit:
            return False
        if p[at] == 13:                          # \r: the empty line
            if p[at + 1] != 10:
                return False
            at += 2
            break
        name = p + at
        while at < limit and _NAME[<unsigned char>p[at]]:
            at += 1
        length = p + at - name
        if length == 0 or at == limit or p[at] != 58:
            return False
        at += 1
        while at < limit and p[at] == 32:
            at += 1
        value = p + at
        while at < limit and 32 <= p[at] < 127:
            at += 1
        if at + 2 > limit or p[at] != 13 or p[at + 1] != 10:
            return False
        end = p + at
        while end > value and (end - 1)[0] == 32:
            end -= 1
        at += 2
        if length == 14 and _spells(name, b"content-length", 14):
            if head.content_length >= 0:
                return False
            head.content_length = digits(value, end - value)
            if head.content_length < 0:
                return False
        elif length == 31 and _spells(name, b"inference-header-content-length", 31):
            if head.header_length >= 0:
                return False
            head.header_length = digits(value, end - value)
            if head.header_length < 0:
                return False
        elif length == 4 and _spells(name, b"host", 4):
            if head.host != NULL:
                return False
            head.host = value
            head.host_length = end - value
        elif length == 10 and _spells(name, b"connection", 10):
            if end - value != 10 or not _spells(value, b"keep-alive", 10):
                return False
        elif length == 15 and _spells(name, b"accept-encoding", 15):
            if end - value != 8 or not _spells(value, b"identity", 8):  # as Python's http.client says
                return False
        elif length == 13 and asks_who and _spells(name, b"authorization", 13):
            if head.token != NULL:
                return False
            head.token = value
            head.token_length = end - value
        elif ((length == 6 and (_spells(name, b"expect", 6) or _spells(name, b"origin", 6)))
                or (length == 14 and (_spells(name, b"sec-fetch-site", 14) or _spells(name, b"neptrio-timing", 14)))
                or (length == 7 and _spells(name, b"upgrade", 7))
                or (length == 16 and _spells(name, b"content-encoding", 16))
                or (length == 16 and _spells(name, b"proxy-connection", 16))
                or (length == 17 and _spells(name, b"transfer-encoding", 17))):
            return False
    head.size = at
    return head.content_length >= 0 and head.host != NULL


cdef class KnownHead:
    """See plain_head.pxd."""

    cdef bint begins(self, const char* p, Py_ssize_t n) noexcept:
        """Whether the bytes at `p` begin with this head."""
        cdef Py_ssize_t size = PyBytes_GET_SIZE(self.text)
        return n >= size and memcmp(PyBytes_AS_STRING(self.text), p, size) == 0


cdef KnownHead keep(const char* p, Head* head, tuple route, uint64_t* seen):
    """The head at `p`, to be kept, if it is not longer than is kept and was the last one, too, of which `seen` is the hash;
    else None."""
    cdef KnownHead known
    cdef bytes text
    cdef uint64_t hashed
    if head.size > LONGEST_REPEATED:
        return None
    hashed = hash_of(<const unsigned char*>p, head.size)
    if hashed != seen[0]:
        seen[0] = hashed
        return None
    text = p[:head.size]
    known = _heads.get(text)
    if known is None:
        known = KnownHead.__new__(KnownHead)
        known.text = text
        known.route = route
        known.content_length = head.content_length
        known.header_length = head.header_length
        if len(_heads) >= MOST_KEPT:
            _heads.clear()
        _heads[text] = known
    return known
