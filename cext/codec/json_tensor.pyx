"""A tensor's elements as a JSON array, and back.

The problem: a 1 MiB JSON tensor has 262,144 numbers, which as Python objects would cost a hundred times as much as their
text. The choice: elements are read straight into the tensor's memory, and printed straight into the bytes that are
sent. Numbers in their common forms are read in a loop of their own, which leaves anything unusual to the general code.

Rules:
 1. Memory is allocated for what the text can hold, never for what a shape claims.
 2. Nested arrays are flattened; their elements must be as many as the shape has, their nesting may differ from it.
 3. Integers outside their datatype's range are refused, with the range in the error.
 4. FP16 and BF16 have no form in JSON; neither have tensors in GPU memory.
Source: docs/protocol/observed.md 3 and 4.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport (
    int8_t,
    int16_t,
    int32_t,
    int64_t,
    uint8_t,
    uint16_t,
    uint32_t,
    uint64_t,
)
from libc.string cimport memcpy

from neptrio.request.sched cimport sched_yield
from neptrio.codec.bounded cimport add_char, add_text
from neptrio.codec.json_reader cimport MAX_DEPTH, Reader, Stop
from neptrio.codec.json_strings cimport unescape
from neptrio.codec.json_writer cimport Writer
from neptrio.codec.number_text cimport (
    NUMBER_HUGE,
    NUMBER_INTEGER,
    NUMBER_REAL,
    PRINT_ROOM,
    Number,
    print_double,
    put_int,
    put_uint,
    quick_double,
)
from neptrio.request.infer_request cimport (
    DT_BF16,
    DT_BOOL,
    DT_BYTES,
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
    GPU_MEMORY,
    Tensor,
    element_size,
)

from neptrio.codec.json_reader import kind_error
from neptrio.datatypes import NAME
from neptrio.errors import Cancelled, InvalidArgument

cdef dict _NAME = NAME


cdef enum:
    STRETCH = 4 << 10          # elements after which the core is offered to others: a fifth of a millisecond
    LONG_BYTES = 64 << 10      # of text; reading less takes no longer than waiting for the GIL


cdef _mismatch(str name, str why):
    return InvalidArgument(
        f"Unable to parse 'data': Shape does not match true shape of 'data' field of input '{name}', whose shape takes {why}")


# ---------------------------------------------------------------- reading

cdef _bad_element(int dtype, str name):
    if dtype == DT_BYTES:
        error = InvalidArgument("Unable to parse JSON bytes array: attempt to access JSON non-string as string")
    elif dtype == DT_BOOL:
        error = kind_error("data", "boolean", "boolean")
    elif dtype == DT_FP32 or dtype == DT_FP64:
        error = kind_error("data", "number", "double")
    elif DT_INT8 <= dtype <= DT_INT64:
        error = kind_error("data", "signed-integer", "signed-integer")
    else:
        error = kind_error("data", "unsigned-integer", "unsigned-integer")
    return InvalidArgument(f"{error}: input '{name}' is {_NAME[dtype]}")


cdef _out_of_range(Reader s, Py_ssize_t start, int dtype, str name):
    cdef object bits = element_size(dtype) * 8     # a Python integer, since the limits need 65 bits
    cdef object one = 1
    cdef bint signed = DT_INT8 <= dtype <= DT_INT64
    literal = (<const char*>s.text)[start:min(s.at, start + 40)].decode("ascii")
    if s.at > start + 40:
        literal += f"... ({s.at - start} characters)"
    low = -(one << (bits - 1)) if signed else 0
    high = (one << (bits - 1 if signed else bits)) - 1
    return InvalidArgument(
        f"Unable to parse 'data': {literal} is out of range for {_NAME[dtype]} input '{name}' [{low}, {high}]")


cdef int _integer(Reader s, int dtype, bint signed, uint64_t limit, str name, bint* negative,
                  uint64_t* magnitude) except -1 nogil:
    """Reads an integer with a magnitude of at most `limit` (one more when it is negative)."""
    cdef const unsigned char* p = s.text + s.at
    cdef const unsigned char* end = s.text + s.end
    cdef const unsigned char* start = p
    cdef uint64_t m = 0
    cdef Number n
    cdef Py_ssize_t at = s.at
    cdef bint minus = False
    cdef unsigned char c = 0
    if p < end and p[0] == b"-":
        minus = True
        p += 1
    if p < end and 49 <= p[0] <= 57 and end - p > 19:
        # the common case: no leading zero, at most 18 digits, nothing but digits
        start = p
        while p - start < 19:
            c = p[0] - 48
            if c > 9:
                break
            m = m * 10 + c
            p += 1
        c = p[0]
        if p - start < 19 and c != b"." and c != b"e" and c != b"E":
            s.at = p - s.text
            if minus and not signed:
                with gil:
                    raise _bad_element(dtype, name)
            if m > limit + (1 if minus else 0):
                with gil:
                    raise _out_of_range(s, at, dtype, name)
            negative[0] = minus
            magnitude[0] = m
            return 0
    c = s.text[at] if at < s.end else 0
    if not (c == b"-" or 48 <= c <= 57):
        with gil:
            raise _bad_element(dtype, name)
    s.number(&n)
    if n.kind == NUMBER_REAL or (n.kind == NUMBER_INTEGER and n.negative and n.magnitude and not signed):
        with gil:
            raise _bad_element(dtype, name)
    if n.kind == NUMBER_HUGE or (n.magnitude > limit and not (
            n.negative and signed and n.magnitude == limit + 1)):
        with gil:
            raise _out_of_range(s, at, dtype, name)
    negative[0] = n.negative
    magnitude[0] = n.magnitude
    return 0


cdef int _element(Reader s, int dtype, char* out, str name, Writer strings) except -1 nogil:
    """Reads one scalar into `out`, or for BYTES appends it to `strings`."""
    cdef Number n
    cdef bint negative = False, escaped = False
    cdef uint64_t m = 0
    cdef double value
    cdef float narrow
    cdef int64_t whole
    cdef int c
    cdef Py_ssize_t start, length
    cdef uint32_t prefix
    cdef char* place
    if dtype == DT_FP32 or dtype == DT_FP64:
        c = s.peek()
        if not (c == b"-" or 48 <= c <= 57 or c == b"N" or c == b"I"):
            with gil:
                raise _bad_element(dtype, name)
        s.number(&n)
        if n.kind == NUMBER_INTEGER:
            value = <double>n.magnitude
            if n.negative:
                value = -value
        else:
            value = n.real
        if dtype == DT_FP64:
            memcpy(out, &value, 8)
        else:
            narrow = <float>value
            memcpy(out, &narrow, 4)
        return 0
    if dtype == DT_BYTES:
        if s.peek() != b'"':
            with gil:
                raise _bad_element(dtype, name)
        start = s.at + 1
        s.skip_string(&escaped)
        length = s.at - 1 - start
        place = strings.need(length + 4)
        if escaped:
            length = unescape(s.text + start, length, place + 4, strings.end())
        else:
            add_text(place + 4, strings.end(), <const char*>s.text + start, length)
        prefix = <uint32_t>length
        add_text(place, strings.end(), <const char*>&prefix, 4)
        return strings.wrote(place + 4 + length)
    if dtype == DT_BOOL:
        c = s.peek()
        if c != b"t" and c != b"f":
            with gil:
                raise _bad_element(dtype, name)
        s.skip(0)
        out[0] = 1 if c == b"t" else 0
        return 0
    if dtype == DT_INT32:
        _integer(s, dtype, True, 0x7FFFFFFF, name, &negative, &m)
    elif dtype == DT_INT64:
        _integer(s, dtype, True, 0x7FFFFFFFFFFFFFFF, name, &negative, &m)
    elif dtype == DT_INT16:
        _integer(s, dtype, True, 0x7FFF, name, &negative, &m)
    elif dtype == DT_INT8:
        _integer(s, dtype, True, 0x7F, name, &negative, &m)
    elif dtype == DT_UINT8:
        _integer(s, dtype, False, 0xFF, name, &negative, &m)
    elif dtype == DT_UINT16:
        _integer(s, dtype, False, 0xFFFF, name, &negative, &m)
    elif dtype == DT_UINT32:
        _integer(s, dtype, False, 0xFFFFFFFF, name, &negative, &m)
    else:
        _integer(s, dtype, False, 0xFFFFFFFFFFFFFFFF, name, &negative, &m)
    if negative:
        m = <uint64_t>0 - m
    memcpy(out, &m, element_size(dtype))     # little-endian: the low bytes come first
    return 0


cdef void _quick(Reader s, int dtype, int size, char* out, int64_t* n, int64_t count) noexcept nogil:
    """Reads numbers in their common forms, each followed by a comma; stops at anything else.

    _element() reads what this leaves, and reports errors in it.
    """
    cdef const unsigned char* p = s.text + s.at
    cdef const unsigned char* end = s.text + s.end
    cdef const unsigned char* start
    cdef int64_t i = n[0]
    cdef uint64_t m, limit
    cdef double value
    cdef unsigned char c
    cdef bint minus, real = dtype == DT_FP32 or dtype == DT_FP64
    cdef bint signed = DT_INT8 <= dtype <= DT_INT64
    limit = (<uint64_t>1 << (size * 8 - 1)) - 1
    if not signed:
        limit = limit * 2 + 1
    while i < count and end - p > 64:
        start = p
        if real:
            p = quick_double(start, end, &value)
            if p == NULL or p[0] != b",":
                p = start
                break
            if size == 4:
                (<float*>out)[i] = <float>value
            else:
                (<double*>out)[i] = value
        else:
            minus = p[0] == b"-"
            if minus:
                p += 1
            c = p[0] - 48
            if c > 9 or (minus and not signed):
                p = start
                break
            m = c
            p += 1
            if c:
                while True:
                    c = p[0] - 48
                    if c > 9 or p - start > 18:
                        break
                    m = m * 10 + c
                    p += 1
            if p[0] != b"," or m > limit + minus:
                p = start
                break
            if minus:
                m = <uint64_t>0 - m
            if size == 4:
                (<uint32_t*>out)[i] = <uint32_t>m
            elif size == 8:
                (<uint64_t*>out)[i] = m
            elif size == 1:
                (<uint8_t*>out)[i] = <uint8_t>m
            else:
                (<uint16_t*>out)[i] = <uint16_t>m
        i += 1
        p += 1
        while p[0] == 32 or p[0] == 10:
            p += 1
            if end - p < 64:
                break
    n[0] = i
    s.at = p - s.text


cdef int _fill(Reader s, int dtype, int size, char* out, int64_t* n, int64_t count, int depth, str name,
               Writer strings) except -1 nogil:
    """Reads the array at the cursor as flat elements."""
    if depth > MAX_DEPTH:
        s.too_deep()
    if not s.first_element():
        return 0
    while True:
        if dtype != DT_BYTES and dtype != DT_BOOL:
            _quick(s, dtype, size, out, n, min(count, n[0] + STRETCH))
            s.space()
        if s.peek() == b"[":
            _fill(s, dtype, size, out, n, count, depth + 1, name, strings)
        else:
            if n[0] >= count:
                with gil:
                    raise _mismatch(name, f"{count} elements and not more")
            if s.stop != NULL:
                if s.stop[0]:
                    return s.stopped()
                if s.large and n[0] >= s.look:
                    s.look = n[0] + STRETCH
                    sched_yield()
            _element(s, dtype, out + n[0] * size, name, strings)
            n[0] += 1
        if s.at + 1 < s.end and s.text[s.at] == b"," and s.text[s.at + 1] > 32:
            s.at += 1
        elif not s.next_element():
            return 0


cdef Tensor tensor_at(Reader s, Py_ssize_t at, str name, int dtype, tuple shape):
    """Reads the member `data` as a tensor and leaves the cursor behind it."""
    cdef int64_t count = 1, n = 0
    cdef int64_t d
    cdef int size = element_size(dtype)
    cdef bytes memory = None
    cdef Writer strings = None
    cdef char* out = NULL
    if dtype == DT_FP16 or dtype == DT_BF16:
        raise InvalidArgument(
            f"receiving {_NAME[dtype]} data via JSON is not supported. Please use the binary data format "
            f"for input {name}")
    s.at = at
    if s.peek() != b"[":
        raise kind_error("data", "array", "array")
    if 0 in shape:
        count = 0
    else:
        for item in shape:
            d = item
            if count > (s.end - at) // d:
                raise _mismatch(name, "more elements than the text has characters")
            count *= d
    if dtype == DT_BYTES:
        strings = Writer(min(4096, s.end - at + 8))
    else:
        if s.reserve is not None:
            s.reserve(count * size)
        memory = PyBytes_FromStringAndSize(NULL, count * size)
        out = PyBytes_AS_STRING(memory)
    s.look = STRETCH
    if s.large and s.end - at > LONG_BYTES:
        with nogil:
            _fill(s, dtype, size, out, &n, count, 4, name, strings)
    else:
        _fill(s, dtype, size, out, &n, count, 4, name, strings)
    if n != count:
        raise _mismatch(name, f"{count} elements and not {n}")
    return Tensor(name, dtype, shape, strings.take() if dtype == DT_BYTES else memory)


# ---------------------------------------------------------------- printing

cdef int print_elements(Writer w, Tensor t) except -1:
    """Prints the tensor's elements as one flat array."""
    _printable(t)
    return _print(w, t, NULL)


