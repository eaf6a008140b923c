"""InferRequest, InferResponse and Tensor: what all parts of the server work on.

Every transport decodes into them and encodes from them; schedulers and backends see nothing of a protocol. Each
timestamp is taken once, into a C array in the request, and read by statistics, traces and metrics.
"""
cimport cython
from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from sys import intern

from neptrio.errors import InvalidArgument

cdef extern from *:
    # Tests move the clock while other threads read it without the GIL. These reads and writes are plain moves.
    """
    static int64_t clock_ahead_ns = 0;
    #define READ_AHEAD() __atomic_load_n(&clock_ahead_ns, __ATOMIC_RELAXED)
    #define ADD_AHEAD(ns) __atomic_add_fetch(&clock_ahead_ns, (ns), __ATOMIC_RELAXED)
    """
    int64_t READ_AHEAD() noexcept nogil
    int64_t ADD_AHEAD(int64_t ns) noexcept nogil


cdef int64_t now_ns() noexcept nogil:
    cdef timespec ts
    clock_gettime(CLOCK_MONOTONIC, &ts)
    return <int64_t>ts.tv_sec * 1000000000 + ts.tv_nsec + READ_AHEAD()


cdef int[15] _SIZES
_SIZES[:] = [0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 0, 2]


cdef int element_size(int dtype) noexcept nogil:
    return _SIZES[dtype] if 0 <= dtype < 15 else 0


def monotonic_ns() -> int:
    """Nanoseconds of CLOCK_MONOTONIC, the clock of every timestamp in the server."""
    return now_ns()


def jump_clock(int64_t ns) -> int:
    """Moves the clock of this process ahead by so many nanoseconds, for tests (neptrio.testing.Clock).

    Returns how far ahead it is now. It never goes back: time that has passed stays passed. Raises ValueError.
    """
    if ns < 0:
        raise ValueError(f"the clock cannot go back, got {ns} ns")
    return ADD_AHEAD(ns)


@cython.no_gc_clear  # clearing would drop view.obj without releasing the buffer it exported
cdef class Export:
    """See infer_request.pxd. A class of its own, since most tensors have none, and one that does something at its end takes
    longer to go."""

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


