"""Validates a decoded request against its model, with the error texts of docs/protocol/observed.md 3.

The order is: the id of a sequence, requested outputs, number of inputs, batch sizes, then for each input name,
datatype, shape and byte size. The first error is raised.

Requests to one model have the same shapes over and over. So shapes that fit stay with the model's InputSpecs, and are not
computed with again. What they are judged by does not change while the model serves.
"""
cimport cython
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy

cdef extern from "Python.h":
    void* PyTuple_GET_ITEM(tuple shape, Py_ssize_t i) noexcept
    Py_ssize_t PyTuple_GET_SIZE(tuple shape) noexcept

from neptrio.request.sched cimport sched_yield

from neptrio.request.infer_request cimport (
    DT_BYTES,
    GPU_MEMORY,
    InferRequest,
    InputSpec,
    ModelCore,
    RequestedOutput,
    MOST_ELEMENTS,
    Strings,
    Tensor,
    element_size,
    same_name,
    times,
)

from operator import index

from neptrio.datatypes import NAME
from neptrio.errors import InvalidArgument, meant
from neptrio.limits import LONGEST_VALUE, shown

cdef object ZERO = 0    # most requests are of no sequence
cdef object MOST_ID = (1 << 64) - 1

cdef enum:
    FEW = 16                # up to so many inputs, names are compared each with each
    MOST_FITTED = 8         # dimensions of a shape that is remembered
    STRETCH = 32 << 10      # elements between two looks whether to stop
    LONG_BYTES = 64 << 10   # of strings; walking over fewer takes no longer than waiting for the GIL


def _prefix(InferRequest r):
    return f"[request id: {shown(r.id) or '<id_unknown>'}] "


def _dims(dims):
    return "[" + ",".join(str(d) for d in dims) + "]"


def _there_are(does, names):
    """What follows the text about a name that the model does not have, where none is near."""
    listed = ",".join(f"'{name}'" for name in names)
    return f", the model {does} [{shown(listed, LONGEST_VALUE)}]"


cdef _too_many_rows(InferRequest r, ModelCore m, int64_t batch):
    """A shape without the batch's dimension looks like that, as its first dimension is taken for it."""
    text = f"{_prefix(r)}inference request batch-size must be <= {m.max_batch_size} for '{m.name}', got {batch}"
    for t in r.inputs:
        spec = m.input_index.get(t.name)
        if spec is not None and spec.dims and len(t.shape) == len(spec.dims):
            text += (f": input '{t.name}' has the shape {_dims(t.shape)}, expected {_dims((-1, *spec.dims))}, whose first "
                     "dimension is the batch's size")
            break
    return InvalidArgument(text)


cdef _wrong_count(InferRequest r, ModelCore m):
    names = [t.name for t in r.inputs]
    missing = [s.name for s in m.input_specs if not s.optional and s.name not in names]
    total = len(m.input_specs)
    if m.required_inputs == total:
        head = f"expected {total} inputs but got {len(names)} inputs for model '{m.name}'. "
    else:
        head = (f"expected number of inputs between {m.required_inputs} and {total} but got "
                f"{len(names)} inputs for model '{m.name}'. ")
    got = shown(",".join(f"'{n}'" for n in names), LONGEST_VALUE)
    lost = ",".join(f"'{n}'" for n in missing)
    if not missing:
        takes = _there_are("takes", m.input_index)
        return InvalidArgument(f"{_prefix(r)}{head}Got input(s) [{got}]{takes}.")
    return InvalidArgument(
        f"{_prefix(r)}{head}Got input(s) [{got}], but missing required input(s) [{lost}]. "
        "Please provide all required input(s)."
    )


