"""Makes batches of ONNX models from requests: which requests run together, and which outputs are computed.

Everything here runs on the trio thread. batch.pyx has the rules, and executes the batches.
"""
from libc.stdint cimport int64_t
from libc.stdlib cimport free

from neptrio.execution.batch cimport Batch
from neptrio.backends.onnx.batch cimport Input, OnnxBatch, Piece, Run, Timing, run_onnx
from neptrio.backends.onnx.session cimport OnnxSession
from neptrio.execution.inline_policy cimport INLINE_NS
from neptrio.request.infer_request cimport (
    GPU_MEMORY,
    InferRequest,
    InferResponse,
    RequestedOutput,
    Tensor,
    element_size,
    same_name,
)

from sys import intern

from neptrio.errors import InvalidArgument, TritonError

cdef enum:
    TIMINGS = 1024


cdef class OnnxBuilder:
    """Makes OnnxBatches for one instance.

    `served` are the names of the outputs in the configuration, `states` those of a sequence's states; `batching`
    means that the first dimension is the batch's. With `on_thread` no batch runs on the trio thread.
    """

    def __init__(self, str name, bint batching, bint on_thread):
        self.name = name
        self.batching = batching
        self.on_thread = on_thread
        self.names = []
        self.served_names = []
        self.served = ()
        self.states = ()
        self.output_index = {}
        self.timings = {}

    def __dealloc__(self):
        free(self.memory.at)

    def use(self, OnnxSession session, list served, list states):
        # type: (OnnxSession | None, ..., ...) -> None
        """Sets the session in which batches run; None removes it."""
        cdef list known
        self.session = session
        self.timings = {}
        self.last_parts = None
        if session is None:
            return
        known = session.output_names
        self.names = [intern(name) for name in session.feed_names]
        self.output_index = {n: known.index(n) for n in served}
        self.served_names = served
        self.served = tuple([known.index(n) for n in served])
        self.states = tuple([known.index(n) for n in states])

    def statistics(self) -> dict:
        # type: () -> dict[tuple[Any, ...], float]
        """How long executions take: {(shapes..., outputs): mean nanoseconds}, of those that were measured."""
        return {key: timing.mean_ns for key, timing in self.timings.items() if timing.mean_ns}

    cdef tuple wanted(self, list requests, list members):
        """The outputs to compute, in the model's order."""
        cdef RequestedOutput o
        cdef InferRequest r
        cdef set found
        cdef Py_ssize_t i, n = len(self.served_names)
        for k in members:
            r = requests[k]
            if r.outputs is None:
                return self.served
        r = requests[members[0]]
        if len(r.outputs) == n:  # usually all of them, in the model's order
            for i in range(n):
                if (<RequestedOutput>r.outputs[i]).name != self.served_names[i]:
                    break
            else:
                return self.served
        found = set(self.states)
        for k in members:
            r = requests[k]
            for o in r.outputs:
                index = self.output_index.get(o.name)
                if index is not None:
                    found.add(index)
        if len(found) == len(self.served):
            return self.served
        return tuple([index for index in self.served if index in found])

    cdef list tensors_of(self, InferRequest r):
        """The request's tensors (or None) in the order of the session's inputs."""
        cdef Py_ssize_t i, n = len(self.names)
        cdef Tensor t
        cdef Tensor found
        cdef list inputs = r.inputs
        cdef list mine = []
        for i in range(n):
            name = self.names[i]
            found = None
            if i < len(inputs) and same_name((<Tensor>inputs[i]).name, name):
                found = inputs[i]
            else:
                for t in inputs:
                    if t.name == name:
                        found = t
                        break
            if found is not None and found.memory_kind == GPU_MEMORY:
                raise InvalidArgument(
                    f"input '{found.name}' lies in GPU memory and this instance of '{self.name}' runs on the CPU")
            mine.append(found)
        return mine

    def prepare(self, Batch batch not None):
        # type: (...) -> OnnxBatch
        """Returns the batch as one that runs without the GIL. Requests that cannot be executed fail on their own.

        An OnnxBatch is filled in; a batch of another class is replaced by one.
        """
        cdef OnnxBatch made
        cdef list requests = batch.requests
        cdef Py_ssize_t n = len(requests), slots = len(self.names), i, n_dims = 0
        cdef list tensors = []   # per request: its tensors by slot, or None when it has failed
        cdef list mine
        cdef list runs
        cdef Tensor t
        cdef double expected = 0
        cdef Timing timing
        cdef Run* run
        cdef Input* given
        cdef Piece* piece
        cdef int64_t* dims
        cdef Py_ssize_t slot
        cdef int n_inputs = 0, n_pieces = 0, n_outputs = 0, width
        cdef int64_t rows
        cdef list members
        cdef tuple wanted
        if isinstance(batch, OnnxBatch):
            made = batch
        else:
            made = OnnxBatch(batch.model, batch.requests, batch.close_reason, batch.oldest_wait_ns)
            made.instance = batch.instance
        made.session = self.session
        made.builder = self
        made.work.run = run_onnx
        made.members = []
        made.timings = []
        made.c.memory = &self.memory
        for i in range(n):
            try:
                mine = self.tensors_of(requests[i])
            except TritonError as error:
                made.responses[i] = InferResponse(None, error)
                tensors.append(None)
                continue
            tensors.append(mine)
            for t in mine:
                if t is not None:
                    n_dims += len(t.shape)
        runs = self.sort(tensors)
        made.allocate(n, slots, n_dims, len(self.served))
        dims = made.c.dims
        for members in runs:
            run = &made.c.runs[made.c.n_runs]
            run.first_input = n_inputs
            key = []
            for slot in range(slots):
                t = (<list>tensors[members[0]])[slot]
                if t is None:
                    continue
                given = &made.c.inputs[n_inputs]
                made.c.input_names[n_inputs] = self.session.c_feed_names[slot]
                n_inputs += 1
                given.feed.slot = <int>slot
                given.feed.rank = len(t.shape)
                given.feed.dims = dims
                for i in range(<Py_ssize_t>given.feed.rank):
                    dims[i] = t.shape[i]
                given.feed.data = t.ptr
                given.feed.nbytes = t.nbytes
                given.first_piece = n_pieces
                width = element_size(t.dtype)
                # a tensor may start at any byte of a request's body
                given.copy = len(members) > 1 or (width > 1 and <size_t>t.ptr % width != 0)
                if given.copy:
                    given.feed.nbytes = 0
                    rows = 0
                    for k in members:
                        t = (<list>tensors[k])[slot]
                        piece = &made.c.pieces[n_pieces]
                        piece.source = t.ptr
                        piece.nbytes = t.nbytes
                        given.feed.nbytes += t.nbytes
                        n_pieces += 1
                        if len(members) > 1:
                            rows += <int64_t>t.shape[0]
                    if len(members) > 1:
                        dims[0] = rows
                given.n_pieces = n_pieces - given.first_piece
                if len(members) == 1:
                    key.append(t.shape)
                else:
                    key.append(dims[0])
                    key.append(t.shape[1:])
                dims += given.feed.rank
            run.n_inputs = n_inputs - run.first_input
            run.first_output = n_outputs
            wanted = self.wanted(requests, members)
            for index in wanted:
                made.c.outputs[n_outputs] = index
                made.c.output_names[n_outputs] = self.session.c_output_names[<int>index]
                n_outputs += 1
            run.n_outputs = n_outputs - run.first_output
            key.append(wanted)
            timing = self.timing_of(key)
            made.members.append(members)
            made.timings.append(timing)
            expected += timing.mean_ns if timing.mean_ns else 2 * INLINE_NS
            made.c.n_runs += 1
        made.off_loop = self.on_thread or expected > INLINE_NS
        return made

    cdef Timing timing_of(self, list parts):
        cdef Timing timing
        if parts == self.last_parts:  # usually the same shapes as in the previous run
            return self.last_timing
        key = tuple(parts)
        timing = self.timings.get(key)
        if timing is None:
            if len(self.timings) >= TIMINGS:
                self.timings.clear()
            timing = self.timings[key] = Timing()
        self.last_parts = parts
        self.last_timing = timing
        return timing

    cdef list sort(self, list tensors):
        """The requests that run together, as lists of their indices."""
        cdef Py_ssize_t i, n = len(tensors)
        cdef Tensor t
        cdef dict found
        if n == 1:
            return [[0]] if tensors[0] is not None else []
        if not self.batching:
            return [[i] for i in range(n) if tensors[i] is not None]
        found = {}
        for i in range(n):
            if tensors[i] is None:
                continue
            # a tensor without dimensions has no rows, so it cannot be joined with others
            key = tuple([None if t is None else t.shape[1:] if t.shape else i for t in tensors[i]])
            found.setdefault(key, []).append(i)
        return list(found.values())
