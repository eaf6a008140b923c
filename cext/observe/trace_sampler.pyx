"""Decides which requests are traced, and passes on finished traces.

The problem: tracing every request must cost next to nothing. The choice: a trace for which settings ask only for
timestamps is begun, finished and copied into its scope's block here, without a call of Python code. Everything else
(tensors, spans, trace_tail, limits that are used up) is left to the subclass observe.tracer.Tracer, whose rules say
which requests are sampled.

Rules:
 1. A root request together with its ensemble steps and BLS calls is one trace, for sampling and in files.
 2. A finished trace either becomes records in its scope's block, or is passed to kept() as it is.
Source: docs/protocol/observed.md 11, docs/protocol/trace-extension.md.
"""
from neptrio.request.infer_request cimport RECV_START, InferRequest, ModelCore
from neptrio.observe.trace cimport Trace, Tracing, made
from neptrio.observe.trace_block cimport TraceBlock
from neptrio.observe.trace_scope cimport Sampling

from neptrio.observe.trace_record import parameters_of

cdef enum:
    BLOCK_BYTES = 1048576   # a block of this size is given to the writer's thread at once


cdef class Sampler(Tracing):
    """The part of observe.tracer.Tracer through which every request passes."""

    cdef object begin(self, InferRequest request):
        """Called for a validated request before it is queued: begins a trace if sampling selects it or it asks for one.

        Raises InvalidArgument when the request asks for a trace level that does not exist.
        """
        cdef Trace above, trace
        cdef Sampling scope
        if request.parent is not None:
            above = request.parent.trace
            if above is not None and above.top().open:
                request.trace = trace = made(self, request)
                trace.root = above.top()
                trace.record.parent = above.record.id
                trace.record.timed = trace.root.timestamps
                if trace.root.children is None:
                    trace.root.children = []
                trace.root.children.append(trace)
                trace.root.open += 1
                if trace.root.with_tensors:
                    trace.copy("TENSOR_QUEUE_INPUT", request.inputs)
                if self.spans:
                    self.identify_part(trace)
        elif request.timestamps[<int>RECV_START]:
            scope = self.default
            if self.models:
                scope = self.models.get((<ModelCore>request.model).name, scope)
            if request.asked is not None or (self.may_force and request.parameters is not None):
                level = self.asked_level(request, scope)
                if level:
                    scope.open += 1
                    trace = self.begin_root(request, scope, True)
                    self.prepare_root(trace, request, "TIMESTAMPS" in level, "TENSORS" in level)
                    return
            if not self.disabled and scope.sample():
                trace = self.begin_root(request, scope, False)
                if scope.with_tensors or self.spans:
                    self.prepare_root(trace, request, scope.timestamps, scope.with_tensors)

    cdef Trace begin_root(self, InferRequest request, Sampling scope, bint asked):
        """Begins a trace with the level of its scope."""
        cdef Trace trace = made(self, request)
        request.trace = trace
        trace.scope = scope
        trace.asked = asked
        trace.timestamps = trace.record.timed = scope.timestamps
        trace.open = 1
        trace.record.front = request.responder.protocol
        self.open += 1
        return trace

    def prepare_root(self, Trace trace, InferRequest request, bint timestamps, bint with_tensors):
        """Adds what a new root needs in addition to timestamps."""
        trace.timestamps = trace.record.timed = timestamps
        if self.spans:  # no span contains tensors
            trace.record.timed = True
            with_tensors = False
        trace.with_tensors = with_tensors
        if with_tensors:
            trace.copy("TENSOR_QUEUE_INPUT", request.inputs)
            trace.parameters = parameters_of(request)
        if self.spans:
            self.identify(trace, request.asked)

    cdef object finish(self, Trace root):
        """Called when all parts of a trace have ended."""
        cdef Sampling scope = root.scope
        cdef TraceBlock block
        cdef Py_ssize_t size
        self.open -= 1
        scope.open -= 1
        if root.asked or not scope.tail_us or scope.keep(root.slow_or_failed()):
            if self.spans or root.with_tensors or not scope.to_file:
                self.recent.add(root, NULL, 0)
                self.kept(root)
            else:
                block = scope.block
                if block is None:
                    block = scope.block = self.writer.block(scope)
                    size = root.pack_into(block)
                    self.writer.opened(scope)
                else:
                    size = root.pack_into(block)
                self.recent.add(root, block.records.data + block.records.size - size, size)
                if block.records.size >= BLOCK_BYTES or block.traces >= block.most:
                    self.writer.full(scope)
        root.children = None
        if not scope.open and (scope.retired or not scope.left):
            self.drained(scope)
        if not self.open and (self.disabled or scope.retired or not scope.left):
            self.activate()
