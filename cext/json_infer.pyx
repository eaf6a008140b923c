"""Infer requests and responses in their HTTP form: JSON, JSON followed by binary, or raw binary.

The problem: a 1 MiB JSON tensor is 262,144 numbers, and as Python objects they cost a hundred
times their text. The choice: one walk over the text writes elements straight into the tensor's
memory; responses are printed straight into the bytes that are sent.

Rules:
 1. The walk takes members in the order they come. When something is refused, the whole text is
    checked for syntax first and then read again in the canonical order (id, parameters, inputs,
    outputs; per input: its data source, name, datatype, shape, elements), so the error a client
    sees does not depend on the order of keys. Errors may be slow, requests may not.
 2. Memory is taken for what the text can hold, never for what a shape claims.
 3. Binary tensors are views into the body; nothing is copied.
 4. Integers out of their datatype's range are refused, naming the range.
Source: spec/observed.md 3 and 4, spec/features.md B2.
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

from neptrio._cext.json_text cimport MAX_DEPTH, Reader, Writer, unescape
from neptrio._cext.number_text cimport (
    NUMBER_HUGE,
    NUMBER_INTEGER,
    NUMBER_REAL,
    Number,
    print_double,
    print_int,
    print_uint,
    quick_double,
)
from neptrio._cext.request cimport (
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
    InferRequest,
    InferResponse,
    InputSpec,
    ModelCore,
    RequestedOutput,
    Tensor,
    element_size,
)

from neptrio._cext.json_text import SyntaxRefused
from neptrio.datatypes import NAME, NUMBER
from neptrio.errors import InvalidArgument, TritonError, Unsupported

cdef dict _NUMBER = NUMBER
cdef uint64_t LARGEST = 0x7FFFFFFFFFFFFFFF
cdef dict _NAME = NAME


def kind_error(what, got, wanted):
    """`Unable to parse 'x': attempt to access JSON non-a as b`."""
    return InvalidArgument(f"Unable to parse '{what}': attempt to access JSON non-{got} as {wanted}")


cdef _missing(str key):
    return InvalidArgument(
        f"Unable to parse '{key}': attempt to access non-existing object member '{key}'")


cdef _mismatch():
    return InvalidArgument("Unable to parse 'data': Shape does not match true shape of 'data' field")


# ---------------------------------------------------------------- values at known places

cdef str _string_at(Reader s, Py_ssize_t at, str key):
    if at < 0:
        raise _missing(key)
    if s.text[at] != b'"':
        raise kind_error(key, "string", "string")
    s.at = at
    return s.string()


cdef uint64_t _unsigned(Reader s, str key, str verb="parse") except? 0xFFFFFFFFFFFFFFFF:
    cdef Number n
    cdef int c = s.peek()
    if c == b"-" or 48 <= c <= 57:
        s.number(&n)
        if n.kind == NUMBER_INTEGER and (not n.negative or n.magnitude == 0):
            return n.magnitude
    raise InvalidArgument(
        f"Unable to {verb} '{key}': attempt to access JSON non-unsigned-integer as unsigned-integer")


cdef bint _boolean(Reader s, str key) except -1:
    cdef int c = s.peek()
    if c != b"t" and c != b"f":
        raise kind_error(key, "boolean", "boolean")
    s.skip(0)
    return c == b"t"


cdef tuple _shape_at(Reader s, Py_ssize_t at):
    cdef list dims = []
    cdef uint64_t d
    if at < 0:
        raise _missing("shape")
    if s.text[at] != b"[":
        raise kind_error("shape", "array", "array")
    s.at = at
    if s.first_element():
        while True:
            d = _unsigned(s, "shape")
            if d > 0x7FFFFFFFFFFFFFFF:
                raise InvalidArgument(f"Unable to parse 'shape': {d} is out of range [0, 9223372036854775807]")
            dims.append(d)
            if not s.next_element():
                break
    return tuple(dims)


# ---------------------------------------------------------------- elements

cdef _bad_element(int dtype):
    if dtype == DT_BYTES:
        return InvalidArgument("Unable to parse JSON bytes array: attempt to access JSON non-string as string")
    if dtype == DT_BOOL:
        return kind_error("data", "boolean", "boolean")
    if dtype == DT_FP32 or dtype == DT_FP64:
        return kind_error("data", "number", "double")
    if DT_INT8 <= dtype <= DT_INT64:
        return kind_error("data", "signed-integer", "signed-integer")
    return kind_error("data", "unsigned-integer", "unsigned-integer")


cdef _out_of_range(Reader s, Py_ssize_t start, int dtype, str name):
    cdef object bits = element_size(dtype) * 8     # a Python integer: the limits need 65 bits
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
                  uint64_t* magnitude) except -1:
    """An integer whose magnitude is at most `limit` (one more when negative)."""
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
            if m > limit + (1 if minus else 0):
                raise _out_of_range(s, at, dtype, name)
            if minus and not signed:
                raise _bad_element(dtype)
            negative[0] = minus
            magnitude[0] = m
            return 0
    c = s.text[at] if at < s.end else 0
    if not (c == b"-" or 48 <= c <= 57):
        raise _bad_element(dtype)
    s.number(&n)
    if n.kind == NUMBER_REAL:
        raise _bad_element(dtype)
    if n.kind == NUMBER_INTEGER and n.negative and n.magnitude and not signed:
        raise _bad_element(dtype)
    if n.kind == NUMBER_HUGE or (n.magnitude > limit and not (
            n.negative and signed and n.magnitude == limit + 1)):
        raise _out_of_range(s, at, dtype, name)
    negative[0] = n.negative
    magnitude[0] = n.magnitude
    return 0


cdef int _element(Reader s, int dtype, char* out, str name, Writer strings) except -1:
    """Reads one scalar into `out` (BYTES: appends it to `strings`)."""
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
            raise _bad_element(dtype)
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
            raise _bad_element(dtype)
        start = s.at + 1
        s.skip_string(&escaped)
        length = s.at - 1 - start
        place = strings.need(length + 4)
        if escaped:
            length = unescape(s.text + start, length, place + 4)
        else:
            memcpy(place + 4, s.text + start, length)
        prefix = <uint32_t>length
        memcpy(place, &prefix, 4)
        strings.used += length + 4
        return 0
    if dtype == DT_BOOL:
        c = s.peek()
        if c != b"t" and c != b"f":
            raise _bad_element(dtype)
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
    """Reads numbers in their common forms, each followed by a comma; stops at whatever else comes.

    What it leaves, errors included, is _element's.
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
               Writer strings) except -1:
    """Reads the array at the cursor, flattened."""
    if depth > MAX_DEPTH:
        s.fail(f"Nesting deeper than {MAX_DEPTH} levels.", s.at)
    if not s.first_element():
        return 0
    while True:
        if dtype != DT_BYTES and dtype != DT_BOOL:
            _quick(s, dtype, size, out, n, count)
            s.space()
        if s.peek() == b"[":
            _fill(s, dtype, size, out, n, count, depth + 1, name, strings)
        else:
            if n[0] >= count:
                raise _mismatch()
            _element(s, dtype, out + n[0] * size, name, strings)
            n[0] += 1
        if s.at + 1 < s.end and s.text[s.at] == b"," and s.text[s.at + 1] > 32:
            s.at += 1
        elif not s.next_element():
            return 0


