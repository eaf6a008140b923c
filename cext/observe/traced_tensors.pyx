"""The tensors of one part of a trace: of a request, as it was queued, as its model got it, and what the model answered.

Rules:
 1. One call of add() copies at most ON_LOOP bytes; tensors beyond are for the copier (observe.tensor_copier).
 2. An input that the model got is the one that was queued. It is not copied again: the model may have written to it since.
"""
from libc.stdint cimport int64_t

from neptrio.observe.tensor_copy cimport TensorCopy
from neptrio.request.infer_request cimport Tensor

from neptrio.codec.http_json import dump_json
from neptrio.observe.trace_record import tensor_text

cdef enum:
    ON_LOOP = 65536          # bytes that the trio thread copies at a time: 0.01 ms


cdef class TracedTensors:
    """Tensors with what they were at which moment."""

    def __cinit__(self):
        self.rows = []

    cdef int64_t add(self, str activity, tensors, int response, Py_ssize_t limit, copier) except -1:
        """Adds tensors, of which up to `limit` bytes each are copied. Returns the copier's number of the last one that it
        was given, 0 when it was given none."""
        cdef Tensor tensor
        cdef TensorCopy one
        cdef Py_ssize_t room = ON_LOOP
        cdef int64_t last = 0
        cdef dict queued = self.queued() if activity == "TENSOR_BACKEND_INPUT" else None
        for tensor in tensors:
            one = queued.get(tensor.name) if queued else None
            if one is None or not one.same(tensor):
                one = TensorCopy(tensor, limit)
                if one.size <= room:
                    room -= one.size
                    one.make()
                else:
                    last = copier.put(one)
            self.rows.append((activity, response, one))
        return last

    cdef dict queued(self):
        """{name: copy} of the request's inputs as they were queued."""
        cdef dict found = {}
        for activity, _, one in self.rows:
            if activity == "TENSOR_QUEUE_INPUT":
                found[(<TensorCopy>one).name] = one
        return found

    def objects(self, identity):
        # type: (dict[str, Any]) -> list[tuple[bytes, ...]]
        """The trace file's objects, each as parts of its text; `identity` is what all of them begin with."""
        made = []
        for activity, response, one in self.rows:
            head = dump_json({**identity, "activity": activity, **({"response": response} if response else {})})
            made.append((head[:-1] + b',"tensor":', *tensor_text(one), b"}"))
        return made

    @property
    def size(self) -> int:
        """The bytes that are or will be copied."""
        return sum([(<TensorCopy>one).size for one in {one for _, _, one in self.rows}])

    def drop(self):
        """Nobody will read them."""
        for _, _, one in self.rows:
            (<TensorCopy>one).omit("")
        self.rows.clear()