cdef _wrong_shape(InferRequest r, ModelCore m, InputSpec spec, Tensor t):
    if m.max_batch_size > 0:
        expected = _dims((-1, *spec.dims))
        note = ("NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to "
                "be prepended to each input shape. If you want to specify the full shape including the "
                "batch dim in your input dims config, try setting max_batch_size to zero. See the model "
                "configuration docs for more info on max_batch_size.")
    else:
        expected = _dims(spec.dims)
        note = ""
    return InvalidArgument(
        f"{_prefix(r)}unexpected shape for input '{t.name}' for model '{m.name}'. "
        f"Expected {expected}, got {_dims(t.shape)}. {note}"
    )


cdef void _walk(const char* p, Py_ssize_t nbytes, int64_t most, const int* stop, Strings* found) noexcept nogil:
    """Walks over at most `most` length-prefixed elements."""
    cdef Py_ssize_t at = 0
    cdef uint32_t n
    cdef int steps = 0
    found.count = 0
    found.cut = False
    while at < nbytes and found.count < most:
        if nbytes - at < 4:
            found.cut = True
            found.length = -1
            found.left = nbytes - at
            break
        memcpy(&n, p + at, 4)
        at += 4
        found.count += 1
        if nbytes - at < <Py_ssize_t>n:
            found.cut = True
            found.length = n
            found.left = nbytes - at
            break
        at += n
        steps += 1
        if steps == STRETCH:
            steps = 0
            if stop != NULL:
                if stop[0]:
                    return
                sched_yield()
    found.walked = True


cdef int walk_strings(list tensors, const int* stop) except -1:
    cdef Tensor t
    cdef Strings found
    for t in tensors:
        if t.dtype != DT_BYTES or t.nbytes < LONG_BYTES or t.memory_kind == GPU_MEMORY or t.strings.walked:
            continue
        found.walked = False
        with nogil:
            _walk(t.ptr, t.nbytes, MOST_ELEMENTS, stop, &found)
        t.strings = found
    return 0


cdef int _check_bytes(InferRequest r, ModelCore m, Tensor t, int64_t expected) except -1:
    """Refuses a BYTES tensor that has another number of elements, or whose last one goes beyond the end.

    A wrong number of elements is reported before an element that is cut off, as a Triton server does.
    """
    cdef Strings found = t.strings
    if not found.walked:
        _walk(t.ptr, t.nbytes, expected + 1, NULL, &found)
    if found.count > expected:
        raise InvalidArgument(
            f"{_prefix(r)}unexpected number of string elements {expected + 1} for inference input '{t.name}' for "
            f"model '{m.name}', expecting {expected}")
    if found.cut and found.length < 0:
        raise InvalidArgument(
            f"{_prefix(r)}incomplete string length indicator for inference input '{t.name}' for model "
            f"'{m.name}', expecting 4 bytes but only {found.left} bytes available. Please make sure "
            "the string length indicator is in one buffer.")
    if found.count != expected:
        raise InvalidArgument(
            f"{_prefix(r)}expected {expected} string elements for inference input '{t.name}' for model "
            f"'{m.name}', got {found.count}")
    if found.cut:
        raise InvalidArgument(
            f"incomplete string data for inference input '{t.name}', expecting string of length {found.length} but "
            f"only {found.left} bytes available")
    return 0


cdef int _check_many_names(InferRequest r) except -1:
    """Finds repeated names with a set: a body of 64 MiB may name a million inputs, too many to compare in pairs."""
    cdef Tensor t
    cdef set names = set()
    for t in r.inputs:
        if t.name in names:
            raise InvalidArgument(f"{_prefix(r)}input '{t.name}' already exists in request")
        names.add(t.name)
    return 0


cdef int _check_id(InferRequest r) except -1:
    """Refuses an id of a sequence that is neither a text nor 64 bits: callers in this process may give anything."""
    number = r.sequence_id
    if isinstance(number, str):
        return 0   # any text, bytes of clients that are none included: models are given what came
    try:
        r.sequence_id = index(number)   # numpy's integers too
    except TypeError:
        raise InvalidArgument(
            f"{_prefix(r)}sequence id must be an integer or a string, got {type(number).__name__}") from None
    if not 0 <= r.sequence_id <= MOST_ID:
        raise InvalidArgument(
            f"{_prefix(r)}sequence id must be from 0 to {MOST_ID} where it is an integer, got {r.sequence_id}")
    return 0


