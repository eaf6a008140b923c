"""A session of ONNX Runtime's C library: its options, its model's inputs and outputs, and runs.

run() takes and returns Tensors of any datatype, for batches that need Python (strings, ragged
inputs). Batches that do not are executed by batch.pyx.

Rules:
 1. A session belongs to one instance or to several of a model, each of which runs one batch at a time: ONNX Runtime lets any
    number of threads run a session, and what a run needs beside it lies in the call or in the batch. It is made, run and closed
    without the GIL, because each of these may take long and calls no Python.
 2. Input values use memory that its owner (a tensor, the instance's work memory) keeps until the run is over; they are
    released right after it.
 3. An output is memory that the library made. Its tensor owns the value and releases it; the library keeps the
    allocator alive until then, even longer than the session.
 4. The exception: a model may return an input as an output, and that value would use memory that is overwritten
    later. Such an output is copied.
"""
import os

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from neptrio.backends.onnx.api cimport (
    Feed,
    Status,
    allocator,
    check,
    cpu_memory,
    datatype_of,
    element_of,
    env,
    failure,
    ort,
)
from neptrio.backends.onnx.types cimport describe, element
from neptrio.request.infer_request cimport DT_BYTES, GPU_MEMORY, Tensor, element_size, times

from neptrio.request.numpy_tensor import split_bytes
from neptrio.errors import InvalidArgument

cdef enum:
    STRING = 8    # element type of strings
    SEVERITY = 3  # log level of sessions: errors only

cdef class OnnxTensor(Tensor):
    """A tensor over memory that ONNX Runtime made."""

    def __dealloc__(self):
        if self.value != NULL:
            ort.release_value(self.value)


