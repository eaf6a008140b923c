"""Names, types and shapes of a model's inputs and outputs, as ONNX Runtime's C library gives them.

Types are written as in onnxruntime's Python module, so that other code need not know which of the two interfaces
described a model.
"""
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

from neptrio.backends.onnx.api cimport check, ort

cdef enum:  # kinds of values
    TENSOR = 1
    SEQUENCE = 2
    MAP = 3
    OPAQUE = 4
    SPARSE = 5
    OPTIONAL = 6

_TYPES = (
    "undefined", "float", "uint8", "int8", "uint16", "int16", "int32", "int64", "string", "bool", "float16",
    "double", "uint32", "uint64", "complex64", "complex128", "bfloat16", "float8e4m3fn", "float8e4m3fnuz",
    "float8e5m2", "float8e5m2fnuz", "uint4", "int4",
)


class ValueInfo:
    """An input or output. `type` is a text such as "tensor(float)".

    `shape` has an int for each dimension, a name for a symbolic one, and None for an unknown one.
    """

    __slots__ = ("name", "shape", "type")

    def __init__(self, str name, str type, list shape):
        self.name = name
        self.type = type
        self.shape = shape  # type: list[int | str]

    def __repr__(self):
        return f"ValueInfo({self.name!r}, {self.type!r}, {self.shape})"


cdef object describe(str name, const void* info):
    return ValueInfo(name, type_text(info), shape_list(info))


cdef int element(str type) except -1:
    """The element type of "tensor(float)"; 0 when it is no tensor."""
    name = type.removeprefix("tensor(").removesuffix(")")
    return _TYPES.index(name) if type.startswith("tensor(") and name in _TYPES else 0


cdef str type_text(const void* info):
    """A type as onnxruntime writes it: "tensor(float)", "seq(tensor(int64))", "map(int64,tensor(float))"."""
    cdef int kind = 0, number = 0
    cdef const void* inner = NULL
    cdef void* content = NULL
    check(ort.kind_of_type(info, &kind))
    if kind == TENSOR or kind == SPARSE:
        check(ort.tensor_of_type(info, &inner))
        if inner != NULL:
            check(ort.element_type(inner, &number))
        name = _TYPES[number] if 0 <= number < len(_TYPES) else str(number)
        return f"{'tensor' if kind == TENSOR else 'sparse_tensor'}({name})"
    if kind == SEQUENCE:
        check(ort.sequence_of_type(info, &inner))
        check(ort.sequence_element(inner, &content))
        head = "seq("
    elif kind == MAP:
        check(ort.map_of_type(info, &inner))
        check(ort.map_key(inner, &number))
        check(ort.map_value(inner, &content))
        head = f"map({_TYPES[number]},"
    elif kind == OPTIONAL:
        check(ort.optional_of_type(info, &inner))
        check(ort.optional_content(inner, &content))
        head = "optional("
    else:
        return "opaque" if kind == OPAQUE else "unknown"
    try:
        return f"{head}{type_text(content)})"
    finally:
        ort.release_type(content)


cdef list shape_list(const void* info):
    cdef int kind = 0
    cdef const void* tensor = NULL
    cdef size_t rank = 0, i
    cdef int64_t* dims
    cdef const char** symbols
    check(ort.kind_of_type(info, &kind))
    if kind != TENSOR:
        return []
    check(ort.tensor_of_type(info, &tensor))
    if tensor == NULL:
        return []
    check(ort.rank(tensor, &rank))
    dims = <int64_t*>calloc(rank + 1, sizeof(int64_t))
    symbols = <const char**>calloc(rank + 1, sizeof(char*))
    try:
        if dims == NULL or symbols == NULL:
            raise MemoryError
        check(ort.dimensions(tensor, dims, rank))
        check(ort.symbols(tensor, symbols, rank))
        found = []
        for i in range(rank):
            if dims[i] >= 0:
                found.append(dims[i])
            else:
                found.append(symbols[i].decode() if symbols[i] != NULL and symbols[i][0] else None)
        return found
    finally:
        free(dims)
        free(symbols)
