"""Reads and prints numbers in JSON text, correctly rounded both ways.

The problem: a 1 MiB FP32 tensor has 262,144 numbers of up to 17 digits, and Python's own conversions take half a
microsecond each. The choice: reading uses the Eisel-Lemire multiplication (and CPython's exact conversion for the few
cases that it cannot decide), printing uses the Schubfach search. Both need powers of ten as 128-bit significands,
which are computed once, from Python integers.

Rules:
 1. Reading rounds to the nearest double, ties to even, whatever the number of digits.
 2. Printing chooses the shortest digits that read back as the same double; of several, the closest to its value.
 3. Printed numbers look as rapidjson prints them: 1.0, 0.001, 1e-7, up to 21 digits before the point
    (docs/protocol/observed.md 3). NaN and infinities are NaN, Infinity and -Infinity.
"""
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.math cimport INFINITY, NAN
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from neptrio.codec.bounded cimport add_text

cdef extern from *:
    """
    #include <stdint.h>
    static inline uint64_t mul_128(uint64_t a, uint64_t b, uint64_t *low) {
        unsigned __int128 p = (unsigned __int128)a * b;
        *low = (uint64_t)p;
        return (uint64_t)(p >> 64);
    }
    static inline int leading_zeros(uint64_t v) { return __builtin_clzll(v); }
    """
    uint64_t mul_128(uint64_t a, uint64_t b, uint64_t* low) noexcept nogil
    int leading_zeros(uint64_t v) noexcept nogil

cdef enum:
    LOW_POWER = -342
    HIGH_POWER = 325
    POWERS = 668         # HIGH_POWER - LOW_POWER + 1

cdef struct Power:
    uint64_t high
    uint64_t low

cdef Power rounded_up[POWERS]    # 10**k in 128 bits, rounded up: for printing
cdef Power truncated[POWERS]     # 5**k in 128 bits, rounded as Eisel and Lemire do: for reading
cdef double exact_power[23]      # the powers of ten that are exact doubles

cdef uint64_t ALL_ONES = 0xFFFFFFFFFFFFFFFF


