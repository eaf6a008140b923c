# Numbers as JSON text. Parsing is correctly rounded; printing gives the shortest digits that read
# back as the same double. Printing may touch 48 bytes from `out` on, whatever it needs; it returns
# where the text ends.
from libc.stdint cimport int64_t, uint64_t

cdef enum NumberKind:
    NUMBER_INTEGER = 0   # no fraction or exponent, magnitude fits 64 bits: negative, magnitude
    NUMBER_HUGE = 1      # no fraction or exponent, magnitude does not fit; real is the nearest double
    NUMBER_REAL = 2      # real

cdef enum NumberError:   # what a rapidjson parser would complain about
    NUMBER_OK = 0
    NUMBER_INVALID = 1   # at the position returned
    NUMBER_FRACTION = 2  # no digit after the point, at the position returned
    NUMBER_EXPONENT = 3  # no digit in the exponent, at the position returned
    NUMBER_TOO_BIG = 4   # overflows a double; reported at the number's start

cdef struct Number:
    NumberKind kind
    NumberError error
    bint negative
    uint64_t magnitude
    double real

cdef const unsigned char* parse_number(const unsigned char* p, const unsigned char* end, Number* out) except NULL
cdef const unsigned char* quick_double(
    const unsigned char* p, const unsigned char* end, double* out
) noexcept nogil
cdef char* print_uint(char* out, uint64_t value) noexcept nogil    # 20 characters
cdef char* print_int(char* out, int64_t value) noexcept nogil      # 20 characters
cdef char* print_double(char* out, double value) noexcept nogil    # 26 characters
