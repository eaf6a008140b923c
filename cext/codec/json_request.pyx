"""Decodes an infer request in its HTTP forms: JSON, JSON followed by binary tensors, or one raw binary tensor.

One walk over the text fills the request; tensors' elements are read by cext/codec/json_tensor.

Rules:
 1. The walk takes members in the order they come. When something is wrong, the whole text is first checked for
    syntax and then read again in a canonical order (id, parameters, inputs, outputs; of each input: data source,
    name, datatype, shape, elements). So the error that a client sees does not depend on the order of keys.
    Errors may be slow, requests may not.
 2. Binary tensors are views into the body; nothing is copied. Where their bytes lie apart from the text, others may
    write to them (cext/rings/body_area), so strings, which have a structure, are copied from there.
 3. The short text of a request with binary tensors may be one that came before (cext/codec/known_texts).
 4. A large text is decoded on a worker thread (loop/workers): elements and skipped parts are read without the GIL, which
    is also released between inputs. A Stop ends the decoding; nobody uses the request then.
Source: docs/protocol/observed.md 3 and 4, docs/protocol/features.md B2.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from neptrio.codec.json_reader cimport Reader, Stop
from neptrio.codec.known_texts cimport LONGEST, Known, KnownTexts
from neptrio.codec.json_tensor cimport tensor_at
from neptrio.request.infer_request cimport (
    DT_BYTES,
    InferRequest,
    InputSpec,
    ModelCore,
    RequestedOutput,
    Tensor,
    element_size,
    times,
)
from neptrio.request.validate cimport walk_strings

from neptrio import limits
from neptrio.codec.json_reader import kind_error, missing, out_of_range, too_long, too_many
from neptrio.datatypes import NAME, NUMBER, meant_by
from neptrio.errors import LONGEST_COMPARED, Cancelled, InvalidArgument, Overloaded, TritonError, Unsupported
from neptrio.limits import shown

cdef dict _NUMBER = NUMBER
cdef Py_ssize_t MOST_TENSORS = limits.MOST_TENSORS
cdef uint64_t LARGEST = 0x7FFFFFFFFFFFFFFF
known_texts = KnownTexts()  # type: KnownTexts
cdef KnownTexts _known_texts = known_texts


cdef class _Decoder:
    """One decoding of one body."""

    cdef InferRequest r
    cdef Reader s
    cdef Tensor body               # the whole body, or its part behind the text; inputs are views of it
    cdef bint apart                # that part is a buffer of its own
    cdef object shared_memory
    cdef bint eager                # members are taken in the order they come (rule 1)
    cdef bint with_binary          # the request had Inference-Header-Content-Length
    cdef bint binary_default
    cdef Py_ssize_t binary_at      # where in the body the next binary tensor starts

    cdef int document(self) except -1:
        cdef Reader s = self.s
        cdef Py_ssize_t id_at = -1, parameters_at = -1, inputs_at = -1, outputs_at = -1
        self.r.inputs = []
        self.r.outputs = None
        s.begin()
        if s.peek() != b"{":
            s.skip(0)
            s.finish()
            raise missing("inputs")
        if s.first_member():
            while True:
                if s.named(b"inputs", 6) and inputs_at < 0:
                    inputs_at = s.at
                    if self.eager:
                        self.inputs(inputs_at)
                    else:
                        s.skip_value(1)
                elif s.named(b"outputs", 7) and outputs_at < 0:
                    outputs_at = s.at
                    if self.eager:
                        self.outputs(outputs_at)
                    else:
                        s.skip(1)
                elif s.named(b"id", 2) and id_at < 0:
                    id_at = s.at
                    if self.eager:
                        self.r.id = s.string_at(id_at, "id")
                    else:
                        s.skip(1)
                elif s.named(b"parameters", 10) and parameters_at < 0:
                    parameters_at = s.at
                    if self.eager:
                        self.parameters(parameters_at)
                    else:
                        s.skip(1)
                else:
                    s.skip_value(1)
                if not s.next_member():
                    break
        s.finish()
        if self.eager:
            if inputs_at < 0:
                raise missing("inputs")
        else:
            if id_at >= 0:
                self.r.id = s.string_at(id_at, "id")
            if parameters_at >= 0:
                self.parameters(parameters_at)
            if inputs_at < 0:
                raise missing("inputs")
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
                # nearly always the only member; when there are more, the general way reads all of them
                self.binary_default = s.boolean("binary_data_output")
                seen = {"binary_data_output": True}
            else:
                key = s.name_text()
                if seen is None:
                    seen = {}
                value = s.value(2)
                if key not in seen:
                    seen[key] = value
                    self.parameter(key, value)
                if s.large:
                    s.breathe()
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
                raise out_of_range(key, "string", value)
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
                raise out_of_range(key, "unsigned-integer", value)
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
                if len(self.r.inputs) == MOST_TENSORS:
                    raise too_many("tensors", "inputs", MOST_TENSORS)
                self.r.inputs.append(self.input())
                if s.large:
                    s.breathe()
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
                        s.skip_value(3)
                else:
                    s.skip_value(3)
                if not s.next_member():
                    break
        after = s.at
        made = self.from_source(made, name_at, type_at, shape_at, data_at, parameters_at)
        s.at = after
        return made

    cdef Tensor filled(self, Py_ssize_t name_at, Py_ssize_t type_at, Py_ssize_t shape_at, Py_ssize_t data_at):
        cdef str name = self.s.name_at(name_at, "name")
        cdef int dtype = self.datatype(type_at, name)
        return tensor_at(self.s, data_at, name, dtype, self.s.shape_at(shape_at))

    cdef int datatype(self, Py_ssize_t at, str name) except -1:
        given = self.s.string_at(at, "datatype")
        number = _NUMBER.get(given)
        if number is None:
            near = NAME.get(meant_by(given[:LONGEST_COMPARED]))
            meant = f"did you mean '{near}'?" if near else f"expected one of {', '.join(_NUMBER)}"
            raise InvalidArgument(f"invalid datatype for input {name}: '{shown(given)}', {meant}")
        return number

    cdef Tensor from_source(self, Tensor made, Py_ssize_t name_at, Py_ssize_t type_at, Py_ssize_t shape_at,
                            Py_ssize_t data_at, Py_ssize_t parameters_at):
        cdef Reader s = self.s
        cdef Py_ssize_t size_at = -1, region_at = -1, offset_at = -1, length_at = -1
        cdef uint64_t size, left, offset = 0, length = 0
        cdef str name, region
        cdef int dtype
        cdef tuple shape
        if parameters_at >= 0:
            s.at = parameters_at
            if s.peek() == b"{" and s.first_member():
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
            name = s.name_at(name_at, "name")
            dtype = self.datatype(type_at, name)
            return tensor_at(s, data_at, name, dtype, s.shape_at(shape_at))
        name = s.name_at(name_at, "name")
        dtype = self.datatype(type_at, name)
        shape = s.shape_at(shape_at)
        if region_at >= 0:
            region = s.name_at(region_at, "shared_memory_region")
            if offset_at >= 0:
                s.at = offset_at
                offset = s.unsigned("shared_memory_offset")
            if length_at >= 0:
                s.at = length_at
                length = s.unsigned("shared_memory_byte_size")
            if self.shared_memory is None:
                raise no_shared_memory()
            return self.shared_memory.input_tensor(name, dtype, shape, region, offset, length)
        s.at = size_at
        size = s.unsigned("binary_data_size")
        left = self.body.nbytes - self.binary_at if self.with_binary else 0
        if size > left:
            raise InvalidArgument(
                f"unexpected size for input '{name}', expecting {size - left} additional bytes for model "
                f"'{self.r.model_name}'")
        made = Tensor.__new__(Tensor)
        made.name = name
        made.dtype = dtype
        made.shape = shape
        if self.apart and dtype == DT_BYTES:
            made = Tensor(name, dtype, shape, (self.body.ptr + self.binary_at)[:size])
        else:
            made.owner = self.body
            made.ptr = self.body.ptr + self.binary_at
            made.nbytes = size
        self.binary_at += size
        return made

    cdef int outputs(self, Py_ssize_t at) except -1:
        cdef Reader s = self.s
        cdef list made = []
        s.at = at
        if s.peek() != b"[":
            raise kind_error("outputs", "array", "array")
        if s.first_element():
            while True:
                if len(made) == MOST_TENSORS:
                    raise too_many("tensors", "outputs", MOST_TENSORS)
                made.append(self.output())
                if s.large:
                    s.breathe()
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
        made = RequestedOutput(s.name_at(name_at, "name"))
        made.binary = 0
        if parameters_at >= 0:
            s.at = parameters_at
            if s.peek() == b"{" and s.first_member():
                while True:
                    if s.named(b"binary_data", 11) and not has_binary:
                        has_binary = True
                        made.binary = s.boolean("binary_data")
                    elif s.named(b"classification", 14) and not has_class:
                        has_class = True
                        made.class_count = <int64_t>min(s.unsigned("classification", "set"), <uint64_t>0x7FFFFFFF)
                    elif s.named(b"shared_memory_region", 20) and not has_region:
                        has_region = True
                        made.shm_region = s.name_at(s.at, "shared_memory_region")
                    elif s.named(b"shared_memory_offset", 20) and not has_offset:
                        has_offset = True
                        made.shm_offset = <int64_t>min(s.unsigned("shared_memory_offset"), LARGEST)
                    elif s.named(b"shared_memory_byte_size", 23) and not has_length:
                        has_length = True
                        made.shm_byte_size = <int64_t>min(s.unsigned("shared_memory_byte_size"), LARGEST)
                    else:
                        s.skip(4)
                    if not s.next_member():
                        break
            if made.shm_region is not None:
                if made.binary:
                    raise InvalidArgument("Output can't set both 'shared_memory_region' and 'binary_data'")
                if made.class_count:
                    raise region_and_classes()
                if self.shared_memory is None:
                    raise no_shared_memory()
                made.shm_place = self.shared_memory.output_region(made.shm_region)
        s.at = after
        return made


def region_and_classes():
    # type: () -> InvalidArgument
    """The error for an output that is to be classified and to go into a region."""
    return InvalidArgument("Output can't set both 'shared_memory_region' and 'classification'")


def no_shared_memory():
    # type: () -> InvalidArgument
    """The error for a request that names a region where shared memory is not allowed."""
    return InvalidArgument("shared memory is not available: start the server with --allow-client-shm=true")


def add_parameter(InferRequest r, str key, value):
    """Adds a custom parameter to a request. Raises InvalidArgument for null, arrays and objects."""
    if not isinstance(value, (bool, int, float, str)):
        raise InvalidArgument(
            f"parameter '{shown(key)}' has invalid type. It should be either 'int', 'bool', or 'string'.")
    if len(key) > limits.LONGEST_NAME:
        raise too_long("parameters", key)
    if r.parameters is None:
        r.parameters = {}
    elif len(r.parameters) >= limits.MOST_PARAMETERS:
        raise too_many("members", "parameters", limits.MOST_PARAMETERS)
    r.parameters.setdefault(key, value)


cdef int _raw(InferRequest r, Tensor body) except -1:
    """Decodes a raw binary request: the body is the model's only input, whose shape follows from its size."""
    cdef ModelCore m = r.model
    cdef InputSpec spec
    cdef int64_t known = 1, variable = 0
    cdef Tensor made
    cdef uint32_t prefix
    cdef str prefix_text = f"[request id: {shown(r.id) or '<id_unknown>'}] "
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
        # the only copy of a body in this codec, because the element's length must stand before it
        memory = (<char*>&prefix)[:4] + body.ptr[:body.nbytes]
        r.inputs = [Tensor(spec.name, spec.dtype, (*shape, 1), memory)]
        return 0
    for d in spec.dims:
        if d < 0:
            variable += 1
        else:
            known = times(known, d)
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