cdef int _check_has_id(InferRequest r, ModelCore m) except -1:
    """Refuses the start or end of a sequence that has no id (docs/protocol/sequence-extension.md), whether or not the model
    has sequences: it is a mistake of the client's, which a model without them would hide."""
    if r.sequence_id == 0 or r.sequence_id == "":
        raise InvalidArgument(
            f"inference request to model '{m.name}' must specify a non-zero or non-empty correlation ID")
    return 0


cdef inline bint _same_shape(tuple one, tuple other) noexcept:
    """Whether two shapes are the same object, as decoders that know a text again give it, or hold the same ones, as small numbers
    are. Others that are equal take the long way."""
    cdef Py_ssize_t i, n
    if one is other:
        return True
    if one is None or other is None:
        return False
    n = PyTuple_GET_SIZE(one)
    if n != PyTuple_GET_SIZE(other):
        return False
    for i in range(n):
        if PyTuple_GET_ITEM(one, i) != PyTuple_GET_ITEM(other, i):
            return False
    return True


@cython.boundscheck(False)
@cython.wraparound(False)
cdef inline bint _fit_again(list inputs, list specs) except -1:
    """Whether these are all inputs in the order of the configuration, with the shapes that fitted last."""
    cdef Tensor t
    cdef InputSpec spec
    cdef Py_ssize_t i, n = len(specs)
    if len(inputs) != n or n == 0:
        return False
    for i in range(n):
        t = <Tensor>inputs[i]
        spec = <InputSpec>specs[i]
        if (t.nbytes != spec.fitted_nbytes or t.dtype != spec.dtype or not same_name(t.name, spec.name)
                or not _same_shape(t.shape, spec.fitted)):
            return False
        t.name = spec.name
    return True


@cython.boundscheck(False)
@cython.wraparound(False)
cdef inline int _remember(InferRequest r, ModelCore m) except -1:
    """Keeps the shapes of a request that is right. All of them or none, so that they have the same batch size."""
    cdef Tensor t
    cdef InputSpec spec
    cdef Py_ssize_t i, n = len(r.inputs)
    if n != len(m.input_specs):
        return 0
    for i in range(n):
        t = <Tensor>r.inputs[i]
        spec = <InputSpec>m.input_specs[i]
        if t.name is not spec.name:  # in another order
            spec = <InputSpec>m.input_index[t.name]
        if t.dtype == DT_BYTES or len(t.shape) > MOST_FITTED:  # whose strings must be looked at; which takes much memory
            spec.fitted_nbytes = -1
        else:
            spec.fitted, spec.fitted_nbytes = t.shape, t.nbytes
    m.fitted_rows = r.batch_size
    return 0


