# What is to be decided and sent before the loop's pass ends. Trio thread only.
ctypedef int (*Follow)(object) except -1

cdef class LoopPassCore:
    cdef list dispatchers
    cdef list connections
    cdef public list later       # dispatchers that mark_later() put aside, until take_later()
    cdef set marked              # what is in `dispatchers` or `later`: each is there once
    cdef set flushing            # what is in `connections`
    cdef bint ending
    cdef type follower           # of traces: they lie in `connections` behind the one that
                                 # sends their answer, and `follow` is called when it has
    cdef Follow follow
    cpdef mark(self, dispatcher)
    cpdef mark_later(self, dispatcher)
    cpdef want_flush(self, connection)
    cpdef soon(self)
    cpdef end(self)
    cpdef take_later(self)