cdef int print_large(Writer w, Tensor t, Stop stop) except -1:
    """Prints them on a worker thread, without the GIL. Raises Cancelled after stop.ask()."""
    _printable(t)
    with nogil:
        _print(w, t, &stop.asked)
    return 0


cdef int _printable(Tensor t) except -1:
    if t.dtype == DT_FP16 or t.dtype == DT_BF16:
        raise InvalidArgument(
            f"sending {_NAME[t.dtype]} data via JSON is not supported. Please use the binary data format for "
            "output")
    if t.memory_kind == GPU_MEMORY:
        raise InvalidArgument(f"output '{t.name}' lies in GPU memory, which has no JSON form")
    return 0


cdef int _print(Writer w, Tensor t, const int* stop) except -1 nogil:
    cdef int size = element_size(t.dtype)
    cdef int dtype = t.dtype
    cdef Py_ssize_t i, n, at
    cdef const char* p = t.ptr
    cdef char* out
    cdef char* end
    cdef uint32_t length
    w.raw(b"[", 1)
    if dtype == DT_BYTES:
        at = i = 0
        while at < t.nbytes:
            i += 1
            if stop != NULL:
                if stop[0]:
                    return _stopped()
                if i % STRETCH == 0:
                    sched_yield()
            if t.nbytes - at < 4:
                with gil:
                    raise InvalidArgument(
                        f"incomplete string length indicator for output '{t.name}', expecting 4 bytes but only "
                        f"{t.nbytes - at} bytes available")
            memcpy(&length, p + at, 4)
            if t.nbytes - at - 4 < <Py_ssize_t>length:
                with gil:
                    raise InvalidArgument(
                        f"incomplete string data for output '{t.name}', expecting string of length {length} but "
                        f"only {t.nbytes - at - 4} bytes available")
            if at:
                w.raw(b",", 1)
            w.quoted(p + at + 4, length)
            at += 4 + length
        return w.raw(b"]", 1)
    n = t.nbytes // size
    i = 0
    while i < n:
        if stop != NULL and i % STRETCH == 0:
            if stop[0]:
                return _stopped()
            sched_yield()
        at = min(n, i + 1024)
        out = w.need((at - i) * 27 + PRINT_ROOM)
        end = w.end()
        while i < at:
            out = add_char(_print_element(out, end, dtype, p), end, b",")
            p += size
            i += 1
        w.wrote(out)
    if n:
        w.p[w.used - 1] = b"]"
        return 0
    return w.raw(b"]", 1)


