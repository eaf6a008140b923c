# The models that infer paths name.
cdef tuple route_of(bytes path)
