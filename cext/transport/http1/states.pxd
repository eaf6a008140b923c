# The states of an HTTP/1.1 connection and what changes them; the table is in the .pyx.
cpdef enum State:
    IDLE      # between requests
    PARTIAL   # a plain request has begun, whose rest is waited for in front of the parser
    HEAD      # the parser reads a request's head
    BODY      # the parser reads its body
    DIRECT    # its body is received past the parser
    LAST      # no further request is read; what was read is answered
    REFUSED   # no further request is read, and the client may still be sending one
    ENDED     # the client has closed its side, or we the connection

cpdef enum Event:
    KEPT          # the beginning of a plain request is kept
    TAKEN_UP      # what was kept is looked at again, with what came since
    BEGUN         # the first byte of a request
    HEAD_READ     # its head is whole
    PAST_PARSER   # the rest of its body needs no parser
    WHOLE         # it has come whole
    NO_MORE       # that was the last one
    REFUSAL       # it will not be read to its end
    INPUT_ENDED   # the client has closed its side

cdef State after(State state, Event event) noexcept