cpdef bint decode_request(InferRequest r, body, header_length=None, shared_memory=None, Stop stop=None, binary=None,
                          reserve=None) except -1:
    # type: (..., Buffer, int | None, SharedMemory | None, ..., Buffer | None, Callable[[int], None] | None) -> bool
    """Fills `r` from an infer body. Returns whether outputs are binary by default.

    `header_length` is the value of Inference-Header-Content-Length, None when absent; it is at most the body's
    length. `binary` is what follows so many bytes, where that lies in a buffer of its own. `r.model` must be set.
    With `stop` this is called on a worker thread, and calls shared_memory there too; reserve(bytes) is called before
    memory for numbers is allocated. Raises InvalidArgument or Unsupported, Cancelled after stop.ask(), and what
    `reserve` raises, which must be Cancelled or Overloaded.
    """
    cdef Tensor holder = Tensor.__new__(Tensor)
    cdef Tensor rest = holder
    cdef Py_ssize_t n, begin
    cdef Known known
    cdef bint short
    cdef _Decoder d
    holder.hold(body, False)
    n = holder.nbytes if header_length is None else header_length
    if not 0 <= n <= holder.nbytes:
        raise InvalidArgument(f"inference header size should be in range (0, {holder.nbytes}), got: {n}")
    begin = n
    if binary is not None:
        rest = Tensor.__new__(Tensor)
        rest.hold(binary, False)
        begin = 0
    if n == 0:
        _raw(r, rest)
        if stop is not None:
            walk_strings(r.inputs, &stop.asked)
        return True
    short = n <= LONGEST and stop is None and header_length is not None
    if short:
        known = _known_texts.find(<const unsigned char*>holder.ptr, n)
        if known is not None and known.nbytes == rest.nbytes - begin and not (known.strings and binary is not None):
            known.fill(r, rest, begin)
            return known.binary_default
    d = _Decoder.__new__(_Decoder)
    d.r = r
    d.body = rest
    d.apart = binary is not None
    d.shared_memory = shared_memory
    d.with_binary = header_length is not None
    d.s = Reader.__new__(Reader)
    d.s.text = <const unsigned char*>holder.ptr  # kept by `holder`, which lives as long as this call
    d.s.end = n
    if stop is not None:
        d.s.large = True
        d.s.stop = &stop.asked
        d.s.reserve = reserve
    d.binary_at = begin
    d.eager = True
    try:
        d.document()
        if stop is not None:
            walk_strings(r.inputs, &stop.asked)
        elif short:
            _known_texts.offer(<const unsigned char*>holder.ptr, n, r, rest, d.binary_default)
        return d.binary_default
    except (Cancelled, Overloaded):
        raise
    except TritonError:
        pass
    d.s.reserve = None   # all of it was reserved
    # something is wrong: find the first error in the canonical order (rule 1)
    d.s.at = 0
    d.s.begin()
    d.s.skip_value(0)
    d.s.finish()
    d.s.at = 0
    d.binary_at = begin
    d.binary_default = False
    d.eager = False
    r.id = ""
    r.parameters = None
    d.document()
    return d.binary_default