cdef int _stopped() except -1 nogil:
    with gil:
        raise Cancelled()


cdef char* _print_element(char* out, char* end, int dtype, const char* p) noexcept nogil:
    cdef float narrow
    cdef double value
    cdef int64_t signed
    cdef uint64_t unsigned
    cdef int32_t i32
    cdef int16_t i16
    cdef uint32_t u32
    cdef uint16_t u16
    if dtype == DT_FP32:
        memcpy(&narrow, p, 4)
        return print_double(out, end, narrow)
    if dtype == DT_INT32:
        memcpy(&i32, p, 4)
        return put_int(out, end, i32)
    if dtype == DT_FP64:
        memcpy(&value, p, 8)
        return print_double(out, end, value)
    if dtype == DT_INT64:
        memcpy(&signed, p, 8)
        return put_int(out, end, signed)
    if dtype == DT_UINT64:
        memcpy(&unsigned, p, 8)
        return put_uint(out, end, unsigned)
    if dtype == DT_BOOL:
        if p[0]:
            return add_text(out, end, b"true", 4)
        return add_text(out, end, b"false", 5)
    if dtype == DT_UINT8:
        return put_uint(out, end, <uint8_t>p[0])
    if dtype == DT_INT8:
        return put_int(out, end, <int8_t>p[0])
    if dtype == DT_UINT16:
        memcpy(&u16, p, 2)
        return put_uint(out, end, u16)
    if dtype == DT_INT16:
        memcpy(&i16, p, 2)
        return put_int(out, end, i16)
    memcpy(&u32, p, 4)
    return put_uint(out, end, u32)


def tensor_json(Tensor t, Stop stop=None) -> bytes:
    """The tensor's elements as one flat JSON array; for the generate extension and for tests.

    With `stop` this is called on a worker's thread; raises Cancelled after stop.ask().
    """
    cdef Writer w = Writer.__new__(Writer, 256)
    if stop is None:
        print_elements(w, t)
    else:
        print_large(w, t, stop)
    return w.take()


def tensor_of(str name, int dtype, tuple shape, data, bint large=False, reserve=None):
    # type: (..., ..., tuple[int, ...], Buffer, ..., Callable[[int], None] | None) -> Tensor
    """A tensor from the text of a JSON array; for the generate extension and for tests. Raises InvalidArgument.

    With `large` this is called on a worker's thread; reserve(bytes) is called before memory is allocated.
    """
    cdef Reader s = Reader.__new__(Reader)
    cdef Tensor holder = Tensor.__new__(Tensor)
    holder.hold(data, False)
    s.text = <const unsigned char*>holder.ptr
    s.end = holder.nbytes
    s.large = large
    s.reserve = reserve
    s.begin()
    return tensor_at(s, s.at, name, dtype, shape)
