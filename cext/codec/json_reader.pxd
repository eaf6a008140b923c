# A cursor over JSON text that reports errors as rapidjson does.
#   A Reader borrows the text: whoever uses it keeps the buffer alive.
#   What is nogil may be called with the GIL or without; only errors take it.
#   A function that reads a value starts at its first character and leaves the cursor behind its last.
cimport cython
from libc.stdint cimport int64_t, uint64_t

from neptrio.codec.number_text cimport Number

cdef enum:
    MAX_DEPTH = 100

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    /* where the first byte is that is not an ordinary one of a string: a quotation mark, a backslash, a
       control character; `end` when there is none. Eight bytes at once: a byte's high bit is left set by
       the subtraction where the byte is below 32, or equal to the character that it was compared with;
       the lowest such bit is exact, and only that one is used. */
    static inline const unsigned char* past_ordinary(const unsigned char* p, const unsigned char* end) {
    #if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        const uint64_t ones = 0x0101010101010101ull, high = 0x8080808080808080ull;
        while (end - p >= 8) {
            uint64_t v, quote, slash, found;
            memcpy(&v, p, 8);
            quote = v ^ ones * '"';
            slash = v ^ ones * '\\\\';
            found = (((v - ones * 32) & ~v) | ((quote - ones) & ~quote) | ((slash - ones) & ~slash)) & high;
            if (found) return p + (__builtin_ctzll(found) >> 3);
            p += 8;
        }
    #endif
        while (p < end && *p >= 32 && *p != '"' && *p != '\\\\') p++;
        return p;
    }
    """
    const unsigned char* past_ordinary(const unsigned char* p, const unsigned char* end) noexcept nogil

cdef class Stop:
    cdef int asked

# An array that was read past, and how many elements it and the arrays inside of it have. It keeps the buffer alive.
cdef class ArrayText:
    cdef readonly object text  # type: memoryview
    cdef readonly Py_ssize_t count

@cython.final
cdef class Reader:
    cdef const unsigned char* text
    cdef Py_ssize_t at
    cdef Py_ssize_t end
    # the name of the latest member, as it stands in the text (escapes not resolved)
    cdef const unsigned char* name
    cdef Py_ssize_t name_length
    cdef bint name_escaped
    cdef bint large                                    # long parts are read without the GIL
    cdef const int* stop                               # not 0: the value is no longer wanted, stop reading; may be NULL
    cdef int64_t look                                  # elements of a tensor after which the core is offered next
    cdef int steps                                     # steps since breathe() has let other threads run
    # called with so many bytes before memory for a tensor is allocated; None: nobody counts
    cdef object reserve
    cdef bint bounded                                  # value() makes MOST_VALUES at most
    cdef Py_ssize_t values                             # that it has made
    cdef bint counts                                   # objects that value() makes are counted too
    cdef Py_ssize_t made                               # bytes of them that are not reserved yet
    # names of the root object's members whose arrays are wanted as ArrayText; None: all are wanted as objects
    cdef object as_text
    cdef object whole                                  # a view of the text, for these
    # collects names that the root object has more than once; None: they are not wanted
    cdef list repeated

    cdef int fail(self, const char* reason, Py_ssize_t at) except -1 nogil
    cdef int breathe(self) except -1                   # lets other threads run now and then
    cdef int stopped(self) except -1 nogil
    cdef int too_deep(self) except -1 nogil
    cdef inline void space(self) noexcept nogil:
        cdef unsigned char c
        while self.at < self.end:
            c = self.text[self.at]
            if c > 32 or (c != 32 and c != 10 and c != 13 and c != 9):
                return
            self.at += 1
    cdef inline int peek(self) noexcept nogil:               # the character at the cursor, -1 at the end
        return self.text[self.at] if self.at < self.end else -1
    cdef int begin(self) except -1                     # moves to the root value
    cdef int finish(self) except -1                    # only space may follow the root value
    cdef bint first_member(self) except -1 nogil             # enters an object; False when it is empty
    cdef bint next_member(self) except -1 nogil              # after a member's value; False at the object's end
    cdef bint first_element(self) except -1 nogil
    cdef bint next_element(self) except -1 nogil
    cdef bint named(self, const char* name, Py_ssize_t n) noexcept
    cdef str name_text(self)
    cdef int skip(self, int depth) except -1 nogil           # skips any value
    cdef int skip_value(self, int depth) except -1     # skip() for a value that may be long
    cdef int leaves(self, Py_ssize_t* count, int depth) except -1 nogil   # skip() that counts what is no array
    cdef ArrayText array_text(self)                    # an array that is wanted as text
    cdef int _member(self) except -1 nogil
    cdef int _word(self, const char* word, Py_ssize_t n) except -1 nogil
    cdef int skip_string(self, bint* escaped) except -1 nogil
    cdef str string(self)
    cdef int number(self, Number* out) except -1 nogil
    cdef int built(self, Py_ssize_t size) except -1
    cdef object value(self, int depth)                 # any value, as Python objects
    # Values of a known kind. Another kind raises InvalidArgument naming `key`.
    cdef str string_at(self, Py_ssize_t at, str key)   # at < 0: the member is missing
    cdef str name_at(self, Py_ssize_t at, str key)     # of something that has a name: its length is limited
    cdef tuple shape_at(self, Py_ssize_t at)
    cdef uint64_t unsigned(self, str key, str verb=*) except? 0xFFFFFFFFFFFFFFFF
    cdef bint boolean(self, str key) except -1
