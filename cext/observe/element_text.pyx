"""The text of a traced tensor's elements, joined by commas, as it stands between the quotes of a JSON string.

Traces with tensors may come with every request, and each may have hundred thousands of elements: in Python their text
took two microseconds each and, as the writer's thread had the interpreter's lock for that, slowed down the loop. Here
it is made without the lock, and the core is offered to others on the way (loop/yielding).

A real number is shown with the fewest digits that are this value and no other of its type, as numpy does.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.math cimport ldexp
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from neptrio.codec.bounded cimport add_char, add_many, add_text
from neptrio.codec.json_writer cimport Writer
from neptrio.codec.number_text cimport PRINT_ROOM, put_int, put_uint, shortest_digits
from neptrio.request.sched cimport sched_yield
from neptrio.request.infer_request cimport (
    DT_BF16,
    DT_BOOL,
    DT_FP16,
    DT_FP32,
    DT_FP64,
    DT_INT8,
    DT_INT16,
    DT_INT32,
    DT_INT64,
    DT_UINT8,
    DT_UINT16,
    DT_UINT32,
    DT_UINT64,
    element_size,
)

cdef enum:
    LONGEST = 32             # characters of a number and its comma
    OFFER_NUMBERS = 1024     # so many are a tenth of a millisecond
    OFFER_BYTES = 32768      # so many of strings, too
    AROUND = 5               # characters around a string: two quotes with their backslashes, and a comma
    WIDEST = 7               # characters that a byte of a string becomes at most: \\\\x80

cdef const char* HEX = "0123456789abcdef"


cdef char* _real(char* out, char* end, uint64_t bits, int fraction_bits, int exponent_bits) noexcept nogil:
    """Prints an IEEE 754 number with so many bits of fraction and exponent."""
    cdef char[PRINT_ROOM] digits
    cdef uint64_t fraction = bits & ((<uint64_t>1 << fraction_bits) - 1)
    cdef int most = (1 << exponent_bits) - 1
    cdef int biased = <int>(bits >> fraction_bits) & most
    cdef int q = 1 - (most >> 1) - fraction_bits    # the exponent of the last bit, of the smallest numbers
    cdef int exponent, count
    cdef uint64_t whole
    cdef double size
    if biased == most and fraction:
        return add_text(out, end, b"nan", 3)
    if bits >> (fraction_bits + exponent_bits):
        out = add_char(out, end, b"-")
    if biased == most:
        return add_text(out, end, b"inf", 3)
    if biased == 0 and fraction == 0:
        return add_text(out, end, b"0.0", 3)
    if biased:
        fraction |= <uint64_t>1 << fraction_bits
        q += biased - 1
    whole = shortest_digits(fraction, q, biased > 1 and fraction == <uint64_t>1 << fraction_bits, &exponent)
    size = ldexp(<double>fraction, q)
    while whole % 10 == 0:
        whole //= 10
        exponent += 1
    count = <int>(put_uint(digits, digits + PRINT_ROOM, whole) - digits)
    exponent += count - 1                           # now of the first digit
    if size < 1e-4 or size >= 1e16:
        out = add_char(out, end, digits[0])
        if count > 1:
            out = add_text(add_char(out, end, b"."), end, digits + 1, count - 1)
        out = add_char(add_char(out, end, b"e"), end, 45 if exponent < 0 else 43)     # - or +
        exponent = -exponent if exponent < 0 else exponent
        if exponent < 10:
            out = add_char(out, end, b"0")
        return put_uint(out, end, exponent)
    if exponent < 0:
        out = add_many(add_text(out, end, b"0.", 2), end, b"0", -exponent - 1)
        return add_text(out, end, digits, count)
    if count <= exponent + 1:
        out = add_many(add_text(out, end, digits, count), end, b"0", exponent + 1 - count)
        return add_text(out, end, b".0", 2)
    out = add_char(add_text(out, end, digits, exponent + 1), end, b".")
    return add_text(out, end, digits + exponent + 1, count - exponent - 1)


cdef char* _number(char* out, char* end, const char* p, int dtype) noexcept nogil:
    cdef uint16_t half
    cdef uint32_t narrow
    cdef uint64_t wide
    if dtype == DT_FP32:
        memcpy(&narrow, p, 4)
        return _real(out, end, narrow, 23, 8)
    if dtype == DT_FP64:
        memcpy(&wide, p, 8)
        return _real(out, end, wide, 52, 11)
    if dtype == DT_FP16:
        memcpy(&half, p, 2)
        return _real(out, end, half, 10, 5)
    if dtype == DT_BF16:    # as the FP32 that it is the upper half of
        memcpy(&half, p, 2)
        return _real(out, end, <uint64_t>half << 16, 23, 8)
    if dtype == DT_INT8:
        return put_int(out, end, (<const int8_t*>p)[0])
    if dtype == DT_INT16:
        return put_int(out, end, (<const int16_t*>p)[0])
    if dtype == DT_INT32:
        return put_int(out, end, (<const int32_t*>p)[0])
    if dtype == DT_INT64:
        return put_int(out, end, (<const int64_t*>p)[0])
    if dtype == DT_UINT16:
        return put_uint(out, end, (<const uint16_t*>p)[0])
    if dtype == DT_UINT32:
        return put_uint(out, end, (<const uint32_t*>p)[0])
    if dtype == DT_UINT64:
        return put_uint(out, end, (<const uint64_t*>p)[0])
    return put_uint(out, end, (<const uint8_t*>p)[0])


def numbers_text(bytes raw not None, int dtype) -> bytes:
    """The elements in `raw` as text. BF16 is printed as FP32. Raises ValueError for BYTES and unknown datatypes."""
    cdef int size
    cdef Py_ssize_t i = 0, n, stop
    cdef const char* p = PyBytes_AS_STRING(raw)
    cdef char* out
    cdef char* end
    cdef Writer w
    if not (dtype == DT_BOOL or DT_UINT8 <= dtype <= DT_FP64 or dtype == DT_BF16):
        raise ValueError(f"elements of datatype {dtype} are no numbers")
    size = element_size(dtype)
    n = PyBytes_GET_SIZE(raw) // size
    if n == 0:
        return b""
    w = Writer(min(n, OFFER_NUMBERS) * LONGEST + PRINT_ROOM)
    with nogil:
        while i < n:
            out = w.need(OFFER_NUMBERS * LONGEST + PRINT_ROOM)
            end = w.end()
            stop = i + OFFER_NUMBERS if n - i > OFFER_NUMBERS else n
            while i < stop:
                out = add_char(_number(out, end, p + i * size, dtype), end, b",")
                i += 1
            w.wrote(out)
            sched_yield()
    w.used -= 1    # the last comma
    return w.take()


cdef inline int _sequence(const uint8_t* p, Py_ssize_t left) noexcept nogil:
    """How many bytes the UTF-8 character at p has; 0: there is none."""
    cdef uint8_t c = p[0]
    if c < 0x80:
        return 1
    if c < 0xC2 or c > 0xF4 or left < 2 or p[1] & 0xC0 != 0x80:
        return 0
    if c < 0xE0:
        return 2
    if left < 3 or p[2] & 0xC0 != 0x80:
        return 0
    if c < 0xF0:
        # no longer than needed, and no half of a surrogate pair
        return 0 if (c == 0xE0 and p[1] < 0xA0) or (c == 0xED and p[1] >= 0xA0) else 3
    if left < 4 or p[3] & 0xC0 != 0x80 or (c == 0xF0 and p[1] < 0x90) or (c == 0xF4 and p[1] >= 0x90):
        return 0
    return 4


cdef char* _string(char* out, char* end, const uint8_t* p, Py_ssize_t n, bint* is_text) noexcept nogil:
    """Prints a string in quotes with backslashes, and all of that once more as JSON. Bytes that are no UTF-8 are \\xNN."""
    cdef Py_ssize_t i = 0, mark = OFFER_BYTES
    cdef int length
    cdef uint8_t c
    out = add_text(out, end, b'\\"', 2)
    while i < n:
        if i >= mark:
            mark += OFFER_BYTES
            sched_yield()
        c = p[i]
        if 32 <= c < 0x80 and c != b'"' and c != b"\\":
            out = add_char(out, end, c)
            i += 1
            continue
        length = _sequence(p + i, n - i)
        if length == 0:
            is_text[0] = False
            out = add_char(add_char(add_text(out, end, b"\\\\\\\\x", 5), end, HEX[c >> 4]), end, HEX[c & 15])
            length = 1
        elif c == b'"':
            out = add_text(out, end, b'\\\\\\"', 4)
        elif c == b"\\":
            out = add_text(out, end, b"\\\\\\\\", 4)
        elif c < 32:
            out = add_char(add_char(add_text(out, end, b"\\u00", 4), end, HEX[c >> 4]), end, HEX[c & 15])
        else:
            out = add_text(out, end, <const char*>p + i, length)
        i += length
    return add_text(out, end, b'\\",', 3)


def strings_text(bytes raw not None) -> tuple:
    # type: (...) -> tuple[bytes, int, int, bool]
    """The elements of a BYTES tensor as on the wire: (text, number of elements, bytes of them, whether all are UTF-8).

    An element that is cut off at the end of `raw` is left out.
    """
    cdef const uint8_t* p = <const uint8_t*>PyBytes_AS_STRING(raw)
    cdef Py_ssize_t n = PyBytes_GET_SIZE(raw), at = 0, count = 0, since = 0
    cdef uint32_t size
    cdef bint is_text = True
    cdef char* out
    cdef Writer w = Writer(n + n // 4 + AROUND)
    with nogil:
        while n - at >= 4:
            memcpy(&size, p + at, 4)
            if size > n - at - 4:
                break
            out = w.need(<Py_ssize_t>size * WIDEST + AROUND)
            w.wrote(_string(out, w.end(), p + at + 4, size, &is_text))
            at += 4 + <Py_ssize_t>size
            count += 1
            if at - since >= OFFER_BYTES:
                since = at
                sched_yield()
    if count:
        w.used -= 1    # the last comma
    return w.take(), count, at, is_text
