"""The traces that finished last, for /v2/trace/recent; no file is needed for it.

The problem: keeping the trace objects themselves would keep everything they refer to, and they could not be reused for
other requests. The choice: a ring of places of RECENT_BYTES each, into which a trace's records are copied. Only a trace
that is larger, or whose records were not made, is kept as the objects of its parts.
"""
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from neptrio.observe.trace cimport Trace
from neptrio.observe.trace_block cimport TraceBlock


RECENT = RECENT_TRACES


cdef class Recent:
    """The traces that finished last, in a ring; small ones as their records."""

    def __cinit__(self):
        self.data = <char*>malloc(RECENT_TRACES * RECENT_BYTES)
        if self.data == NULL:
            raise MemoryError()
        memset(self.sizes, 0, sizeof(self.sizes))
        self.whole = [None] * RECENT_TRACES

    def __dealloc__(self):
        free(self.data)

    cdef int add(self, Trace root, const char* records, Py_ssize_t size) except -1:
        """Adds a trace. `records` are those of the root and its parts, NULL when they were not made."""
        cdef Py_ssize_t place = self.count % RECENT_TRACES
        cdef Py_ssize_t was = self.sizes[place]
        self.count += 1
        if records != NULL and size <= RECENT_BYTES:
            memcpy(self.data + place * RECENT_BYTES, records, size)
            self.sizes[place] = size
            if not was:
                self.whole[place] = None
        else:
            self.sizes[place] = 0
            self.whole[place] = root.parts
        return 0

    def __len__(self):
        return min(self.count, RECENT_TRACES)

    def last(self, int64_t count):
        # type: (...) -> Iterator[bytes]
        """The trace file's objects for the last `count` traces, oldest first, without tensors: the JSON of one trace at a
        time, its objects separated by commas. What is to be printed is taken now, and printed when it is asked for."""
        cdef int64_t i
        cdef Py_ssize_t place
        cdef TraceBlock block
        cdef list taken = []
        for i in range(self.count - min(count, len(self)), self.count):
            place = i % RECENT_TRACES
            if self.sizes[place]:
                block = TraceBlock()
                memcpy(block.reserve(self.sizes[place]), self.data + place * RECENT_BYTES, self.sizes[place])
                block.records.size = self.sizes[place]
                taken.append(block)
            else:
                taken.append(self.whole[place])
        return map(_text, taken)


def _text(trace) -> bytes:
    if isinstance(trace, TraceBlock):
        return trace.text()
    return b",".join([part.text() for part in trace])
