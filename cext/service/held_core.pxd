# The part of the budget of held bytes that compiled code looks at. Trio thread only.
cdef class HeldCore:
    cdef public bint full   # more was held than may be, as of the last look