cdef class OnnxSession:
    """A session on the CPU. `options` is a backends.onnx.options.Options; with `content` the model is these bytes, which may change
    or go once the session is made. Raises OrtError.

    It is made, run and closed on instances' threads; close(), or freeing the object, releases it.
    """

    def __cinit__(self):
        self.keep = []
        self.feed_names = []
        self.output_names = []

    def __init__(self, path, options, const unsigned char[::1] content=None):
        # type: (..., ..., Any) -> None
        cdef void* made = NULL
        cdef const void* model = NULL
        cdef size_t nbytes = 0
        cdef Status status
        cdef bytes file = os.fsencode(path)
        cdef const char* c_path = file
        if env == NULL:
            raise RuntimeError("the library of ONNX Runtime is not loaded")
        check(ort.create_options(&made))
        try:
            set_options(made, options)
            if content is not None and content.shape[0]:
                model = &content[0]
                nbytes = content.shape[0]
            with nogil:
                if model == NULL:
                    status = ort.create_session(env, c_path, made, &self.session)
                else:
                    status = ort.create_session_from(env, model, nbytes, made, &self.session)
            check(status)
        finally:
            ort.release_options(made)
        self.read_signature()

    def __dealloc__(self):
        if self.session != NULL:
            ort.release_session(self.session)
        free(self.c_feed_names)
        free(self.feed_types)
        free(self.c_output_names)
        free(self.output_types)

    def close(self):
        """Releases the session with its weights, memory and threads. No run may be under way or follow."""
        cdef void* session = self.session
        self.session = NULL
        if session != NULL:
            with nogil:
                ort.release_session(session)

    cdef int read_signature(self) except -1:
        """Reads the model's inputs and outputs."""
        cdef size_t n = 0, i
        check(ort.input_count(self.session, &n))
        self.inputs = tuple([self.value_info(0, i) for i in range(n)])
        check(ort.initializer_count(self.session, &n))
        self.initializers = tuple([self.value_info(1, i) for i in range(n)])
        check(ort.output_count(self.session, &n))
        self.outputs = tuple([self.value_info(2, i) for i in range(n)])
        feeds = self.inputs + self.initializers
        self.feed_names = [info.name for info in feeds]
        self.output_names = [info.name for info in self.outputs]
        self.c_feed_names = <const char**>calloc(max(len(feeds), 1), sizeof(char*))
        self.feed_types = <int*>calloc(max(len(feeds), 1), sizeof(int))
        self.c_output_names = <const char**>calloc(max(len(self.outputs), 1), sizeof(char*))
        self.output_types = <int*>calloc(max(len(self.outputs), 1), sizeof(int))
        if not (self.c_feed_names and self.feed_types and self.c_output_names and self.output_types):
            raise MemoryError
        for i, info in enumerate(feeds):
            self.c_feed_names[i] = self.kept(info.name)
            self.feed_types[i] = element(info.type)
        for i, info in enumerate(self.outputs):
            self.c_output_names[i] = self.kept(info.name)
            self.output_types[i] = datatype_of(element(info.type))
        return 0

    cdef const char* kept(self, str name) except NULL:
        encoded = name.encode()
        self.keep.append(encoded)
        return PyBytes_AS_STRING(encoded)

    cdef object value_info(self, int which, size_t i):
        cdef char* name = NULL
        cdef void* info = NULL
        if which == 0:
            check(ort.input_name(self.session, i, allocator, &name))
        elif which == 1:
            check(ort.initializer_name(self.session, i, allocator, &name))
        else:
            check(ort.output_name(self.session, i, allocator, &name))
        text = name.decode()
        check(ort.free_memory(allocator, name))
        if which == 0:
            check(ort.input_type(self.session, i, &info))
        elif which == 1:
            check(ort.initializer_type(self.session, i, &info))
        else:
            check(ort.output_type(self.session, i, &info))
        try:
            return describe(text, info)
        finally:
            ort.release_type(info)

    def get_inputs(self):
        # type: () -> tuple[ValueInfo, ...]
        """The inputs that every request must have."""
        return self.inputs

    def get_overridable_initializers(self):
        # type: () -> tuple[ValueInfo, ...]
        """The inputs that have a default and may be left out."""
        return self.initializers

    def get_outputs(self):
        # type: () -> tuple[ValueInfo, ...]
        """The outputs."""
        return self.outputs

    def run(self, list names not None, list tensors not None, ready=None):
        # type: (list[str], list[Tensor], Callable[[], object] | None) -> list[Tensor]
        """Runs the model; returns the outputs `names` as Tensors, in that order.

        Inputs that the model does not have are ignored; `ready()` is called when the inputs are prepared. Raises
        OrtError, and InvalidArgument for strings that are not UTF-8 or tensors in GPU memory.
        """
        cdef size_t n = 0, made = 0, k, n_outputs = len(names)
        cdef Status status = NULL
        cdef Tensor t
        cdef OnnxTensor output
        cdef list copies = []
        cdef list outputs = []
        cdef Feed* feeds = <Feed*>calloc(len(tensors) + 1, sizeof(Feed))
        cdef void** values = <void**>calloc(len(tensors) + 1, sizeof(void*))
        cdef const char** feed_names = <const char**>calloc(len(tensors) + 1, sizeof(char*))
        cdef const char** wanted = <const char**>calloc(n_outputs + 1, sizeof(char*))
        cdef void** results = <void**>calloc(n_outputs + 1, sizeof(void*))
        try:
            if not (feeds and values and feed_names and wanted and results):
                raise MemoryError
            if self.session == NULL:
                raise RuntimeError("the session is closed")
            for k, name in enumerate(names):
                wanted[k] = self.c_output_names[self.output_names.index(name)]
            for t in tensors:
                if t.name not in self.feed_names:
                    continue
                fill_feed(self, &feeds[n], t, copies)
                feed_names[n] = self.c_feed_names[feeds[n].slot]
                if t.dtype == DT_BYTES:
                    values[n] = string_value(&feeds[n], t)
                else:
                    check(make_value(self, &feeds[n], &values[n]))
                n += 1
            if ready is not None:
                ready()
            with nogil:
                status = ort.run(self.session, NULL, feed_names, values, n, wanted, n_outputs, results)
            check(status)
            while made < n_outputs:
                value = results[made]
                results[made] = NULL
                made += 1
                output = tensor_of(self, self.output_names.index(names[made - 1]), value)
                for k in range(n):
                    keep_apart(output, &feeds[k])
                outputs.append(output)
            return outputs
        finally:
            for k in range(n + 1):
                if values != NULL and values[k] != NULL:
                    ort.release_value(values[k])
            for k in range(n_outputs):
                if results != NULL and results[k] != NULL:
                    ort.release_value(results[k])
            for k in range(n):
                free(<void*>feeds[k].dims)
            free(feeds)
            free(values)
            free(feed_names)
            free(wanted)
            free(results)


cdef int fill_feed(OnnxSession session, Feed* feed, Tensor t, list copies) except -1:
    """Fills `feed` from a tensor. `copies` keeps copies of memory alive; the caller must free `feed.dims`."""
    cdef size_t i
    cdef int64_t* dims
    cdef int width = element_size(t.dtype)
    if t.memory_kind == GPU_MEMORY:
        raise InvalidArgument(f"input '{t.name}' lies in GPU memory and this instance runs on the CPU")
    feed.slot = session.feed_names.index(t.name)
    feed.rank = len(t.shape)
    dims = <int64_t*>calloc(feed.rank + 1, sizeof(int64_t))
    if dims == NULL:
        raise MemoryError
    for i in range(feed.rank):
        dims[i] = t.shape[i]
    feed.dims = dims
    feed.data = t.ptr
    feed.nbytes = t.nbytes
    if width > 1 and <size_t>t.ptr % width:  # a tensor may start at any byte of a request's body
        copy = PyByteArray_FromStringAndSize(t.ptr, t.nbytes)
        copies.append(copy)
        feed.data = PyByteArray_AS_STRING(copy)
    return 0


