# Numbers as JSON text. Parsing is correctly rounded; printing gives the shortest digits that read back as the same
# double. A print function writes before `end` only and returns the end of its text (rules: cext/codec/bounded.pxd);
# between the two it may overwrite PRINT_ROOM bytes, however short the text is. With as much room it is fastest.
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from neptrio.codec.bounded cimport add_char

cdef extern from *:
    """
    #include <stdint.h>
    #define EIGHT_ZEROS 0x3030303030303030ull    /* as text */
    /* eight ASCII digits at once, little-endian */
    static inline int all_digits(uint64_t v) {
        return ((v & 0xF0F0F0F0F0F0F0F0ull) |
                (((v + 0x0606060606060606ull) & 0xF0F0F0F0F0F0F0F0ull) >> 4)) == 0x3333333333333333ull;
    }
    static inline uint64_t eight_digits(uint64_t v) {
        v -= 0x3030303030303030ull;
        v = v * 10 + (v >> 8);
        return (((v & 0x000000FF000000FFull) * 0x000F424000000064ull) +
                (((v >> 16) & 0x000000FF000000FFull) * 0x0000271000000001ull)) >> 32;
    }
    /* a number below 10**8 as eight digits, one per byte, the first in the lowest: two halves, four
       pairs, eight digits, each step dividing all parts at once by a multiplication */
    static inline uint64_t spread_digits(uint32_t v) {
        uint64_t halves = v / 10000 | (uint64_t)(v % 10000) << 32;
        uint64_t hundreds = halves * 10486 >> 20 & 0x0000007F0000007Full;
        uint64_t pairs = hundreds + ((halves - 100 * hundreds) << 16);
        uint64_t tens = pairs * 103 >> 10 & 0x000F000F000F000Full;
        return tens + ((pairs - 10 * tens) << 8);
    }
    static inline int leading_zero_digits(uint64_t spread) { return __builtin_ctzll(spread | 1ull << 56) >> 3; }
    """
    const uint64_t EIGHT_ZEROS
    bint all_digits(uint64_t v) noexcept nogil
    uint64_t eight_digits(uint64_t v) noexcept nogil
    uint64_t spread_digits(uint32_t v) noexcept nogil
    int leading_zero_digits(uint64_t spread) noexcept nogil

cdef enum NumberKind:
    NUMBER_INTEGER = 0   # without fraction or exponent, fits 64 bits: `negative` and `magnitude`
    NUMBER_HUGE = 1      # without fraction or exponent, does not fit: `real` is the nearest double
    NUMBER_REAL = 2      # any other: `real`

cdef enum NumberError:   # the errors of a rapidjson parser
    NUMBER_OK = 0
    NUMBER_INVALID = 1   # not a number, at the position returned
    NUMBER_FRACTION = 2  # no digit after the point, at the position returned
    NUMBER_EXPONENT = 3  # no digit in the exponent, at the position returned
    NUMBER_TOO_BIG = 4   # overflows a double; reported at the number's start

cdef struct Number:
    NumberKind kind
    NumberError error
    bint negative
    uint64_t magnitude
    double real

cdef const unsigned char* parse_number(const unsigned char* p, const unsigned char* end, Number* out) except NULL nogil
cdef const unsigned char* quick_double(
    const unsigned char* p, const unsigned char* end, double* out
) noexcept nogil
cdef enum:
    PRINT_ROOM = 48

cdef int no_room() except -1 nogil         # raises AssertionError: a text reached the end of its room
cdef char* print_uint(char* out, char* end, uint64_t value) noexcept nogil    # at most 20 characters
cdef char* print_int(char* out, char* end, int64_t value) noexcept nogil      # at most 20 characters
cdef char* print_double(char* out, char* end, double value) noexcept nogil    # at most 26 characters
# The shortest decimal digits * 10**exponent that reads back as c * 2**q in its type; of several, the closest. 0 < c < 2**53;
# `closer`: the next smaller number of the type is half as far away as the next larger one.
cdef uint64_t shortest_digits(uint64_t c, int q, bint closer, int* exponent) noexcept nogil


cdef inline char* put_uint(char* out, char* end, uint64_t value) noexcept nogil:
    """print_uint(), with numbers of up to eight digits printed inline."""
    cdef uint64_t spread
    cdef int zeros
    if value >= 100000000 or end - out < 8:
        return print_uint(out, end, value)
    spread = spread_digits(<uint32_t>value)
    zeros = leading_zero_digits(spread)
    spread = (spread + EIGHT_ZEROS) >> (8 * zeros)
    memcpy(out, &spread, 8)
    return out + 8 - zeros


cdef inline char* put_int(char* out, char* end, int64_t value) noexcept nogil:
    """print_int(), with numbers of up to eight digits printed inline."""
    if value < 0:
        return put_uint(add_char(out, end, b"-"), end, <uint64_t>0 - <uint64_t>value)
    return put_uint(out, end, <uint64_t>value)
