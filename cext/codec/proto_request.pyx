"""Decodes the bytes of a ModelInferRequest into an InferRequest.

No protobuf message object is made. Input tensors are views into the message's bytes, which they keep alive.

Decoding takes two passes. The first walks over the top-level fields and notes where inputs, outputs, parameters and raw
contents are, the second reads them. So the id and the model's name are known in whatever order the fields come, and
every error can contain them. Where the fields before raw contents are ones that came before (cext/codec/known_texts), neither
is made.
Source: proto/grpc_service.proto; docs/protocol/observed.md.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from neptrio.codec.protobuf cimport (
    Cursor,
    Slice,
    cursor_of,
    expect_bytes,
    malformed,
    name_text,
    read_slice,
    read_tag,
    read_varint,
    skip_field,
    text,
)
from neptrio.codec.json_reader cimport Stop
from neptrio.codec.known_texts cimport LONGEST, Known, KnownTexts
from neptrio.codec.proto_contents cimport read_contents
from neptrio.codec.split_message cimport SplitMessage
from neptrio.request.infer_request cimport InferRequest, RequestedOutput, Tensor
from neptrio.request.validate cimport walk_strings
from neptrio.codec.proto_parameter cimport Region, apply_request_parameter, read_region

from neptrio import limits
from neptrio.codec.json_reader import too_many
from neptrio.codec.json_request import no_shared_memory, region_and_classes
from neptrio.datatypes import NUMBER
from neptrio.errors import Cancelled, InvalidArgument

cdef dict _NUMBER = NUMBER
cdef Py_ssize_t MOST_DIMENSIONS = limits.MOST_DIMENSIONS
cdef Py_ssize_t MOST_TENSORS = limits.MOST_TENSORS
cdef Py_ssize_t MOST_PARAMETERS = limits.MOST_PARAMETERS

cdef extern from * nogil:
    """
    #include <string.h>
    #ifndef __USE_GNU
    void* memmem(const void*, size_t, const void*, size_t);
    #endif
    """
    void* memmem(const void* text, size_t n, const void* part, size_t length)

cdef enum:
    STEPS = 256                # parts between two calls that let other threads run: a fraction of a millisecond
    # what takes about a quarter of a millisecond: fields of a message, bytes of everything but raw contents, and of raw
    # contents that are strings
    MOST_FIELDS = 1024
    TYPED_BYTES = 64 << 10
    STRING_BYTES = 256 << 10
    REGION_BYTES = 1 << 20     # of inputs in shared memory
    FEW = 8                    # tensors: requests with more are read anew each time

known_heads = KnownTexts()     # the fields before raw contents  # type: KnownTexts
cdef KnownTexts _known_heads = known_heads


cdef int add_dimension(list dims, uint64_t v) except -1:
    if len(dims) == MOST_DIMENSIONS:
        raise too_many("dimensions", "shape", MOST_DIMENSIONS)
    dims.append(<int64_t>v)
    return 0


cdef int read_shape(list dims, Slice s) except -1:
    cdef Cursor c = cursor_of(s)
    cdef uint64_t v
    while c.p < c.end:
        read_varint(&c, &v)
        add_dimension(dims, v)
    return 0


cdef int breathe(const int* asked, int* steps) except -1:
    """Lets other threads run now and then; raises Cancelled when nobody wants the request any more."""
    if asked[0]:
        raise Cancelled()
    steps[0] += 1
    if steps[0] >= STEPS:
        steps[0] = 0
        with nogil:
            pass
    return 0


cdef bytes joined_contents(list before, bytes last, int dtype, str name, str model, const int* stop, object reserve):
    """The elements of several InferTensorContents of one input, in order; `last` are those of the last one."""
    cdef list parts = []
    cdef bytes one
    cdef int steps = 0
    cdef Slice s
    for one in before:
        s.p = <const uint8_t*>PyBytes_AS_STRING(one)
        s.n = len(one)
        parts.append(read_contents(s, dtype, name, model, stop, reserve))
        if stop != NULL:
            breathe(stop, &steps)
    parts.append(last)
    return b"".join(parts)


cdef Tensor read_input(InferRequest r, Slice s, object owner, Slice* raw, Py_ssize_t raw_count,
                       Py_ssize_t* raw_at, object shared_memory, const int* stop, object reserve):
    cdef Cursor c = cursor_of(s)
    cdef uint64_t tag, v
    cdef int field, wire_type
    cdef Slice part, contents
    cdef bint has_contents = False
    cdef str name = ""
    cdef str datatype = ""
    cdef list dims = []
    cdef Region region
    cdef Tensor t
    cdef bytes data
    cdef list before = None  # contents of which more came: protobuf puts their elements together
    region.name.n = 0
    region.offset = region.byte_size = 0
    contents.n = 0
    while c.p < c.end:
        read_tag(&c, &tag)
        field = <int>(tag >> 3)
        wire_type = tag & 7
        if field == 3:
            if wire_type == 2:
                read_slice(&c, &part)
                read_shape(dims, part)
            elif wire_type == 0:
                read_varint(&c, &v)
                add_dimension(dims, v)
            else:
                skip_field(&c, wire_type)    # as protobuf does with a field of another type
        elif 1 <= field <= 5:
            expect_bytes(wire_type)
            read_slice(&c, &part)
            if field == 1:
                name = name_text(part, "the name of an input")
            elif field == 2:
                datatype = name_text(part, "a datatype")
            elif field == 4:
                read_region(part, &region, NULL, f"input '{name}'")
            else:
                if has_contents:
                    if before is None:
                        before = []
                    before.append((<const char*>contents.p)[: contents.n])
                contents = part
                has_contents = True
        else:
            skip_field(&c, wire_type)
    t = Tensor.__new__(Tensor)
    t.name = name
    t.dtype = _NUMBER.get(datatype, 0)
    t.shape = tuple(dims)
    if region.name.n:
        if has_contents:
            raise InvalidArgument(f"contents field must not be specified when using shared memory for '{name}' for model "
                                  f"'{r.model_name}'")
        if shared_memory is None:
            raise no_shared_memory()
        return shared_memory.input_tensor(name, t.dtype, t.shape, name_text(region.name, "a region's name"), region.offset,
                                          region.byte_size)
    if raw_count:
        if has_contents:
            raise InvalidArgument(f"contents field must not be specified when using raw_input_contents for "
                                  f"'{name}' for model '{r.model_name}'")
        if raw_at[0] >= raw_count:
            raise InvalidArgument(
                f"unable to find data for input tensor '{name}' for model '{r.model_name}' in request.")
        t.owner = owner
        t.ptr = <const char*>raw[raw_at[0]].p
        t.nbytes = raw[raw_at[0]].n
        raw_at[0] += 1
        return t
    if not has_contents:
        raise InvalidArgument(
            f"unable to find data for input tensor '{name}' for model '{r.model_name}' in request.")
    data = read_contents(contents, t.dtype, name, r.model_name, stop, reserve)
    if before is not None:
        data = joined_contents(before, data, t.dtype, name, r.model_name, stop, reserve)
    t.hold(data, False)
    return t


cdef RequestedOutput read_output(Slice s, object shared_memory):
    cdef Cursor c = cursor_of(s)
    cdef uint64_t tag
    cdef Slice part
    cdef RequestedOutput out = RequestedOutput.__new__(RequestedOutput)
    cdef Region region
    cdef int64_t class_count = 0
    region.name.n = 0
    region.offset = region.byte_size = 0
    out.name = ""
    while c.p < c.end:
        read_tag(&c, &tag)
        if (tag >> 3) == 1 and (tag & 7) == 2:
            read_slice(&c, &part)
            out.name = name_text(part, "the name of an output")
        elif (tag >> 3) == 2 and (tag & 7) == 2:
            read_slice(&c, &part)
            read_region(part, &region, &class_count, f"output '{out.name}'")
        else:
            skip_field(&c, tag & 7)
    out.class_count = class_count
    if region.name.n:
        if class_count:
            raise region_and_classes()
        out.shm_region = name_text(region.name, "a region's name")
        if shared_memory is None:
            raise no_shared_memory()
        out.shm_place = shared_memory.output_region(out.shm_region)
        out.shm_offset = <int64_t>region.offset
        out.shm_byte_size = <int64_t>region.byte_size
    return out


cdef struct Slices:
    Slice* items
    Py_ssize_t n
    Py_ssize_t room
    Slice[8] few     # enough for nearly every request, so that nothing must be allocated


cdef inline void slices_init(Slices* s) noexcept:
    s.items = s.few
    s.n = 0
    s.room = 8


cdef inline void slices_free(Slices* s) noexcept:
    if s.items != s.few:
        free(s.items)


cdef int slices_add(Slices* s, Slice item) except -1:
    cdef Slice* grown
    if s.n == s.room:
        grown = <Slice*>malloc(2 * s.room * sizeof(Slice))
        if grown == NULL:
            raise MemoryError
        memcpy(grown, s.items, s.n * sizeof(Slice))
        slices_free(s)
        s.items = grown
        s.room *= 2
    s.items[s.n] = item
    s.n += 1
    return 0


cdef Py_ssize_t head_of(const uint8_t* p, Py_ssize_t n, Slice* contents, Py_ssize_t* count) noexcept:
    """How many bytes come before the raw contents, which become `contents`; 0 where it is not worth knowing, or where
    anything else follows them."""
    cdef const uint8_t* at = p
    cdef const uint8_t* end = p + n
    cdef Py_ssize_t head = -1, length
    cdef int tag, shift
    count[0] = 0
    while at < end:
        tag = at[0]
        if tag == 0x3A:                               # field 7, raw_input_contents
            if head < 0:
                head = at - p
            if count[0] == FEW:
                return 0
        elif head >= 0 or tag & 7 != 2 or not 1 <= tag >> 3 <= 6:
            return 0
        at += 1
        length = shift = 0
        while at < end and at[0] >= 128 and shift < 28:
            length |= <Py_ssize_t>(at[0] & 127) << shift
            shift += 7
            at += 1
        if at == end or at[0] >= 128:
            return 0
        length |= <Py_ssize_t>at[0] << shift
        at += 1
        if length > end - at:
            return 0
        if tag == 0x3A:
            contents[count[0]].p = at
            contents[count[0]].n = length
            count[0] += 1
        at += length
    return head if 0 < head <= LONGEST else 0


cdef uint64_t region_bytes(Slice tensor) noexcept:
    """The bytes that an input has in shared memory as its parameters say, 0 if it is not there. Where the parameter is
    not written as it usually is, or the text is something else, so many that a worker looks."""
    cdef const uint8_t* at = tensor.p
    cdef const uint8_t* end = tensor.p + tensor.n
    cdef uint64_t value, total = 0
    cdef int shift
    while True:
        at = <const uint8_t*>memmem(at, end - at, b"shared_memory_byte_size", 23)
        if at == NULL:
            return total
        # after the key of a map's entry: its value (field 2), which has a length, and in it an int64 (field 2)
        at += 23
        if end - at < 4 or at[0] != 0x12 or at[2] != 0x10:
            return REGION_BYTES + 1
        at += 3
        value, shift = 0, 0
        while at < end and at[0] >= 128 and shift < 28:
            value |= <uint64_t>(at[0] & 127) << shift
            at += 1
            shift += 7
        if at == end or at[0] >= 128:
            return REGION_BYTES + 1
        total += value | <uint64_t>at[0] << shift


def decodes_slowly(message):
    # type: (Buffer) -> bool
    """Whether decoding a large message takes so long that a worker must do it: see docs/loop.md.

    Most large messages carry raw contents, whose decoding takes no time however large they are. Not so typed contents,
    the lengths of very many strings, a message that consists of very many small parts, and large inputs that are to be
    read from shared memory.
    """
    cdef Py_buffer view
    cdef Cursor c
    cdef uint64_t tag
    cdef Slice s
    cdef Py_ssize_t fields = 0, typed = 0, contents = 0
    cdef uint64_t in_regions = 0
    cdef bint strings = False
    if type(message) is SplitMessage:  # whose raw contents are numbers
        message = (<SplitMessage>message).head
    PyObject_GetBuffer(message, &view, PyBUF_SIMPLE)
    try:
        c.p = <const uint8_t*>view.buf
        c.end = c.p + view.len
        while c.p < c.end:
            fields += 1
            if fields > MOST_FIELDS:
                return True
            read_tag(&c, &tag)
            if (tag & 7) != 2:
                skip_field(&c, tag & 7)
                continue
            read_slice(&c, &s)
            if (tag >> 3) == 7:
                contents += s.n
            else:
                typed += s.n
                if typed > TYPED_BYTES:
                    return True
                if (tag >> 3) == 5:
                    in_regions += region_bytes(s)
                    if in_regions > REGION_BYTES:
                        return True
                if (tag >> 3) == 5 and not strings:
                    strings = memmem(s.p, s.n, b"BYTES", 5) != NULL
        return strings and contents > STRING_BYTES
    except InvalidArgument:
        return False   # decoding it says what is wrong
    finally:
        PyBuffer_Release(&view)


cpdef int decode_request(InferRequest r, message, shared_memory=None, Stop stop=None, reserve=None) except -1:
    # type: (..., Buffer, SharedMemory | None, ..., Callable[[int], None] | None) -> None
    """Fills `r` from the bytes of a ModelInferRequest.

    `message` is any buffer or a SplitMessage; input tensors are views of it and keep it alive. `shared_memory` (service.shared_memory)
    gives inputs that are in a registered region. With `stop` this is called on a worker thread: it walks over strings
    too, so that validation need not, and calls reserve(bytes) before it allocates for typed contents.
    Raises WireError for bytes that are no such message, TritonError for a message with invalid parameters or
    tensors (`r.id` and `r.model_name` are set then), Cancelled after stop.ask(), and what `reserve` raises.
    """
    if r is None:
        raise TypeError("expected an InferRequest, got None")
    cdef const int* asked = NULL if stop is None else &stop.asked
    cdef int steps = 0
    cdef Py_buffer view
    cdef Cursor c
    cdef uint64_t tag
    cdef int field
    cdef Slice s
    cdef Slices inputs, outputs, parameters, raw
    cdef Py_ssize_t i, at, raw_at = 0
    cdef list made, wanted
    cdef list raws = None
    cdef Py_buffer part
    cdef Tensor tensor
    cdef Slice[FEW] contents
    cdef Py_ssize_t head = 0, count = 0
    cdef Known known
    if type(message) is SplitMessage:
        raws = (<SplitMessage>message).raws
        message = (<SplitMessage>message).head
    r.inputs = made = []
    r.model_name = ""
    slices_init(&inputs)
    slices_init(&outputs)
    slices_init(&parameters)
    slices_init(&raw)
    PyObject_GetBuffer(message, &view, PyBUF_SIMPLE)
    try:
        if stop is None and raws is None:
            head = head_of(<const uint8_t*>view.buf, view.len, contents, &count)
        if head:
            known = _known_heads.find(<const unsigned char*>view.buf, head)
            if known is not None and len(known.inputs) == count:
                known.fill_from(r, message, contents)
                return 0
        c.p = <const uint8_t*>view.buf
        c.end = c.p + view.len
        while c.p < c.end:
            if asked != NULL:
                breathe(asked, &steps)
            read_tag(&c, &tag)
            field = <int>(tag >> 3)
            if field < 1 or field > 7 or (tag & 7) != 2:
                if 1 <= field <= 7:
                    expect_bytes(tag & 7)
                skip_field(&c, tag & 7)
                continue
            read_slice(&c, &s)
            if field == 7:
                slices_add(&raw, s)
            elif field == 5:
                if inputs.n == MOST_TENSORS:
                    raise too_many("tensors", "inputs", MOST_TENSORS)
                slices_add(&inputs, s)
            elif field == 6:
                if outputs.n == MOST_TENSORS:
                    raise too_many("tensors", "outputs", MOST_TENSORS)
                slices_add(&outputs, s)
            elif field == 4:
                if parameters.n == MOST_PARAMETERS:
                    raise too_many("members", "parameters", MOST_PARAMETERS)
                slices_add(&parameters, s)
            elif field == 1:
                r.model_name = name_text(s, "the model's name")
            elif field == 2:
                r.model_version = name_text(s, "the model's version")
            else:
                r.id = text(s)
        if raws is not None:
            for memory in raws:  # each stays where it is while something refers to it
                PyObject_GetBuffer(memory, &part, PyBUF_SIMPLE)
                s.p = <const uint8_t*>part.buf
                s.n = part.len
                PyBuffer_Release(&part)
                slices_add(&raw, s)
        for i in range(parameters.n):
            apply_request_parameter(r, parameters.items[i])
            if asked != NULL:
                breathe(asked, &steps)
        for i in range(inputs.n):
            at = raw_at
            tensor = read_input(r, inputs.items[i], message, raw.items, raw.n, &raw_at, shared_memory, asked, reserve)
            if raws is not None and raw_at > at:
                tensor.owner = raws[at]
            made.append(tensor)
            if asked != NULL:
                breathe(asked, &steps)
        if outputs.n:
            r.outputs = wanted = []
            for i in range(outputs.n):
                wanted.append(read_output(outputs.items[i], shared_memory))
                if asked != NULL:
                    breathe(asked, &steps)
        if asked != NULL:
            walk_strings(made, asked)
        if head and len(made) == count:
            _known_heads.offer(<const unsigned char*>view.buf, head, r, message, False)
    finally:
        slices_free(&inputs)
        slices_free(&outputs)
        slices_free(&parameters)
        slices_free(&raw)
        PyBuffer_Release(&view)
    return 0
