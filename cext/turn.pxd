# What is to be decided and sent before the loop's turn ends. Trio thread only.
ctypedef int (*Follow)(object) except -1

cdef class TurnCore:
    cdef list dispatchers
    cdef list connections
    cdef public list later       # dispatchers that the turn's own task marks in its pass
    cdef set marked              # dispatchers in either list: each is there once
    cdef set flushing
    cdef bint ending
    cdef type follower           # what lies in `connections` behind one of them, to be told when it has sent
    cdef Follow follow
    cpdef mark(self, dispatcher)
    cpdef mark_later(self, dispatcher)
    cpdef want_flush(self, connection)
    cpdef soon(self)
    cpdef end(self)
    cpdef take_later(self)