@cython.boundscheck(False)  # every index is below a length that was asked for
@cython.wraparound(False)
cpdef validate(InferRequest r, ModelCore m):
    """Raises InvalidArgument, or sets `r.batch_size`. Reads the data of BYTES tensors only."""
    cdef RequestedOutput out
    cdef RequestedOutput before
    cdef Tensor t
    cdef Tensor other
    cdef InputSpec spec
    cdef Py_ssize_t i, j, n, first
    cdef int64_t batch = 0, have, want, room, size
    cdef tuple shape, dims
    cdef list inputs = r.inputs, specs = m.input_specs
    cdef bint batching = m.max_batch_size > 0
    if r.sequence_id is not ZERO and r.sequence_id != 0:
        _check_id(r)
    if r.sequence_start or r.sequence_end:
        _check_has_id(r, m)
    if r.outputs is not None:
        n = len(r.outputs)
        for i in range(n):  # no more than the model's outputs: of more, one is unknown or repeated
            out = r.outputs[i]
            if out.name not in m.output_names:
                raise InvalidArgument(
                    f"unexpected inference output '{out.name}' for model '{m.name}'"
                    f"{meant(out.name, sorted(m.output_names)) or _there_are('gives', sorted(m.output_names))}")
            for j in range(i):
                before = r.outputs[j]
                if before.name == out.name:
                    raise InvalidArgument(f"Duplicate output name '{out.name}' is not allowed in a request")
    if _fit_again(inputs, specs):
        r.batch_size = m.fitted_rows
        return
    n = len(inputs)
    if n > FEW:
        _check_many_names(r)
    for i in range(1, n if n <= FEW else 0):
        t = <Tensor>inputs[i]
        for j in range(i):
            other = <Tensor>inputs[j]
            if same_name(other.name, t.name):
                raise InvalidArgument(f"{_prefix(r)}input '{t.name}' already exists in request")
    if n > len(specs) or n < m.required_inputs:
        raise _wrong_count(r, m)
    if batching:
        first = True
        for i in range(n):
            t = <Tensor>inputs[i]
            if not t.shape:
                raise InvalidArgument(
                    f"{_prefix(r)}input '{t.name}' has no shape but model requires batch dimension for '{m.name}'")
            shape = t.shape
            have = shape[0]
            if first:
                batch = have
                first = False
            elif have != batch:
                raise InvalidArgument(
                    f"{_prefix(r)}input '{t.name}' batch size does not match other inputs for '{m.name}': "
                    f"it has {have} rows, input '{(<Tensor>inputs[0]).name}' {batch}")
        if batch > m.max_batch_size:
            raise _too_many_rows(r, m, batch)
        r.batch_size = batch if not first else 1
    else:
        r.batch_size = 1
    for i in range(n):
        t = <Tensor>inputs[i]
        spec = <InputSpec>specs[i]  # most clients send them in the order of the configuration
        if not same_name(t.name, spec.name):
            spec = m.input_index.get(t.name)
        if spec is None:
            raise InvalidArgument(
                f"unexpected inference input '{t.name}' for model '{m.name}'"
                f"{meant(t.name, m.input_index) or _there_are('takes', m.input_index)}")
        t.name = spec.name  # the same object, which later comparisons find at once
        if t.dtype != spec.dtype:
            raise InvalidArgument(
                f"{_prefix(r)}inference input '{t.name}' data-type is '{NAME.get(t.dtype, '<invalid>')}', but "
                f"model '{m.name}' expects '{NAME[spec.dtype]}'")
        shape, dims = t.shape, spec.dims
        first = 1 if batching else 0
        if len(shape) < first or (dims and len(shape) - first != len(dims)):  # no dims: any number of them
            raise _wrong_shape(r, m, spec, t)
        want = room = 1
        if first:
            want = times(1, shape[0])
            room = want if want else 1
        for j in range(first, len(shape)):
            have = shape[j]
            size = dims[j - first] if dims else -1
            if have < 0 or (size >= 0 and have != size):
                raise _wrong_shape(r, m, spec, t)
            want = times(want, have)
            room = times(room, have if have else 1)
        if first and shape[0] < 0:
            raise InvalidArgument(
                f"{_prefix(r)}inference request batch-size must be >= 1 for '{m.name}', got {shape[0]}")
        if room < 0:      # also if another dimension is 0, as code that computes with the shape could overflow
            raise InvalidArgument(f"{_prefix(r)}element count of input '{t.name}' exceeds maximum size of "
                                  f"{MOST_ELEMENTS}: its shape is {_dims(shape)}")
        if spec.dtype == DT_BYTES:
            _check_bytes(r, m, t, want)
        elif t.nbytes != want * element_size(spec.dtype):
            raise InvalidArgument(
                f"{_prefix(r)}input byte size mismatch for input '{t.name}' for model '{m.name}'. Expected "
                f"{want * element_size(spec.dtype)}, got {t.nbytes}")
    if r.batch_size:
        _remember(r, m)
    else:
        # everything is right except that the batch is empty
        raise InvalidArgument(f"{_prefix(r)}inference request batch-size must be >= 1 for '{m.name}', got 0")