def _fill_tables():
    """Computes the significands of the powers of ten: once, at import, in about a millisecond."""
    mask = (1 << 64) - 1
    for i in range(23):
        exact_power[i] = float(10**i)
    for k in range(LOW_POWER, HIGH_POWER + 1):
        if k >= 0:
            n = 10**k
            bits = n.bit_length()
            up = n << (128 - bits) if bits <= 128 else -(-n >> (bits - 128))
            n = 5**k
            bits = n.bit_length()
            down = n << (128 - bits) if bits <= 128 else n >> (bits - 128)
        else:
            n = 10 ** -k
            up = -(-(1 << (n.bit_length() + 127)) // n)
            n = 5 ** -k
            down = (1 << (n.bit_length() + 127)) // n + 1
        rounded_up[k - LOW_POWER].high = up >> 64
        rounded_up[k - LOW_POWER].low = up & mask
        truncated[k - LOW_POWER].high = down >> 64
        truncated[k - LOW_POWER].low = down & mask


_fill_tables()


# ---------------------------------------------------------------- reading

cdef bint eisel_lemire(uint64_t w, int q, double* out) noexcept nogil:
    """Finds the double nearest to w * 10**q; False when 128 bits cannot decide it. w is not 0."""
    cdef uint64_t low, high, more_low, more_high, mantissa, bits
    cdef int lz, upper, power
    if q < LOW_POWER or q > 308:
        return False
    lz = leading_zeros(w)
    w <<= lz
    high = mul_128(w, truncated[q - LOW_POWER].high, &low)
    if (high & 0x1FF) == 0x1FF:
        more_high = mul_128(w, truncated[q - LOW_POWER].low, &more_low)
        low += more_high
        if low < more_high:
            high += 1
    if low == ALL_ONES and (q < -27 or q > 55):
        return False
    upper = <int>(high >> 63)
    mantissa = high >> (upper + 9)
    power = ((217706 * q) >> 16) + 63 + upper - lz + 1023
    if power <= 0 or power >= 0x7FF:
        return False                     # subnormal or overflow: the exact conversion decides
    if low <= 1 and -4 <= q <= 23 and (mantissa & 3) == 1 and (mantissa << (upper + 9)) == high:
        mantissa &= ~<uint64_t>1         # exactly half way between two doubles: choose the even one
    mantissa += mantissa & 1
    mantissa >>= 1
    if mantissa >= (<uint64_t>2 << 52):
        mantissa = <uint64_t>1 << 52
        power += 1
        if power >= 0x7FF:
            return False
    bits = (mantissa & ~(<uint64_t>1 << 52)) | (<uint64_t>power << 52)
    memcpy(out, &bits, 8)
    return True


cdef double exact(const unsigned char* start, const unsigned char* end) except? -1.0 nogil:
    """CPython's conversion of the number between the pointers; infinity when it overflows."""
    cdef double found
    with gil:  # needed only for numbers that 128 bits cannot decide, which are rare
        found = float(PyBytes_FromStringAndSize(<const char*>start, end - start))
    return found


cdef inline bint is_digit(unsigned char c) noexcept nogil:
    return c - 48 <= 9 and c >= 48


cdef const unsigned char* parse_number(
    const unsigned char* p, const unsigned char* end, Number* out
) except NULL nogil:
    """Reads a JSON number (or NaN, Inf, Infinity) at `p`; returns where it, or its error, ends."""
    cdef const unsigned char* start = p
    cdef const unsigned char* mark
    cdef uint64_t w = 0
    cdef int significant = 0, exponent = 0, d
    cdef Py_ssize_t scale = 0            # wide enough for the number of digits of any text
    cdef bint whole = True, cut = False, minus_exponent = False
    cdef double value
    out.error = NUMBER_OK
    out.negative = False
    if p < end and p[0] == b"-":
        out.negative = True
        p += 1
    if p < end and p[0] == b"0":
        p += 1
    elif end - p >= 2 and is_digit(p[0]) and (p[1] == b"," or p[1] == b"]" or p[1] == b"}"):
        out.magnitude = p[0] - 48       # a single digit, like most numbers in shapes
        out.kind = NUMBER_INTEGER
        return p + 1
    elif p < end and is_digit(p[0]):
        while p < end and is_digit(p[0]):
            if significant < 19:
                w = w * 10 + (p[0] - 48)
                significant += 1
            else:
                d = p[0] - 48
                if significant == 19 and w <= (ALL_ONES - d) // 10:
                    w = w * 10 + d       # a 20th digit may still fit into 64 bits
                    significant = 20
                else:
                    cut = True
                    scale += 1
            p += 1
    elif p < end and (p[0] == b"N" or p[0] == b"I"):
        return parse_name(p, end, out)
    else:
        out.error = NUMBER_INVALID
        return p
    if p < end and p[0] == b".":
        whole = False
        p += 1
        if p >= end or not is_digit(p[0]):
            out.error = NUMBER_FRACTION
            return p
        while p < end and is_digit(p[0]):
            if significant < 19:
                w = w * 10 + (p[0] - 48)
                if w:
                    significant += 1
                scale -= 1
            elif p[0] != b"0":
                cut = True
            p += 1
    if p < end and (p[0] == b"e" or p[0] == b"E"):
        whole = False
        p += 1
        if p < end and (p[0] == b"+" or p[0] == b"-"):
            minus_exponent = p[0] == b"-"
            p += 1
        if p >= end or not is_digit(p[0]):
            out.error = NUMBER_EXPONENT
            return p
        while p < end and is_digit(p[0]):
            if exponent < 100000:
                exponent = exponent * 10 + (p[0] - 48)
            p += 1
        scale += -exponent if minus_exponent else exponent
    if whole and not cut:
        out.kind = NUMBER_INTEGER
        out.magnitude = w
        return p
    out.kind = NUMBER_HUGE if whole else NUMBER_REAL
    if w == 0 and not cut:
        if scale > 308:         # rapidjson looks at the exponent alone
            out.error = NUMBER_TOO_BIG
            return start
        value = 0.0
    elif not cut and w <= (<uint64_t>1 << 53) and -22 <= scale <= 22:
        value = <double>w / exact_power[-scale] if scale < 0 else <double>w * exact_power[scale]
    elif cut or not -100000 < scale < 100000 or not eisel_lemire(w, <int>scale, &value):
        mark = start + 1 if out.negative else start
        value = exact(mark, p)
        if value == INFINITY:
            out.error = NUMBER_TOO_BIG
            return start
    out.real = -value if out.negative else value
    return p


cdef const unsigned char* quick_double(
    const unsigned char* p, const unsigned char* end, double* out
) noexcept nogil:
    """Reads a number in a common form: at most 19 digits, and decided by 128 bits.

    Returns where it ends, or NULL when parse_number() must read it. `end` must be at least 64 bytes after `p`, and
    nothing from `end` on is read: every loop stops 8 bytes before it, and at most a point, an `e` and a sign can
    follow a loop.
    """
    cdef bint minus = p[0] == b"-"
    cdef const unsigned char* start
    cdef const unsigned char* fraction
    cdef const unsigned char* limit = end - 8
    cdef uint64_t w = 0, eight
    cdef Py_ssize_t scale = 0, digits
    cdef int exponent = 0
    cdef unsigned char c
    cdef double value
    cdef bint minus_exponent
    if minus:
        p += 1
    start = p
    while p < limit:
        c = p[0] - 48
        if c > 9:
            break
        w = w * 10 + c
        p += 1
    digits = p - start
    if digits == 0 or digits > 19 or (digits > 1 and start[0] == b"0"):
        return NULL
    if p[0] == b".":
        p += 1
        fraction = p
        while p < limit:
            memcpy(&eight, p, 8)
            if not all_digits(eight):
                break
            w = w * 100000000 + eight_digits(eight)
            p += 8
        while p < limit:
            c = p[0] - 48
            if c > 9:
                break
            w = w * 10 + c
            p += 1
        scale = fraction - p
        if scale == 0:
            return NULL
        digits -= scale
        if digits > 19:
            while start < p and (start[0] == b"0" or start[0] == b"."):     # leading zeros are not significant digits
                if start[0] == b"0":
                    digits -= 1
                start += 1
            if digits > 19:
                return NULL
    if p[0] == b"e" or p[0] == b"E":
        p += 1
        minus_exponent = p[0] == b"-"
        if minus_exponent or p[0] == b"+":
            p += 1
        start = p
        while p < limit and p - start <= 4:
            c = p[0] - 48
            if c > 9:
                break
            exponent = exponent * 10 + c
            p += 1
        if p == start or p - start > 4:
            return NULL
        scale += -exponent if minus_exponent else exponent
    if p >= limit:
        return NULL
    if w == 0:
        if scale > 308:
            return NULL      # parse_number says what is wrong with it
        value = 0.0
    elif scale == 0 and w <= (<uint64_t>1 << 53):
        value = <double>w
    elif w <= (<uint64_t>1 << 53) and -22 <= scale <= 22:
        value = <double>w / exact_power[-scale] if scale < 0 else <double>w * exact_power[scale]
    elif not -100000 < scale < 100000 or not eisel_lemire(w, <int>scale, &value):
        return NULL
    out[0] = -value if minus else value
    return p


cdef const unsigned char* parse_name(const unsigned char* p, const unsigned char* end, Number* out) noexcept nogil:
    """Reads NaN, Inf or Infinity letter by letter, so that an error is reported where rapidjson reports it."""
    cdef const char* word = "NaN" if p[0] == b"N" else "Inf"
    cdef int i
    out.kind = NUMBER_REAL
    for i in range(3):
        if p >= end or p[0] != <unsigned char>word[i]:
            out.error = NUMBER_INVALID
            return p
        p += 1
    if word[0] == b"N":
        out.real = NAN
        return p
    if p < end and p[0] == b"i":
        word = "inity"
        for i in range(5):
            if p >= end or p[0] != <unsigned char>word[i]:
                out.error = NUMBER_INVALID
                return p
            p += 1
    out.real = -INFINITY if out.negative else INFINITY
    return p


# ---------------------------------------------------------------- printing

cdef int no_room() except -1 nogil:
    with gil:
        raise AssertionError("a text is longer than the room that was made for it")


cdef char* print_uint(char* out, char* end, uint64_t value) noexcept nogil:
    cdef char text[48]
    cdef int n = digits_backwards(text, value)
    if end - out < 24:
        return add_text(out, end, text + 24 - n, n)
    memcpy(out, text + 24 - n, 24)
    return out + n


cdef char* print_int(char* out, char* end, int64_t value) noexcept nogil:
    return put_int(out, end, value)


cdef inline uint64_t round_to_odd(Power g, uint64_t c) noexcept nogil:
    """The high 64 bits of g * c, with the lowest bit set if any bit below them was not zero."""
    cdef uint64_t x_low, y_low, x_high, y_high
    x_high = mul_128(g.low, c, &x_low)
    y_high = mul_128(g.high, c, &y_low)
    y_low += x_high
    if y_low < x_high:
        y_high += 1
    return y_high | (y_low > 1)


cdef uint64_t shortest(uint64_t bits, int* exponent) noexcept nogil:
    """The shortest decimal of a positive finite double: digits * 10**exponent."""
    cdef uint64_t fraction = bits & ((<uint64_t>1 << 52) - 1)
    cdef int biased = <int>(bits >> 52) & 0x7FF
    if biased:
        return schubfach(fraction | (<uint64_t>1 << 52), biased - 1075, fraction == 0 and biased > 1, exponent)
    return schubfach(fraction, -1074, False, exponent)


cdef uint64_t shortest_digits(uint64_t c, int q, bint closer, int* exponent) noexcept nogil:
    return schubfach(c, q, closer, exponent)


cdef inline uint64_t schubfach(uint64_t c, int q, bint closer, int* exponent) noexcept nogil:
    """See shortest_digits()."""
    cdef uint64_t s, tens, vb, lower, upper
    cdef int k, h
    cdef bint even, under, over
    cdef Power g
    if -53 < q <= 0 and (c & ((<uint64_t>1 << -q) - 1)) == 0:
        exponent[0] = 0
        return c >> -q
    even = (c & 1) == 0
    k = (q * 1262611 - (524031 if closer else 0)) >> 22
    h = q + ((-k * 1741647) >> 19) + 1
    g = rounded_up[-k - LOW_POWER]
    lower = round_to_odd(g, (4 * c - 2 + closer) << h) + (0 if even else 1)
    vb = round_to_odd(g, (4 * c) << h)
    upper = round_to_odd(g, (4 * c + 2) << h) - (0 if even else 1)
    s = vb // 4
    if s >= 10:
        tens = s // 10
        under = lower <= 40 * tens
        over = 40 * tens + 40 <= upper
        if under != over:
            exponent[0] = k + 1
            return tens + over
    under = lower <= 4 * s
    over = 4 * s + 4 <= upper
    exponent[0] = k
    if under != over:
        return s + over
    if vb > 4 * s + 2 or (vb == 4 * s + 2 and s & 1):
        s += 1
    return s


cdef char* print_double(char* out, char* end, double value) noexcept nogil:
    cdef char[PRINT_ROOM] wide
    if end - out < PRINT_ROOM:
        return add_text(out, end, wide, _double(wide, value) - wide)
    return _double(out, value)


cdef inline char* _double(char* out, double value) noexcept nogil:
    """Prints into PRINT_ROOM bytes."""
    cdef uint64_t bits, digits
    cdef int exponent, n, point
    cdef char text[48]
    cdef char* start
    memcpy(&bits, &value, 8)
    if (bits >> 52) & 0x7FF == 0x7FF:
        if bits & ((<uint64_t>1 << 52) - 1):
            memcpy(out, b"NaN", 3)
            return out + 3
        if bits >> 63:
            out[0] = b"-"
            out += 1
        memcpy(out, b"Infinity", 8)
        return out + 8
    if bits >> 63:
        out[0] = b"-"
        out += 1
        bits &= ~(<uint64_t>1 << 63)
    if bits == 0:
        memcpy(out, b"0.0", 3)
        return out + 3
    digits = shortest(bits, &exponent)
    while digits % 10 == 0:
        digits //= 10
        exponent += 1
    n = digits_backwards(text, digits)
    start = text + 24 - n
    point = n + exponent                 # how many digits are before the decimal point
    # copying always 24 bytes takes three moves, whatever number of them is wanted
    if exponent >= 0 and point <= 21:
        memcpy(out, start, 24)
        memset(out + n, 48, exponent)
        memcpy(out + point, b".0", 2)
        return out + point + 2
    if 0 < point <= 21:
        memcpy(out, start, 24)
        out[point] = b"."
        memcpy(out + point + 1, start + point, 24)
        return out + n + 1
    if -6 < point <= 0:
        memcpy(out, b"0.000000", 8)
        out += 2 - point
        memcpy(out, start, 24)
        return out + n
    out[0] = start[0]
    out += 1
    if n > 1:
        out[0] = b"."
        memcpy(out + 1, start + 1, 24)
        out += n
    out[0] = b"e"
    return put_int(out + 1, out + 1 + 12, point - 1)     # a sign, three digits, and the eight bytes that it overwrites


cdef inline int digits_backwards(char* text, uint64_t value) noexcept nogil:
    """Writes the digits so that they end at text + 24; returns how many there are."""
    cdef int n = 24
    cdef uint64_t rest, spread
    while value >= 100000000:
        rest = value // 100000000
        spread = spread_digits(<uint32_t>(value - rest * 100000000)) + EIGHT_ZEROS
        value = rest
        n -= 8
        memcpy(text + n, &spread, 8)
    spread = spread_digits(<uint32_t>value)
    n -= 8
    rest = spread + EIGHT_ZEROS
    memcpy(text + n, &rest, 8)
    return 24 - n - leading_zero_digits(spread)