cdef Tensor _data_at(Reader s, Py_ssize_t at, str name, int dtype, tuple shape):
    """The `data` member as a tensor. Leaves the cursor behind it."""
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
                raise _mismatch()    # more elements than the text has characters
            count *= d
    if dtype == DT_BYTES:
        strings = Writer(min(4096, s.end - at + 8))
    else:
        memory = PyBytes_FromStringAndSize(NULL, count * size)
        out = PyBytes_AS_STRING(memory)
    _fill(s, dtype, size, out, &n, count, 4, name, strings)
    if n != count:
        raise _mismatch()
    return Tensor(name, dtype, shape, strings.take() if dtype == DT_BYTES else memory)


# ---------------------------------------------------------------- a request

cdef class _Decoder:
    """One decoding of one body."""

    cdef InferRequest r
    cdef Reader s
    cdef Tensor body               # holds the buffer; tensors alias it
    cdef object shared_memory
    cdef bint eager                # members are taken as they come (rule 1)
    cdef bint with_binary          # there was an Inference-Header-Content-Length
    cdef bint binary_default
    cdef Py_ssize_t binary_at      # where the next binary tensor starts in the body

    cdef int document(self) except -1:
        cdef Reader s = self.s
        cdef Py_ssize_t id_at = -1, parameters_at = -1, inputs_at = -1, outputs_at = -1
        self.r.inputs = []
        self.r.outputs = None
        s.begin()
        if s.peek() != b"{":
            s.skip(0)
            s.finish()
            raise _missing("inputs")
        if s.first_member():
            while True:
                if s.named(b"inputs", 6) and inputs_at < 0:
                    inputs_at = s.at
                    if self.eager:
                        self.inputs(inputs_at)
                    else:
                        s.skip(1)
                elif s.named(b"outputs", 7) and outputs_at < 0:
                    outputs_at = s.at
                    if self.eager:
                        self.outputs(outputs_at)
                    else:
                        s.skip(1)
                elif s.named(b"id", 2) and id_at < 0:
                    id_at = s.at
                    if self.eager:
                        self.r.id = _string_at(s, id_at, "id")
                    else:
                        s.skip(1)
                elif s.named(b"parameters", 10) and parameters_at < 0:
                    parameters_at = s.at
                    if self.eager:
                        self.parameters(parameters_at)
                    else:
                        s.skip(1)
                else:
                    s.skip(1)
                if not s.next_member():
                    break
        s.finish()
        if self.eager:
            if inputs_at < 0:
                raise _missing("inputs")
        else:
            if id_at >= 0:
                self.r.id = _string_at(s, id_at, "id")
            if parameters_at >= 0:
                self.parameters(parameters_at)
            if inputs_at < 0:
                raise _missing("inputs")
            self.inputs(inputs_at)
            if self.binary_at != self.body.nbytes:
                raise self.leftovers()
            if outputs_at >= 0:
                self.outputs(outputs_at)
        if self.binary_at != self.body.nbytes:
            raise self.leftovers()
        return 0

    cdef leftovers(self):
        return InvalidArgument(f"unexpected additional input data for model '{self.r.model_name}'")

    cdef int parameters(self, Py_ssize_t at) except -1:
        cdef Reader s = self.s
        cdef InferRequest r = self.r
        cdef dict seen = None
        cdef str key
        s.at = at
        if s.peek() != b"{":
            raise InvalidArgument("failed to get request params.: attempt to get members for non-object")
        if not s.first_member():
            return 0
        while True:
            if s.named(b"binary_data_output", 18) and seen is None:
                # nearly always the only member; anything more goes the general way
                self.binary_default = _boolean(s, "binary_data_output")
                seen = {"binary_data_output": True}
            else:
                key = s.name_text()
                if seen is None:
                    seen = {}
                value = s.value(2)
                if key not in seen:
                    seen[key] = value
                    self.parameter(key, value)
            if not s.next_member():
                return 0

    cdef int parameter(self, str key, value) except -1:
        cdef InferRequest r = self.r
        if key == "sequence_id":
            if isinstance(value, str):
                if len(value) > 128:
                    raise Unsupported("string correlation ID cannot be longer than 128 characters")
                r.sequence_id = value or 0
            elif isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64:
                r.sequence_id = value
            else:
                raise kind_error(key, "string", "string")
        elif key in ("sequence_start", "sequence_end", "binary_data_output"):
            if not isinstance(value, bool):
                raise kind_error(key, "boolean", "boolean")
            if key == "sequence_start":
                r.sequence_start = value
            elif key == "sequence_end":
                r.sequence_end = value
            else:
                self.binary_default = value
        elif key == "priority" or key == "timeout":
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
                raise kind_error(key, "unsigned-integer", "unsigned-integer")
            if key == "priority":
                r.priority = value
            else:
                r.timeout_us = value
        elif key.startswith("triton_"):
            raise InvalidArgument(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be "
                "specified.")
        elif key == "headers":
            pass
        else:
            add_parameter(r, key, value)
        return 0

    cdef int inputs(self, Py_ssize_t at) except -1:
        cdef Reader s = self.s
        s.at = at
        if s.peek() != b"[":
            raise kind_error("inputs", "array", "array")
        if s.first_element():
            while True:
                self.r.inputs.append(self.input())
                if not s.next_element():
                    break
        return 0

    cdef Tensor input(self):
        cdef Reader s = self.s
        cdef Py_ssize_t name_at = -1, type_at = -1, shape_at = -1, data_at = -1, parameters_at = -1
        cdef Py_ssize_t after
        cdef Tensor made = None
        if s.peek() != b"{":
            raise kind_error("inputs", "object", "object")
        if s.first_member():
            while True:
                if s.named(b"name", 4) and name_at < 0:
                    name_at = s.at
                    s.skip(3)
                elif s.named(b"shape", 5) and shape_at < 0:
                    shape_at = s.at
                    s.skip(3)
                elif s.named(b"datatype", 8) and type_at < 0:
                    type_at = s.at
                    s.skip(3)
                elif s.named(b"parameters", 10) and parameters_at < 0:
                    parameters_at = s.at
                    s.skip(3)
                elif s.named(b"data", 4) and data_at < 0:
                    data_at = s.at
                    if self.eager and name_at >= 0 and type_at >= 0 and shape_at >= 0:
                        made = self.filled(name_at, type_at, shape_at, data_at)
                    else:
                        s.skip(3)
                else:
                    s.skip(3)
                if not s.next_member():
                    break
        after = s.at
        made = self.from_source(made, name_at, type_at, shape_at, data_at, parameters_at)
        s.at = after
        return made

    cdef Tensor filled(self, Py_ssize_t name_at, Py_ssize_t type_at, Py_ssize_t shape_at, Py_ssize_t data_at):
        cdef str name = _string_at(self.s, name_at, "name")
        cdef int dtype = self.datatype(type_at, name)
        return _data_at(self.s, data_at, name, dtype, _shape_at(self.s, shape_at))

    cdef int datatype(self, Py_ssize_t at, str name) except -1:
        number = _NUMBER.get(_string_at(self.s, at, "datatype"))
        if number is None:
            raise InvalidArgument(f"invalid datatype for input {name}")
        return number

    cdef Tensor from_source(self, Tensor made, Py_ssize_t name_at, Py_ssize_t type_at, Py_ssize_t shape_at,
                            Py_ssize_t data_at, Py_ssize_t parameters_at):
        cdef Reader s = self.s
        cdef Py_ssize_t size_at = -1, region_at = -1, offset_at = -1, length_at = -1
        cdef uint64_t size, left, offset = 0, length = 0
        cdef str name, region
        cdef int dtype
        cdef tuple shape
        if parameters_at >= 0 and s.text[parameters_at] == b"{":
            s.at = parameters_at
            if s.first_member():
                while True:
                    if s.named(b"binary_data_size", 16) and size_at < 0:
                        size_at = s.at
                    elif s.named(b"shared_memory_region", 20) and region_at < 0:
                        region_at = s.at
                    elif s.named(b"shared_memory_offset", 20) and offset_at < 0:
                        offset_at = s.at
                    elif s.named(b"shared_memory_byte_size", 23) and length_at < 0:
                        length_at = s.at
                    s.skip(4)
                    if not s.next_member():
                        break
        if (data_at >= 0) + (size_at >= 0) + (region_at >= 0) != 1:
            found = " ".join(
                label
                for label, at in (
                    ("'data'", data_at), ("'binary_data_size'", size_at), ("'shared_memory_region'", region_at))
                if at >= 0
            )
            raise InvalidArgument(
                "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
                "'shared_memory_region' in 'parameters'. "
                + (f"But set {found}" if found else "But no field is set"))
        if made is not None:
            return made
        if data_at >= 0:
            name = _string_at(s, name_at, "name")
            dtype = self.datatype(type_at, name)
            return _data_at(s, data_at, name, dtype, _shape_at(s, shape_at))
        name = _string_at(s, name_at, "name")
        dtype = self.datatype(type_at, name)
        shape = _shape_at(s, shape_at)
        if region_at >= 0:
            region = _string_at(s, region_at, "shared_memory_region")
            if offset_at >= 0:
                s.at = offset_at
                offset = _unsigned(s, "shared_memory_offset")
            if length_at >= 0:
                s.at = length_at
                length = _unsigned(s, "shared_memory_byte_size")
            if self.shared_memory is None:
                raise no_shared_memory()
            return self.shared_memory.input_tensor(name, dtype, shape, region, offset, length)
        s.at = size_at
        size = _unsigned(s, "binary_data_size")
        left = self.body.nbytes - self.binary_at if self.with_binary else 0
        if size > left:
            raise InvalidArgument(
                f"unexpected size for input '{name}', expecting {size - left} additional bytes for model "
                f"'{self.r.model_name}'")
        made = Tensor.__new__(Tensor)
        made.name = name
        made.dtype = dtype
        made.shape = shape
        made.owner = self.body
        made.ptr = self.body.ptr + self.binary_at
        made.nbytes = size
        self.binary_at += size
        return made

    cdef int outputs(self, Py_ssize_t at) except -1:
        cdef Reader s = self.s
        cdef list made = []
        cdef RequestedOutput output, other
        s.at = at
        if s.peek() != b"[":
            raise kind_error("outputs", "array", "array")
        if s.first_element():
            while True:
                output = self.output()
                for other in made:
                    if other.name == output.name:
                        break
                else:
                    made.append(output)
                if not s.next_element():
                    break
        if made:
            self.r.outputs = made
        return 0

    cdef RequestedOutput output(self):
        cdef Reader s = self.s
        cdef Py_ssize_t name_at = -1, parameters_at = -1, after
        cdef RequestedOutput made
        cdef bint has_region = False, has_offset = False, has_length = False, has_binary = False
        cdef bint has_class = False
        if s.peek() != b"{":
            raise kind_error("outputs", "object", "object")
        if s.first_member():
            while True:
                if s.named(b"name", 4) and name_at < 0:
                    name_at = s.at
                elif s.named(b"parameters", 10) and parameters_at < 0:
                    parameters_at = s.at
                s.skip(3)
                if not s.next_member():
                    break
        after = s.at
        made = RequestedOutput(_string_at(s, name_at, "name"))
        made.binary = 0
        if parameters_at >= 0 and s.text[parameters_at] == b"{":
            s.at = parameters_at
            if s.first_member():
                while True:
                    if s.named(b"binary_data", 11) and not has_binary:
                        has_binary = True
                        made.binary = _boolean(s, "binary_data")
                    elif s.named(b"classification", 14) and not has_class:
                        has_class = True
                        made.class_count = <int64_t>min(_unsigned(s, "classification", "set"), <uint64_t>0x7FFFFFFF)
                    elif s.named(b"shared_memory_region", 20) and not has_region:
                        has_region = True
                        made.shm_region = _string_at(s, s.at, "shared_memory_region")
                    elif s.named(b"shared_memory_offset", 20) and not has_offset:
                        has_offset = True
                        made.shm_offset = <int64_t>min(_unsigned(s, "shared_memory_offset"), LARGEST)
                    elif s.named(b"shared_memory_byte_size", 23) and not has_length:
                        has_length = True
                        made.shm_byte_size = <int64_t>min(_unsigned(s, "shared_memory_byte_size"), LARGEST)
                    else:
                        s.skip(4)
                    if not s.next_member():
                        break
            if made.shm_region is not None:
                if made.binary:
                    raise InvalidArgument("Output can't set both 'shared_memory_region' and 'binary_data'")
                if made.class_count:
                    raise InvalidArgument("Output can't set both 'shared_memory_region' and 'classification'")
                if self.shared_memory is None:
                    raise no_shared_memory()
        s.at = after
        return made


