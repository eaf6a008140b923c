"""The text of a traced tensor's numbers, joined by commas.

Traces with tensors may come with every request, and each may have hundred thousands of numbers: in Python their text
took two microseconds each and, as the writer's thread had the interpreter's lock for that, slowed down the loop. Here
it is made without the lock.

A real number is shown with the fewest digits that are this value and no other of its type, as numpy does.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.math cimport fabs, isinf, isnan
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport atoi, strtod
from libc.string cimport memcpy, memset

from neptrio.codec.number_text cimport print_int, put_uint
from neptrio.request.infer_request cimport (
    DT_BOOL,
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

cdef extern from "float.h" nogil:
    const double FLT_MIN
    const double DBL_MIN

cdef extern from "stdlib.h" nogil:
    float strtof(const char* text, char** end)

cdef enum:
    LONGEST = 32             # characters of a number and its comma
    BEHIND = 48              # bytes that printing an integer may overwrite
    LEAST_FP32 = 6           # so many digits become a number of the type and the same digits again
    MOST_FP32 = 9            # digits that tell all of them apart
    LEAST_FP64 = 15
    MOST_FP64 = 17


cdef char* _real(char* out, double value, bint narrow) noexcept nogil:
    """Prints a number; `narrow`: it is a float."""
    cdef char[40] text       # d.ddde+xx
    cdef char[20] digits
    cdef int precision, least, count = 0, exponent, i
    cdef int most = MOST_FP32 if narrow else MOST_FP64
    cdef double size = fabs(value)
    if isnan(value):
        memcpy(out, b"nan", 3)
        return out + 3
    if value < 0 or (value == 0 and 1 / value < 0):
        out[0] = b"-"
        out += 1
    if isinf(value):
        memcpy(out, b"inf", 3)
        return out + 3
    if value == 0:
        memcpy(out, b"0.0", 3)
        return out + 3
    least = LEAST_FP32 if narrow else LEAST_FP64
    if size < (FLT_MIN if narrow else DBL_MIN):
        least = 1    # the smallest numbers have fewer digits
    for precision in range(least, most + 1):
        snprintf(text, 40, b"%.*e", precision - 1, size)
        if precision == most:
            break
        if (strtof(text, NULL) == <float>size) if narrow else (strtod(text, NULL) == size):
            break
    i = 0
    while text[i] != b"e":
        if 48 <= text[i] <= 57:    # a model may have set a locale with another decimal point
            digits[count] = text[i]
            count += 1
        i += 1
    exponent = atoi(text + i + 1)
    while count > 1 and digits[count - 1] == b"0":
        count -= 1
    if size < 1e-4 or size >= 1e16:
        out[0] = digits[0]
        out += 1
        if count > 1:
            out[0] = b"."
            memcpy(out + 1, digits + 1, count - 1)
            out += count
        return out + snprintf(out, 8, b"e%c%02d", <int>(b"-" if exponent < 0 else b"+"), -exponent if exponent < 0 else exponent)
    if exponent < 0:
        memcpy(out, b"0.", 2)
        memset(out + 2, b"0", -exponent - 1)
        out += 1 - exponent
        memcpy(out, digits, count)
        return out + count
    if count <= exponent + 1:
        memcpy(out, digits, count)
        memset(out + count, b"0", exponent + 1 - count)
        out += exponent + 1
        memcpy(out, b".0", 2)
        return out + 2
    memcpy(out, digits, exponent + 1)
    out[exponent + 1] = b"."
    memcpy(out + exponent + 2, digits + exponent + 1, count - exponent - 1)
    return out + count + 1


cdef char* _number(char* out, const char* p, int dtype) noexcept nogil:
    cdef float narrow
    cdef double wide
    if dtype == DT_FP32:
        memcpy(&narrow, p, 4)
        return _real(out, narrow, True)
    if dtype == DT_FP64:
        memcpy(&wide, p, 8)
        return _real(out, wide, False)
    if dtype == DT_INT8:
        return print_int(out, (<const int8_t*>p)[0])
    if dtype == DT_INT16:
        return print_int(out, (<const int16_t*>p)[0])
    if dtype == DT_INT32:
        return print_int(out, (<const int32_t*>p)[0])
    if dtype == DT_INT64:
        return print_int(out, (<const int64_t*>p)[0])
    if dtype == DT_UINT16:
        return put_uint(out, (<const uint16_t*>p)[0])
    if dtype == DT_UINT32:
        return put_uint(out, (<const uint32_t*>p)[0])
    if dtype == DT_UINT64:
        return put_uint(out, (<const uint64_t*>p)[0])
    return put_uint(out, (<const uint8_t*>p)[0])


def numbers_text(bytes raw not None, int dtype):
    """The elements in `raw` as text. Raises ValueError for a datatype other than booleans, integers, FP32 and FP64."""
    cdef int size = element_size(dtype)
    cdef Py_ssize_t i, n
    cdef const char* p = PyBytes_AS_STRING(raw)
    cdef char* begin
    cdef char* out
    if not (dtype == DT_BOOL or DT_UINT8 <= dtype <= DT_INT64 or dtype == DT_FP32 or dtype == DT_FP64):
        raise ValueError(f"numbers of datatype {dtype} have no text here")
    n = len(raw) // size
    if n == 0:
        return ""
    made = PyBytes_FromStringAndSize(NULL, n * LONGEST + BEHIND)
    begin = out = PyBytes_AS_STRING(made)
    with nogil:
        for i in range(n):
            out = _number(out, p + i * size, dtype)
            out[0] = b","
            out += 1
    return begin[: out - 1 - begin].decode("ascii")
