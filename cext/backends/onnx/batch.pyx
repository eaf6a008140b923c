"""Batches of ONNX models, executed without the GIL.

An OnnxBuilder (builder.pyx) does on the trio thread what needs Python: it sorts the requests into runs, and writes
names, shapes and addresses into C arrays. run_onnx() then gathers the inputs of several requests, makes the values and runs
the session, on the instance's thread or on the trio thread itself. deliver() makes the response tensors, which use the
memory that ONNX Runtime returned.

Rules:
 1. Requests with the same inputs and equal sizes apart from the batch dimension are one run, in their order. Without
    batching every request is a run of its own. The runs of a batch are executed one after the other; when one fails,
    the others are not affected.
 2. An input of a lone request is used in place unless it is misaligned. Inputs of several requests are copied one after
    the other into the builder's work memory. Outputs are never copied: responses are views of their rows. The
    exception are inputs that the model returns as outputs (session.pyx, rule 4): they are copied when the batch is
    delivered, and until then the work memory that they are in belongs to the run.
 3. Only outputs that some request of the run wants are computed, and those that are a sequence's state.
 4. A batch keeps its requests, its session and its builder alive; run_onnx() touches no Python object. Statuses and
    values that were not used are released with the batch.
 5. A batch stays off the trio thread until executions with its shapes and outputs have been measured to be short: an
    unknown model may take any time.
"""
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

cdef extern from "<stdlib.h>" nogil:
    void* aligned_alloc(size_t, size_t)

from neptrio.execution.batch cimport Batch
from neptrio.loop.mailbox cimport Work
from neptrio.backends.onnx.api cimport Status, failure, ort
from neptrio.backends.onnx.session cimport OnnxSession, OnnxTensor, keep_apart, make_value, tensor_of
from neptrio.execution.inline_policy cimport CLIP_NS, mean_after
from neptrio.request.infer_request cimport InferRequest, InferResponse, Tensor, alias, now_ns

from neptrio.errors import Internal, Reason, TritonError

cdef enum:
    ALIGNMENT = 64


cdef class Timing:
    """The mean time of executions with the same shapes and outputs; unknown at first."""

    def __cinit__(self):
        self.mean_ns = 0