@cython.freelist(256)
@cython.no_gc_clear  # whoever looks at its memory may be in the same cycle and go later
cdef class Tensor:
    """A named, typed, row-major tensor over memory that it keeps alive.

    `shape` is a tuple of ints. A BYTES tensor holds the wire form: every element is a 4-byte little-endian length
    followed by as many bytes. The buffer protocol gives the raw bytes, read-only unless the tensor was made with
    `writable`; numpy arrays are made by neptrio.request.numpy_tensor.
    """

    def __init__(self, str name, int dtype, tuple shape, buffer=None, bint writable=False):
        # type: (..., ..., tuple[int, ...], Buffer | np.ndarray[Any, Any] | None, ...) -> None
        self.name = name
        self.dtype = dtype
        self.shape = shape
        if buffer is not None:
            self.hold(buffer, writable)

    cdef int hold(self, object buffer, bint writable) except -1:
        if PyBytes_CheckExact(buffer) and not writable:
            self.owner = buffer
            self.ptr = PyBytes_AS_STRING(buffer)
            self.nbytes = PyBytes_GET_SIZE(buffer)
            return 0
        cdef Export export = Export.__new__(Export)
        PyObject_GetBuffer(buffer, &export.view, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        self.export = export
        self.owner = buffer
        self.ptr = <const char*>export.view.buf
        self.nbytes = export.view.len
        if type(buffer) is memoryview:
            export_below(export, buffer)
        return 0

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        cdef bint readonly = self.export is None or self.export.view.readonly
        if self.memory_kind == GPU_MEMORY:
            raise BufferError(f"tensor '{self.name}' lies in GPU memory, copy it to the host first")
        PyBuffer_FillInfo(buffer, self, <void*>self.ptr, self.nbytes, readonly, flags)

    cpdef Py_ssize_t count(self) except -1:
        """The number of elements: the product of the shape. Raises InvalidArgument when it exceeds MOST_ELEMENTS."""
        cdef int64_t n = 1
        for d in self.shape:
            n = times(n, d)
        if n < 0:
            if 0 in self.shape and min(self.shape) == 0:
                return 0
            raise InvalidArgument(f"tensor '{self.name}' of shape {list(self.shape)} has an impossible element count")
        return n

    @property
    def address(self) -> int:
        """The address of the first byte; in GPU memory a device address."""
        return <size_t>self.ptr

    def tobytes(self) -> bytes:
        """A copy of the raw bytes."""
        return self.ptr[: self.nbytes]

    def renamed(self, str name):
        # type: (...) -> Tensor
        """The same memory under another name (ensemble steps, identity models)."""
        return alias(self, name, self.shape)

    def reshaped(self, tuple shape):
        # type: (tuple[int, ...]) -> Tensor
        """The same memory with another shape, which must have as many elements."""
        return alias(self, self.name, shape)

    def __repr__(self):
        return f"Tensor({self.name!r}, dtype={self.dtype}, shape={self.shape}, nbytes={self.nbytes})"


cdef int export_below(Export export, object view) except -1:
    """Exports a buffer from the object below a memoryview instead of the memoryview.

    A memoryview must not export to something that may outlive it: when the garbage collector finds it in a cycle it
    clears it although it exports, and releasing the export later reads freed memory. Bytes and bytearrays are in
    no cycle, and do not move memory that they export.
    """
    cdef Py_buffer below
    owner = view.obj
    if type(owner) is not bytes and type(owner) is not bytearray:
        return 0
    PyObject_GetBuffer(owner, &below, PyBUF_SIMPLE)
    below.readonly = export.view.readonly
    PyBuffer_Release(&export.view)
    export.view = below
    return 0


cpdef Tensor alias(Tensor tensor, str name, tuple shape):
    # type: (..., ..., tuple[int, ...]) -> Tensor
    """A tensor over the same memory with another name or shape."""
    cdef Tensor t = Tensor.__new__(Tensor)
    t.name = name
    t.dtype = tensor.dtype
    t.shape = shape
    t.owner = tensor
    t.ptr = tensor.ptr
    t.nbytes = tensor.nbytes
    t.memory_kind = tensor.memory_kind
    t.memory_id = tensor.memory_id
    return t


def tensor_at(str name, int dtype, tuple shape, size_t address, Py_ssize_t nbytes, owner,
              int memory_kind=0, int64_t memory_id=0):
    # type: (..., ..., tuple[int, ...], ..., ..., object, ..., ...) -> Tensor
    """A tensor over memory at an address that `owner` keeps alive (shared memory, GPU memory)."""
    cdef Tensor t = Tensor.__new__(Tensor)
    t.name = name
    t.dtype = dtype
    t.shape = shape
    t.owner = owner
    t.ptr = <const char*>address
    t.nbytes = nbytes
    t.memory_kind = memory_kind
    t.memory_id = memory_id
    return t


cdef class RequestedOutput:
    """An output that the client asked for, and in which form it wants it."""

    def __cinit__(self):
        self.binary = -1

    def __init__(self, str name):
        self.name = name


cdef class Responder:
    """Receives a request's responses. Called on the trio thread only; must not raise."""

    cpdef object respond(self, InferRequest request, InferResponse response, bint final):
        raise NotImplementedError(f"{type(self).__name__}.respond")

    cpdef bint wait_for_room(self, InferRequest request, object callback) except -1:
        # type: (..., Callable[[], None]) -> bool
        """Flow control for requests with many responses; called after each respond().

        True: the client is behind, and callback() will be called once, on the trio thread, when it has caught up or is
        gone. False: go on; callback is not kept.
        """
        return False

    cpdef bint waits_for_kernel(self, InferRequest request, object callback, int stage) except -1:
        # type: (..., Callable[[], None], ...) -> bool
        """Called of an answered request once its connection was flushed: with stage 0, and with stage 1 when that is over.

        Stage 0 is the way of what was answered so far to the connection's output (HTTP/2: windows), stage 1 from there to the
        kernel. True: callback() will be called once, on the trio thread, when the stage is over, or nobody waits for the
        answer. False: it is over, or nobody knows; callback is not kept.
        """
        return False


cdef class Owner:
    """A client that requests are sent by: see infer_request.pxd."""

    def __init__(self, str name):
        self.name = name

    def too_many(self):
        # type: () -> Exception
        """The error for a request beyond `most`."""
        raise NotImplementedError(f"{type(self).__name__}.too_many")


@cython.freelist(256)
cdef class InferRequest:
    """One inference request, from its decoding to its final response."""

    def __cinit__(self):
        self.model_name = self.model_version = ""
        self.id = ""
        self.sequence_id = 0
        self.batch_size = 1
        self.collect_statistics = True

    def stamp(self, int which, int64_t ns=0):
        """Sets a timestamp, to now when `ns` is 0."""
        if not 0 <= which < TIMESTAMP_COUNT:
            raise IndexError(f"timestamp {which} is not in 0..{TIMESTAMP_COUNT - 1}")
        self.timestamps[which] = ns if ns else now_ns()

    def timestamp(self, int which) -> int:
        """A timestamp in nanoseconds of CLOCK_MONOTONIC, 0 when that point was not reached."""
        if not 0 <= which < TIMESTAMP_COUNT:
            raise IndexError(f"timestamp {which} is not in 0..{TIMESTAMP_COUNT - 1}")
        return self.timestamps[which]

    def input_named(self, str name):
        # type: (...) -> Tensor | None
        """The input tensor of that name, or None."""
        cdef Tensor t
        for t in self.inputs:
            if t.name == name:
                return t
        return None

    def __repr__(self):
        return f"InferRequest({self.model_name!r}, id={self.id!r}, state={self.state})"


@cython.freelist(256)
cdef class InferResponse:
    """One response: outputs, or an error. `null` marks a final response without contents."""

    def __init__(self, list outputs=None, error=None, dict parameters=None):
        # type: (list[Tensor] | None, TritonError | None, dict[str, Any] | None) -> None
        self.outputs = outputs
        self.error = error
        self.parameters = parameters


cdef class InputSpec:
    """What a model's configuration says about one input."""

    def __init__(self, str name, int dtype, tuple dims, bint optional=False, bint ragged=False):
        # type: (..., ..., tuple[int, ...], ..., ...) -> None
        cdef int64_t n = 1
        self.name = intern(name)  # so are names elsewhere, which makes most comparisons one of addresses
        self.dtype = dtype
        self.dims = dims
        self.optional = optional
        self.ragged = ragged
        self.fitted_nbytes = -1
        for d in dims:
            if d >= 0:
                n = times(n, d)
        if n < 0:
            raise InvalidArgument(
                f"input '{name}' has the dims {list(dims)}, which are more than {MOST_ELEMENTS} elements")
        self.fixed_elements = -1 if not dims or min(dims) < 0 else n


cdef class ModelCore:
    """The part of a loaded model version that requests touch; neptrio.repository.model.Model extends it.

    `inflight` counts accepted requests without a final response. When it falls to 0 `on_idle` is called, which
    an unload waits for.
    """

    def __init__(self, str name, str version):
        self.name = name
        self.version = version
        self.input_specs = []
        self.input_index = {}
        self.output_names = set()

    def set_inputs(self, list specs):
        # type: (list[InputSpec]) -> None
        """Sets the input specs, in the order of the configuration."""
        cdef InputSpec spec
        self.input_specs = specs
        self.input_index = {}
        self.required_inputs = 0
        for spec in specs:
            self.input_index[spec.name] = spec
            if not spec.optional:
                self.required_inputs += 1

    def take_back(self, InferRequest request not None) -> bool:
        """Whether a request that its instance could not begin (errors.NotBegun) waits again, and is not to be answered."""
        return False

    def body_source(self):
        """What makes memory for the binary tensors of a request that is to be received: a function of a number of bytes,
        whose result is a writable buffer or None. None if the model has no such memory."""
        return None
