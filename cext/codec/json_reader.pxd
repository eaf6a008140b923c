# A cursor over JSON text with rapidjson's errors.
#   A Reader borrows the text: whoever holds it keeps the buffer alive.
#   Every function that reads starts at the value's first character and ends behind its last.
from libc.stdint cimport uint64_t

from neptrio.codec.number_text cimport Number

cdef enum:
    MAX_DEPTH = 100

cdef class Reader:
    cdef const unsigned char* text
    cdef Py_ssize_t at
    cdef Py_ssize_t end
    # the latest member's name, as it stands in the text (escapes not resolved)
    cdef const unsigned char* name
    cdef Py_ssize_t name_length
    cdef bint name_escaped
    cdef list repeated                                 # names that the root object has again, None: nobody asks

    cdef int fail(self, str reason, Py_ssize_t at) except -1
    cdef void space(self) noexcept
    cdef int peek(self) noexcept                       # the character at the cursor, -1 at the end
    cdef int begin(self) except -1                     # to the root value
    cdef int finish(self) except -1                    # only space may follow the root value
    cdef bint first_member(self) except -1             # enters an object; False when it is empty
    cdef bint next_member(self) except -1              # after a member's value; False at the object's end
    cdef bint first_element(self) except -1
    cdef bint next_element(self) except -1
    cdef bint named(self, const char* name, Py_ssize_t n) noexcept
    cdef str name_text(self)
    cdef int skip(self, int depth) except -1           # any value
    cdef int _member(self) except -1
    cdef int _word(self, const char* word, Py_ssize_t n) except -1
    cdef int skip_string(self, bint* escaped) except -1
    cdef str string(self)
    cdef int number(self, Number* out) except -1
    cdef object value(self, int depth)                 # any value as Python objects
    # values of a known kind; InvalidArgument when another comes, naming `key`
    cdef str string_at(self, Py_ssize_t at, str key)   # at < 0: the member is missing
    cdef tuple shape_at(self, Py_ssize_t at)
    cdef uint64_t unsigned(self, str key, str verb=*) except? 0xFFFFFFFFFFFFFFFF
    cdef bint boolean(self, str key) except -1

cdef Py_ssize_t unescape(const unsigned char* p, Py_ssize_t n, char* out) noexcept