cdef class OnnxBatch(Batch):
    """A prepared batch of an ONNX model."""

    def __dealloc__(self):
        cdef int i
        cdef int last
        for i in range(self.c.n_runs):
            if self.c.runs[i].status != NULL:
                ort.release_status(self.c.runs[i].status)
            free(self.c.runs[i].detached)
        if self.c.n_runs:
            last = self.c.runs[self.c.n_runs - 1].first_output + self.c.runs[self.c.n_runs - 1].n_outputs
            for i in range(last):
                if self.c.output_values[i] != NULL:
                    ort.release_value(self.c.output_values[i])
        free(self.c.runs)

    cdef object allocate(self, Py_ssize_t requests, Py_ssize_t slots, Py_ssize_t dims, Py_ssize_t outputs):
        """Allocates all arrays as one block: at most one run per request, each with all inputs and outputs."""
        cdef Py_ssize_t many = requests * slots
        cdef Py_ssize_t made = requests * outputs
        cdef char* at = <char*>calloc(1, (
            requests * sizeof(Run) + many * (sizeof(Input) + sizeof(Piece) + 2 * sizeof(void*))
            + dims * sizeof(int64_t) + made * (2 * sizeof(void*) + sizeof(int)) + 16))
        if at == NULL:
            raise MemoryError
        self.c.runs = <Run*>at
        at += requests * sizeof(Run)
        self.c.inputs = <Input*>at
        at += many * sizeof(Input)
        self.c.pieces = <Piece*>at
        at += many * sizeof(Piece)
        self.c.input_names = <const char**>at
        at += many * sizeof(void*)
        self.c.input_values = <void**>at
        at += many * sizeof(void*)
        self.c.dims = <int64_t*>at
        at += dims * sizeof(int64_t)
        self.c.output_names = <const char**>at
        at += made * sizeof(void*)
        self.c.output_values = <void**>at
        at += made * sizeof(void*)
        self.c.outputs = <int*>at

    cpdef object deliver(self):
        # type: () -> None
        if self.error is None:  # otherwise it was not executed
            self.conclude()
        return Batch.deliver(self)

    def times(self) -> tuple:
        # type: () -> tuple[int, ...]
        """Start, end of input, start of output and end of the execution, in nanoseconds."""
        return tuple(self.c.times)

    def runs(self) -> list:
        """The runs of the batch: (request indices, inputs, outputs) of each.

        An input is (name, address, copied); the address of a copy is known after the execution.
        """
        cdef int i, k
        cdef Run* run
        cdef Input* given
        found = []
        for i in range(self.c.n_runs):
            run = &self.c.runs[i]
            inputs = []
            for k in range(run.first_input, run.first_input + run.n_inputs):
                given = &self.c.inputs[k]
                inputs.append((self.session.feed_names[given.feed.slot], <size_t>given.feed.data, given.copy))
            outputs = [self.session.output_names[self.c.outputs[run.first_output + k]] for k in range(run.n_outputs)]
            found.append((list(self.members[i]), inputs, outputs))
        return found

    cpdef conclude(self):
        """Makes the responses of an executed batch. Called by deliver()."""
        cdef int i
        cdef Run* run
        cdef Timing timing
        cdef int64_t took
        cdef list members
        self.compute_start = self.c.times[0]
        self.input_end = self.c.times[1]
        self.output_start = self.c.times[2]
        self.compute_end = self.c.times[3]
        if self.c.n_runs == 1:
            timing = self.timings[0]
            took = self.compute_end - self.compute_start
            timing.mean_ns = mean_after(timing.mean_ns, took) if timing.mean_ns else min(took, <int64_t>CLIP_NS)
        for i in range(self.c.n_runs):
            run = &self.c.runs[i]
            members = self.members[i]
            try:
                self.answer(run, members)
            except TritonError as error:
                if self.c.n_runs == 1 and len(members) == len(self.requests):
                    self.error = error
                for k in members:
                    self.responses[k] = InferResponse(None, error)
            except MemoryError:
                error = Internal(f"no memory for the outputs of model '{self.model.name}'", reason=Reason.BACKEND)
                for k in members:
                    self.responses[k] = InferResponse(None, error)

    cdef int answer(self, Run* run, list members) except -1:
        """Makes the responses of one run. Raises Internal when the run failed."""
        cdef int i, k, at
        cdef void* value
        cdef Status status = run.status
        cdef OnnxTensor whole
        cdef Tensor part
        cdef InferRequest r
        cdef InferResponse response
        cdef int64_t rows, row
        cdef Py_ssize_t per_row
        cdef tuple tail
        if status != NULL:
            run.status = NULL
            raise run_failure(failure(status), self.model.name)
        for index in members:
            self.responses[index] = InferResponse([])
        for k in range(run.n_outputs):
            at = run.first_output + k
            value = self.c.output_values[at]
            self.c.output_values[at] = NULL
            try:
                whole = tensor_of(self.session, self.c.outputs[at], value)
                for i in range(run.first_input, run.first_input + run.n_inputs):
                    keep_apart(whole, &self.c.inputs[i].feed)
            except Exception as error:
                raise run_failure(error, self.model.name) from None
            if len(members) == 1 and self.model.max_batch_size <= 0:
                response = self.responses[members[0]]
                response.outputs.append(whole)
                continue
            rows = 0
            for index in members:
                rows += (<InferRequest>self.requests[index]).batch_size
            if not whole.shape or <int64_t>whole.shape[0] != rows:
                raise Internal(
                    f"output '{whole.name}' of model '{self.model.name}' has the shape {list(whole.shape)}, expected "
                    f"the batch dimension {rows}; set max_batch_size to 0 if the model does not batch",
                    reason=Reason.BACKEND,
                )
            if len(members) == 1:
                response = self.responses[members[0]]
                response.outputs.append(whole)
                continue
            per_row = whole.nbytes // rows if rows else 0
            tail = whole.shape[1:]
            row = 0
            for index in members:
                r = self.requests[index]
                part = alias(whole, whole.name, (r.batch_size, *tail))
                part.ptr = whole.ptr + row * per_row
                part.nbytes = r.batch_size * per_row
                response = self.responses[index]
                response.outputs.append(part)
                row += r.batch_size
        return 0


