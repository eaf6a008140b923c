# The work to be done at the end of a loop pass. Trio thread only.
ctypedef int (*Follow)(object) except -1

cdef class LoopPassCore:
    cdef list dispatchers
    cdef list connections
    cdef public list later       # schedulers that called mark_later(), until take_later()
    cdef set marked              # all that are in `dispatchers` or `later`, so that each is there once
    cdef set flushing            # all that are in `connections`, so that each is there once
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