def no_shared_memory():
    """What a request naming a region is told where the extension is off."""
    return InvalidArgument("shared memory is not available: start the server with --allow-client-shm=true")


def add_parameter(InferRequest r, str key, value):
    """Adds a custom parameter. Raises InvalidArgument for null, arrays and objects."""
    if not isinstance(value, (bool, int, float, str)):
        raise InvalidArgument(
            f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")
    if r.parameters is None:
        r.parameters = {}
    r.parameters.setdefault(key, value)


cdef int _raw(InferRequest r, Tensor body) except -1:
    """A raw binary request: the body is the model's only input, its shape deduced."""
    cdef ModelCore m = r.model
    cdef InputSpec spec
    cdef int64_t known = 1, variable = 0
    cdef Tensor made
    cdef uint32_t prefix
    cdef str prefix_text = f"[request id: {r.id or '<id_unknown>'}] "
    if len(m.input_specs) != 1:
        raise InvalidArgument(
            f"{prefix_text}Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(m.input_specs)} inputs in '{m.name}' model configuration")
    spec = m.input_specs[0]
    shape = [1] if m.max_batch_size > 0 else []
    if spec.dtype == DT_BYTES:
        if spec.dims != (1,):
            raise InvalidArgument(
                f"{prefix_text}For BYTE datatype raw input '{spec.name}', the model must have input shape [1]")
        prefix = <uint32_t>body.nbytes
        # the one copy of the body in this codec: the element's length comes before it
        memory = (<char*>&prefix)[:4] + body.ptr[:body.nbytes]
        r.inputs = [Tensor(spec.name, spec.dtype, (*shape, 1), memory)]
        return 0
    for d in spec.dims:
        if d < 0:
            variable += 1
        else:
            known *= <int64_t>d
    if variable > 1:
        raise InvalidArgument(
            f"{prefix_text}The shape of the raw input '{spec.name}' can not be deduced because there are more "
            "than one variable-sized dimension")
    known *= element_size(spec.dtype)
    for d in spec.dims:
        shape.append(d if d >= 0 else (body.nbytes // known if known else 0))
    made = Tensor.__new__(Tensor)
    made.name = spec.name
    made.dtype = spec.dtype
    made.shape = tuple(shape)
    made.owner = body
    made.ptr = body.ptr
    made.nbytes = body.nbytes
    r.inputs = [made]
    return 0


def decode_request(InferRequest r, body, header_length=None, shared_memory=None):
    """Fills `r` from an infer body; returns whether outputs are binary unless they say otherwise.

    `header_length` is the value of Inference-Header-Content-Length, None when absent; it lies
    within the body. `r.model` is set. Raises InvalidArgument (or Unsupported).
    """
    cdef Tensor holder = Tensor.__new__(Tensor)
    cdef Py_ssize_t n
    cdef _Decoder d
    holder.hold(body, False)
    n = holder.nbytes if header_length is None else header_length
    if n == 0:
        _raw(r, holder)
        return True
    d = _Decoder.__new__(_Decoder)
    d.r = r
    d.body = holder
    d.shared_memory = shared_memory
    d.with_binary = header_length is not None
    d.s = Reader.__new__(Reader)
    d.s.text = <const unsigned char*>holder.ptr
    d.s.end = n
    d.binary_at = n
    d.eager = True
    try:
        d.document()
        return d.binary_default
    except TritonError:
        pass
    # refused: say what is wrong first in the canonical order (rule 1)
    d.s.at = 0
    d.s.begin()
    d.s.skip(0)
    d.s.finish()
    d.s.at = 0
    d.binary_at = n
    d.binary_default = False
    d.eager = False
    r.id = ""
    r.parameters = None
    d.document()
    return d.binary_default


# ---------------------------------------------------------------- a response

cdef int _print_data(Writer w, Tensor t) except -1:
    """The tensor's elements, flat, between brackets."""
    cdef int size = element_size(t.dtype)
    cdef int dtype = t.dtype
    cdef Py_ssize_t i, n, at
    cdef const char* p = t.ptr
    cdef char* out
    cdef uint32_t length
    if dtype == DT_FP16 or dtype == DT_BF16:
        raise InvalidArgument(
            f"sending {_NAME[dtype]} data via JSON is not supported. Please use the binary data format for "
            "output")
    if t.memory_kind == 2:
        raise InvalidArgument(f"output '{t.name}' lies in GPU memory, which has no JSON form")
    w.raw(b"[", 1)
    if dtype == DT_BYTES:
        at = 0
        while at < t.nbytes:
            if t.nbytes - at < 4:
                raise InvalidArgument(
                    f"incomplete string length indicator for output '{t.name}', expecting 4 bytes but only "
                    f"{t.nbytes - at} bytes available")
            memcpy(&length, p + at, 4)
            if t.nbytes - at - 4 < <Py_ssize_t>length:
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
        at = min(n, i + 1024)
        out = w.need((at - i) * 27 + 64)
        while i < at:
            out = _print_element(out, dtype, p)
            out[0] = b","
            out += 1
            p += size
            i += 1
        w.used = out - w.p
    if n:
        w.p[w.used - 1] = b"]"
        return 0
    return w.raw(b"]", 1)


cdef char* _print_element(char* out, int dtype, const char* p) noexcept nogil:
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
        return print_double(out, narrow)
    if dtype == DT_INT32:
        memcpy(&i32, p, 4)
        return print_int(out, i32)
    if dtype == DT_FP64:
        memcpy(&value, p, 8)
        return print_double(out, value)
    if dtype == DT_INT64:
        memcpy(&signed, p, 8)
        return print_int(out, signed)
    if dtype == DT_UINT64:
        memcpy(&unsigned, p, 8)
        return print_uint(out, unsigned)
    if dtype == DT_BOOL:
        if p[0]:
            memcpy(out, b"true", 4)
            return out + 4
        memcpy(out, b"false", 5)
        return out + 5
    if dtype == DT_UINT8:
        return print_uint(out, <uint8_t>p[0])
    if dtype == DT_INT8:
        return print_int(out, <int8_t>p[0])
    if dtype == DT_UINT16:
        memcpy(&u16, p, 2)
        return print_uint(out, u16)
    if dtype == DT_INT16:
        memcpy(&i16, p, 2)
        return print_int(out, i16)
    memcpy(&u32, p, 4)
    return print_uint(out, u32)


cdef RequestedOutput _wanted(list outputs, str name):
    cdef RequestedOutput o
    for o in outputs:
        if o.name is name or o.name == name:
            return o
    return None


def encode_response(InferRequest request, InferResponse response, bint binary_default):
    """A successful response as (JSON, binary tensors in order, their bytes). Raises InvalidArgument.

    The tensors are None when no output is binary. The header Inference-Header-Content-Length is
    due when the bytes are not 0.
    """
    cdef Writer w = Writer.__new__(Writer, 1024)
    cdef Tensor t
    cdef RequestedOutput want = None
    cdef list blobs = None
    cdef Py_ssize_t binary_bytes = 0
    cdef bint first = True, binary
    w.raw(b"{", 1)
    if response.id:
        w.raw(b'"id":', 5)
        w.text(response.id)
        w.raw(b",", 1)
    w.raw(b'"model_name":', 13)
    w.text(response.model_name)
    w.raw(b',"model_version":', 17)
    w.text(response.model_version)
    if response.parameters:
        w.raw(b',"parameters":', 14)
        w.value(response.parameters)
    w.raw(b',"outputs":[', 12)
    if response.outputs is not None:
        for t in response.outputs:
            w.raw(b'{"name":' if first else b',{"name":', 8 if first else 9)
            first = False
            w.text(t.name)
            w.raw(b',"datatype":', 12)
            w.text(<str>_NAME[t.dtype])
            w.raw(b',"shape":[', 10)
            for i, d in enumerate(t.shape):
                if i:
                    w.raw(b",", 1)
                w.integer(d)
            w.raw(b"]", 1)
            binary = binary_default
            if request.outputs is not None:
                want = _wanted(request.outputs, t.name)
                if want is not None:
                    binary = want.binary == 1
            if want is not None and want.shm_region is not None:
                pass
            elif binary:
                w.raw(b',"parameters":{"binary_data_size":', 34)
                w.integer(t.nbytes)
                w.raw(b"}", 1)
                if blobs is None:
                    blobs = []
                blobs.append(t)
                binary_bytes += t.nbytes
            else:
                w.raw(b',"data":', 8)
                _print_data(w, t)
            w.raw(b"}", 1)
    w.raw(b"]}", 2)
    return w.take(), blobs, binary_bytes


def tensor_json(Tensor t) -> bytes:
    """The tensor's elements as a JSON array, flat; for generate and for tests."""
    cdef Writer w = Writer.__new__(Writer, 256)
    _print_data(w, t)
    return w.take()


def tensor_of(str name, int dtype, tuple shape, data):
    """A tensor from a JSON array given as text; for generate and for tests. Raises InvalidArgument."""
    cdef Reader s = Reader.__new__(Reader)
    cdef Tensor holder = Tensor.__new__(Tensor)
    holder.hold(data, False)
    s.text = <const unsigned char*>holder.ptr
    s.end = holder.nbytes
    s.begin()
    return _data_at(s, s.at, name, dtype, shape)