def run_failure(error, name):
    # type: (str, str) -> TritonError
    """The error that clients get when a run fails."""
    from neptrio.backends.onnx.library import tell

    tell(0)  # drops the library's own message: the failure is logged like every backend's
    return Internal(f"onnx runtime error: {getattr(error, 'said', error)} (model '{name}')", reason=Reason.BACKEND)


cdef int gather(OnnxWork* batch, Run* run) noexcept nogil:
    """Copies the inputs that must be copied. Returns -1 when there is no memory."""
    cdef size_t need = 0, at = 0
    cdef int i, k
    cdef Input* given
    cdef char* target
    for i in range(run.first_input, run.first_input + run.n_inputs):
        given = &batch.inputs[i]
        if given.copy:
            need += (given.feed.nbytes + ALIGNMENT - 1) & ~(<size_t>(ALIGNMENT - 1))
    if need == 0:
        return 0
    if batch.memory.size < need:
        free(batch.memory.at)
        batch.memory.size = 0
        need = (need + 4095) & ~(<size_t>4095)
        batch.memory.at = <char*>aligned_alloc(ALIGNMENT, need)
        if batch.memory.at == NULL:
            return -1
        batch.memory.size = need
    for i in range(run.first_input, run.first_input + run.n_inputs):
        given = &batch.inputs[i]
        if not given.copy:
            continue
        target = given.feed.data = batch.memory.at + at
        for k in range(given.first_piece, given.first_piece + given.n_pieces):
            if batch.pieces[k].nbytes:      # the pointer of an empty tensor may be NULL
                memcpy(target, batch.pieces[k].source, batch.pieces[k].nbytes)
                target += batch.pieces[k].nbytes
        at += (given.feed.nbytes + ALIGNMENT - 1) & ~(<size_t>(ALIGNMENT - 1))
    return 0


cdef void detach(OnnxWork* batch, Run* run) noexcept nogil:
    """Passes the work memory on to the run if an output is in it, so that the next run does not overwrite it."""
    cdef int i
    cdef void* data
    cdef Status status
    cdef bint gathered = False
    for i in range(run.first_input, run.first_input + run.n_inputs):
        gathered = gathered or batch.inputs[i].copy
    if not gathered:
        return
    for i in range(run.first_output, run.first_output + run.n_outputs):
        data = NULL
        status = ort.tensor_data(batch.output_values[i], &data)
        if status != NULL:
            ort.release_status(status)
        elif batch.memory.at <= <char*>data < batch.memory.at + batch.memory.size:
            run.detached = batch.memory.at
            batch.memory.at = NULL
            batch.memory.size = 0
            return


cdef void execute(OnnxBatch batch, Run* run) noexcept nogil:
    """Executes one run; its status tells whether it succeeded."""
    cdef OnnxWork* c = &batch.c
    cdef void** values = c.input_values + run.first_input
    cdef int i, made = 0
    if gather(c, run) < 0:
        run.status = ort.create_status(1, b"no memory to gather the inputs of a batch")
        return
    while made < run.n_inputs and run.status == NULL:
        run.status = make_value(batch.session, &c.inputs[run.first_input + made].feed, &values[made])
        if run.status == NULL:
            made += 1
    if c.times[1] == 0:
        c.times[1] = now_ns()
    if run.status == NULL:
        run.status = ort.run(
            batch.session.session, NULL, c.input_names + run.first_input, values, run.n_inputs,
            c.output_names + run.first_output, run.n_outputs, c.output_values + run.first_output)
        if run.status == NULL:
            detach(c, run)
    for i in range(made):
        ort.release_value(values[i])


cdef void run_onnx(Work* work) noexcept nogil:
    cdef OnnxWork* c = &(<OnnxBatch>work.owner).c
    cdef int i
    c.times[0] = now_ns()
    c.times[1] = 0
    for i in range(c.n_runs):
        execute(<OnnxBatch>work.owner, &c.runs[i])
    c.times[2] = c.times[3] = now_ns()
    if c.times[1] == 0:
        c.times[1] = c.times[0]
