# Writing text into a room that ends. The rules for everything in cext/ that prints:
#   1. Whoever writes takes, beside the place to write at, the end of the room, and writes nothing at the end or behind it.
#   2. What does not fit is left out, and the end is returned; so is it by all that follows.
#   3. Whoever makes the room makes at least one byte more than the longest text. Text that reaches the end is an error,
#      never an answer: see no_room().
from libc.string cimport memcpy

cdef inline char* add_char(char* out, char* end, char c) noexcept nogil:
    if out >= end:
        return end
    out[0] = c
    return out + 1

cdef inline char* add_text(char* out, char* end, const char* text, Py_ssize_t n) noexcept nogil:
    if n > end - out:
        return end
    memcpy(out, text, n)
    return out + n

cdef inline char* add_many(char* out, char* end, char c, Py_ssize_t n) noexcept nogil:
    """The same character n times."""
    while n > 0:
        out = add_char(out, end, c)
        n -= 1
    return out
