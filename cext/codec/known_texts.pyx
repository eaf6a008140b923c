"""The texts before binary tensors that came before, with what was read from them.

The problem: a client sends the same text (names, datatypes, shapes, sizes) in every request to a model, and reading it was
a third of a small request's instructions. The choice: the text is kept with what it says, and a request that
begins with the very same bytes is filled from that. The text may be JSON before binary tensors, or the fields of a protobuf
message before its raw contents; each format has a KnownTexts of its own.

Rules:
 1. What a text says follows from its bytes alone, so the same bytes say the same. All of them are compared; a hash only
    says with which text.
 2. Kept are texts of up to LONGEST bytes whose inputs all lie behind them and that name no sequence, no priority, no
    timeout, no custom parameter and no region of shared memory. Everything else is read anew each time.
 3. A text is kept when it comes for the second time with no other in its place in between. So ids that differ
    from request to request displace nothing, and cost a hash.
 4. Names and shapes cannot change and are shared by requests. Tensors and requested outputs are made anew: who serves
    a request may change them.
 5. Everything runs with the GIL.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint64_t
from libc.string cimport memcmp, memset

from neptrio.codec.protobuf cimport Slice
from neptrio.request.hashed cimport hash_of
from neptrio.request.infer_request cimport DT_BYTES, InferRequest, RequestedOutput, Tensor

from neptrio import limits

LONGEST = limits.LONGEST_REPEATED


cdef RequestedOutput copy_of(RequestedOutput output):
    cdef RequestedOutput made = RequestedOutput.__new__(RequestedOutput)
    made.name = output.name
    made.binary = output.binary
    made.class_count = output.class_count
    return made


cdef inline Tensor tensor_like(Tensor kept, object owner, const char* ptr, Py_ssize_t nbytes):
    cdef Tensor made = Tensor.__new__(Tensor)
    made.name = kept.name
    made.dtype = kept.dtype
    made.shape = kept.shape
    made.owner = owner
    made.ptr = ptr
    made.nbytes = nbytes
    return made


cdef class Known:
    """See known_texts.pxd."""

    cdef int fill(self, InferRequest request, Tensor body, Py_ssize_t at) except -1:
        """Fills a request whose inputs lie in `body` from `at` on."""
        cdef Tensor kept
        cdef list inputs = []
        for kept in self.inputs:
            inputs.append(tensor_like(kept, body, body.ptr + at, kept.nbytes))
            at += kept.nbytes
        return self.give(request, inputs)

    cdef int fill_from(self, InferRequest request, object message, const Slice* contents) except -1:
        """Fills a request whose inputs lie in these parts of `message`, one for each."""
        cdef Tensor kept
        cdef list inputs = []
        for kept in self.inputs:
            inputs.append(tensor_like(kept, message, <const char*>contents.p, contents.n))
            contents += 1
        request.model_name = self.model_name
        request.model_version = self.model_version
        return self.give(request, inputs)

    cdef int give(self, InferRequest request, list inputs) except -1:
        request.id = self.id
        request.inputs = inputs
        request.outputs = None if self.outputs is None else [copy_of(<RequestedOutput>each) for each in self.outputs]
        return 0


cdef class KnownTexts:
    """See the module's text."""

    def __init__(self):
        self.known = [None] * PLACES
        memset(self.seen, 0, sizeof(self.seen))

    cdef Known find(self, const unsigned char* text, Py_ssize_t size):
        """What is kept of these bytes, or None."""
        cdef Known known = <Known>self.known[<Py_ssize_t>(hash_of(text, size) & (PLACES - 1))]
        if (known is None or PyBytes_GET_SIZE(known.text) != size
                or memcmp(PyBytes_AS_STRING(known.text), text, size)):
            return None
        self.found += 1
        return known

    cdef int offer(self, const unsigned char* text, Py_ssize_t size, InferRequest request, object owner,
                   bint binary_default) except -1:
        """Keeps what was read from these bytes into `request`, if rules 2 and 3 say so."""
        cdef Tensor tensor, kept
        cdef RequestedOutput output
        cdef Known made
        cdef uint64_t h = hash_of(text, size)
        cdef Py_ssize_t place = <Py_ssize_t>(h & (PLACES - 1))
        if self.seen[place] != h:
            self.seen[place] = h
            return 0
        if (request.parameters is not None or request.sequence_id or request.sequence_start or request.sequence_end
                or request.priority or request.timeout_us or request.want_empty_final):
            return 0
        if request.outputs is not None:
            for output in request.outputs:
                if output.shm_region is not None:
                    return 0
        made = Known.__new__(Known)
        made.inputs = []
        for tensor in request.inputs:
            if tensor.owner is not owner:
                return 0
            kept = Tensor.__new__(Tensor)
            kept.name = tensor.name
            kept.dtype = tensor.dtype
            kept.shape = tensor.shape
            kept.nbytes = tensor.nbytes
            made.inputs.append(kept)
            made.nbytes += tensor.nbytes
            made.strings = made.strings or tensor.dtype == DT_BYTES
        if request.outputs is not None:
            made.outputs = [copy_of(output) for output in request.outputs]
        made.text = (<const char*>text)[:size]
        made.id = request.id
        made.model_name = request.model_name
        made.model_version = request.model_version
        made.binary_default = binary_default
        self.known[place] = made
        return 0