cdef void* string_value(Feed* feed, Tensor t) except NULL:
    """A value with the strings of a BYTES tensor, which the library copies. Raises InvalidArgument."""
    cdef void* value = NULL
    cdef char* buffer = NULL
    cdef size_t i
    cdef int64_t count = 1
    cdef list elements = split_bytes(t)
    for i in range(feed.rank):
        count = times(count, feed.dims[i])
    if count != len(elements):
        raise InvalidArgument(f"input '{t.name}' has {len(elements)} elements, its shape {list(t.shape)} holds {count}")
    check(ort.create_tensor(allocator, feed.dims, feed.rank, STRING, &value))
    try:
        for i in range(<size_t>count):
            element = elements[i]
            try:
                element.decode()
            except UnicodeDecodeError as error:
                raise InvalidArgument(
                    f"input '{t.name}' must hold UTF-8 strings for an ONNX model, got bytes that are not: {error}"
                ) from None
            check(ort.string_buffer(value, i, PyBytes_GET_SIZE(element), &buffer))
            memcpy(buffer, PyBytes_AS_STRING(element), PyBytes_GET_SIZE(element))
    except BaseException:
        ort.release_value(value)
        raise
    return value


cdef char _nothing  # the address used for empty tensors


cdef Status make_value(OnnxSession session, Feed* feed, void** value) noexcept nogil:
    """A value that uses the feed's memory."""
    cdef void* data = <void*>feed.data if feed.nbytes else <void*>&_nothing
    return ort.create_tensor_over(
        cpu_memory, data, feed.nbytes, feed.dims, feed.rank, session.feed_types[feed.slot], value)


cdef OnnxTensor tensor_of(OnnxSession session, int output, void* value):
    """Makes the tensor of an output. It takes over `value`, also when it raises."""
    cdef OnnxTensor t = OnnxTensor.__new__(OnnxTensor)
    cdef void* info = NULL
    cdef void* data = NULL
    cdef int64_t[16] few
    cdef int64_t* dims = few
    cdef size_t rank = 0, i
    cdef Py_ssize_t count = 1
    t.value = value
    t.name = session.output_names[output]
    t.dtype = session.output_types[output]
    check(ort.tensor_shape(value, &info))
    try:
        check(ort.rank(info, &rank))
        if rank > 16:
            dims = <int64_t*>calloc(rank, sizeof(int64_t))
            if dims == NULL:
                raise MemoryError
        check(ort.dimensions(info, dims, rank))
        shape = []
        for i in range(rank):
            shape.append(dims[i])
            count *= dims[i]
        t.shape = tuple(shape)
    finally:
        ort.release_tensor_shape(info)
        if dims != few:
            free(dims)
    if t.dtype == DT_BYTES:
        wire = string_bytes(value, count)
        ort.release_value(value)
        t.value = NULL
        t.hold(wire, False)
        return t
    check(ort.tensor_data(value, &data))
    t.ptr = <const char*>data
    t.nbytes = count * element_size(t.dtype)
    return t


cdef int keep_apart(OnnxTensor t, const Feed* feed) except -1:
    """Copies an output that is in an input's memory (rule 4)."""
    if t.nbytes and feed.data <= t.ptr < feed.data + feed.nbytes:
        t.hold(t.ptr[: t.nbytes], False)
    return 0


cdef bytes string_bytes(void* value, size_t count):
    """Converts strings to the length-prefixed form of BYTES tensors."""
    cdef size_t total = 0, i, end
    cdef uint32_t length
    cdef size_t* offsets
    cdef char* at
    cdef bytes wire
    cdef bytes text
    check(ort.strings_length(value, &total))
    offsets = <size_t*>calloc(count + 1, sizeof(size_t))
    if offsets == NULL:
        raise MemoryError
    try:
        text = PyBytes_FromStringAndSize(NULL, total)
        if count:
            check(ort.strings(value, PyBytes_AS_STRING(text), total, offsets, count))
        wire = PyBytes_FromStringAndSize(NULL, total + 4 * count)
        at = PyBytes_AS_STRING(wire)
        for i in range(count):
            end = offsets[i + 1] if i + 1 < count else total
            length = <uint32_t>(end - offsets[i])
            memcpy(at, &length, 4)
            memcpy(at + 4, PyBytes_AS_STRING(text) + offsets[i], length)
            at += 4 + length
        return wire
    finally:
        free(offsets)


cdef int set_options(void* made, options) except -1:
    check(ort.set_log_severity(made, SEVERITY))
    if options.intra_threads is not None:
        check(ort.set_intra_threads(made, options.intra_threads))
    if options.inter_threads is not None:
        check(ort.set_inter_threads(made, options.inter_threads))
    if options.arena is not None:
        check(ort.enable_arena(made) if options.arena else ort.disable_arena(made))
    if options.pattern is not None:
        check(ort.enable_mem_pattern(made) if options.pattern else ort.disable_mem_pattern(made))
    if options.parallel is not None:
        check(ort.set_execution_mode(made, 1 if options.parallel else 0))
    check(ort.set_optimization(made, options.level))
    if options.saved_as is not None:
        path = os.fsencode(options.saved_as)
        check(ort.save_optimised(made, path))
    for key, value in options.entries:
        k, v = key.encode(), value.encode()
        check(ort.add_config_entry(made, k, v))
    for library in options.libraries:
        try:
            path = os.fsencode(library)
            check(ort.register_library(made, path))
        except Exception as error:
            raise options.library_failure(library, error) from None
    return 0
