# A cursor over JSON text with rapidjson's errors, and a writer of compact JSON.
#   A Reader borrows the text: whoever holds it keeps the buffer alive.
#   Every function that reads starts at the value's first character and ends behind its last.
from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint64_t

from neptrio._cext.number_text cimport Number

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

cdef Py_ssize_t unescape(const unsigned char* p, Py_ssize_t n, char* out) noexcept

cdef class Writer:
    cdef PyObject* buffer     # a bytes object of `room` bytes, owned, that nobody else sees
    cdef char* p
    cdef Py_ssize_t used
    cdef Py_ssize_t room
    cdef char* need(self, Py_ssize_t n) except NULL    # room for n more; the place to write at
    cdef int raw(self, const char* p, Py_ssize_t n) except -1
    cdef int quoted(self, const char* p, Py_ssize_t n) except -1
    cdef int text(self, str s) except -1               # quoted and escaped
    cdef int integer(self, int64_t value) except -1
    cdef int real(self, double value) except -1
    cdef int value(self, object value) except -1
    cdef int _resize(self, Py_ssize_t room) except -1
    cdef bytes take(self)                              # the text; the writer is used up
