# A tensor's elements in JSON: read with a Reader, printed with a Writer.
from neptrio.codec.json_reader cimport Reader, Stop
from neptrio.codec.json_writer cimport Writer
from neptrio.request.infer_request cimport Tensor

cdef Tensor tensor_at(Reader s, Py_ssize_t at, str name, int dtype, tuple shape)   # leaves the cursor behind it
cdef int print_elements(Writer w, Tensor t) except -1                              # as one flat array
cdef int print_large(Writer w, Tensor t, Stop stop) except -1                      # the same, without the GIL
