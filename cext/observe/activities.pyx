"""Points in time of a trace that a model reports under names of its own.

Rules:
 1. They are as many and as long as MOST and LONGEST_NAME say; what is beyond is left out.
 2. They are kept in the order in which they came, and believed: a model may report what was before, or lies ahead.
 3. In a record there is for each when it was, and where its text begins behind the record's texts; the text is all of a point
    but the time and the end.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t
from libc.string cimport memcpy

from neptrio.codec.http_json import dump_json
from neptrio.limits import LONGEST_NAME, shown

cdef enum:
    MOST = 1000

cdef Py_ssize_t _longest = LONGEST_NAME


cdef class Activities:
    """See the module's text."""

    def __cinit__(self):
        self.rows = []

    cdef int add(self, str name, int64_t ns) except -1:
        if ns <= 0 or len(self.rows) >= MOST:
            return 0
        if len(name) > _longest:
            name = shown(name, _longest)
        head = b'{"name":%s,"ns":' % dump_json(name)
        self.rows.append((ns, name, head))
        self.bytes += PyBytes_GET_SIZE(head)
        return 0

    cdef int pack(self, int64_t* points, char* texts, char* end) except -1:
        """Rule 3; there is room for all points. Raises AssertionError where the texts would go beyond `end`."""
        cdef int64_t at = 0
        cdef Py_ssize_t size
        for ns, _, head in self.rows:
            size = PyBytes_GET_SIZE(head)
            if size > end - texts - at:
                raise AssertionError("the names in a trace are longer than the room that was made for them")
            points[0], points[1] = ns, at
            points += 2
            memcpy(texts + at, PyBytes_AS_STRING(head), size)
            at += size
        return 0
