"""The compiled part of instances and their pool (the rest is in neptrio/execution/instance.py).

A native instance runs a batch on the trio thread itself when nothing of it is under way and its executions have been
measured at a few microseconds: handing such a batch to a thread and back would cost several times that.
`inline_executions` counts these batches. The GIL is kept meanwhile: getting it back could take far longer than the
execution.

What is called as `InstanceCore.begin(self, ...)` here, with the class's name, is that function whatever the object's class:
no class in Python replaces it, and looking for one that does takes longer than the call, for every batch.
"""
from libc.stdint cimport int64_t

from neptrio.execution.batch cimport Batch, Executor
from neptrio.observe.trace cimport Trace
from neptrio.request.device_memory cimport any_on_device, in_use
from neptrio.loop.mailbox cimport CompletionQueue, Mailbox
from neptrio.execution.inline_policy cimport INLINE_NS, mean_after
from neptrio.request.infer_request cimport InferRequest, ModelCore, Tensor, now_ns

import logging

from neptrio.errors import TritonError

cdef extern from *:
    """
    /* what calling a type does, without __init__ */
    #define NEPTRIO_NEW(type, nothing) (((PyTypeObject *)(type))->tp_new((PyTypeObject *)(type), (nothing), NULL))
    """
    object new_object "NEPTRIO_NEW"(object type, object nothing)

cdef extern from "Python.h":
    int PyList_SetSlice(object list, Py_ssize_t low, Py_ssize_t high, void* items) except -1

cdef tuple _NOTHING = ()
cdef object log = logging.getLogger("neptrio.instance")

cdef enum:
    BRISK_NS = 5000000       # executions in Python with a shorter mean get up to BRISK_DEPTH batches in advance
    QUICK_NS = 200000        # with a shorter mean, so do executions of several instances that are processes
    BRISK_DEPTH = 16
    NEAR_BYTES = 16384       # tensors that are larger may lie in an instance's memory


def _promise(InstanceCore instance not None):
    return instance.outstanding, instance.backend.body_bytes


cdef class PoolCore:
    """The instances of a model version, and which of them may take another batch."""

    def __cinit__(self):
        self.instances = []

    def _granted(self):
        # type: () -> InstanceCore | None
        raise NotImplementedError(f"{type(self).__name__}._granted")

    def note_retired(self):
        raise NotImplementedError(f"{type(self).__name__}.note_retired")

    cpdef available(self, int64_t limit):
        """The instance with the fewest batches under way, if it has fewer than `limit`; else None.

        For an instance that works on several batches at once the limit is that much higher; a native one that wants
        more than one batch in advance gets these where the limit allows any. With a rate limiter it
        is an idle instance that has a grant, or None.
        """
        cdef InstanceCore instance
        cdef InstanceCore best = None
        cdef int64_t room
        if self.limiter is not None:
            return self._granted()
        for instance in self.instances:
            if instance.away:
                continue
            if instance.native:  # works on one batch at a time, and no model's code blocks it
                room = limit if limit == 1 else limit - 1 + instance.in_advance
            else:
                backend = instance.backend
                room = 1 if backend.blocked else limit + <int64_t>backend.capacity - 1
            if instance.outstanding < room and (best is None or instance.outstanding < best.outstanding):
                best = instance
                if best.outstanding == 0:
                    break
        return best

    cpdef nearest(self, found, InferRequest request):
        """The instance in whose memory the request was received, if it has as few batches under way as `found`; else
        `found`."""
        cdef InstanceCore instance
        cdef Tensor tensor
        if found is None or self.limiter is not None or len(self.instances) == 1 or not request.inputs:
            return found
        tensor = request.inputs[0]
        if tensor.nbytes <= NEAR_BYTES:
            return found
        for instance in self.instances:
            if (instance.outstanding == (<InstanceCore>found).outstanding and not instance.away
                    and not instance.backend.blocked                    and instance.backend.holds_body(tensor)):
                return instance
        return found

    def promised(self):
        """The instance that would be given a request whose body is being received now, None if that cannot be told.

        The one with the fewest batches under way, and of those the one that has received the fewest bytes for requests
        that are not answered.
        """
        cdef InstanceCore instance
        if self.limiter is not None:
            return None
        return min([instance for instance in self.instances if not instance.away], key=_promise, default=None)

    cdef int64_t depth(self):
        """How many batches one instance may have under way, the executing ones included.

        Two: one that executes and one that is ready when it ends. The only instance of a model whose Python
        executions are short gets more: it executes several while it has the GIL, and the trio thread hears of them in
        one wake-up, instead of switching threads twice for each. With more instances, or long executions, a batch
        in line would wait while another instance is free. The exception are instances that are all processes and
        so quick that waiting in line costs less than being woken: they get as many.
        """
        cdef InstanceCore instance
        if len(self.instances) == 1:
            instance = self.instances[0]
            if instance.busy_ns < BRISK_NS and (instance.backend.deep or not instance.backend.overlapping):
                return BRISK_DEPTH
            return 2
        for instance in self.instances:
            if instance.busy_ns >= QUICK_NS or not instance.backend.deep:
                return 2
        return BRISK_DEPTH

    cpdef freed(self):
        """An instance may take another batch."""
        if self.on_free is not None:
            self.on_free()


cdef bint _prepares_nothing(backend):
    from neptrio.execution.backend import BackendInstance  # which needs batches, which need this

    return getattr(backend.prepare, "__func__", None) is BackendInstance.prepare


cdef class InstanceCore(Executor):
    """One instance, as schedulers and batches see it."""

    def __init__(self, str name, ModelCore model, backend, CompletionQueue completions, PoolCore pool):
        # type: (..., ..., BackendInstance, ..., ...) -> None
        self.name = name
        self.model = model
        self.backend = backend
        self.pool = pool
        self.under_way = []
        self.native = backend.native
        self.in_advance = backend.in_advance
        self.batch_type = backend.batch_type
        self.plain_batch = self.batch_type.__init__ is Batch.__init__
        self.mean_ns = backend.expected_ns if self.native else float("inf")
        self.busy_ns = float("inf") if self.native else 2 * BRISK_NS
        self.mailbox = Mailbox(completions)
        self.prepare = None if _prepares_nothing(backend) else backend.prepare

    cpdef submit(self, list requests, str close_reason, int64_t oldest_wait_ns):
        # type: (list[InferRequest], ..., ...) -> None
        """Makes a batch of `requests` and executes it."""
        cdef Batch batch = InstanceCore.make_batch(self, requests, close_reason, oldest_wait_ns)
        self.outstanding += 1
        self.under_way.append(batch)
        if self.claim is None:
            InstanceCore.begin(self, batch)
        elif self.claim.granted:
            self.claim.begin()
            InstanceCore.begin(self, batch)
        else:  # of a warm-up, which asks for no grant: the batch waits here for one
            self.awaiting_grant.append(batch)
            self.claim.ask()
            self.pool.serve()

    cpdef begin(self, Batch batch):
        """Starts a batch: on the trio thread, on the instance's thread, or in the backend's own way."""
        if self.line is not None:
            self.line.append(batch)
        else:
            InstanceCore.start_batch(self, batch)

    cpdef start_batch(self, Batch batch):
        """What begin() does with a batch that nobody is in front of."""
        if batch.fetching:
            self.fetch(batch)
        elif batch.error is not None:
            batch.deliver()
        elif batch.copying:
            self.await_copies(batch)
        elif self.outstanding == 1 and self.mean_ns < INLINE_NS and not batch.off_loop:
            self.inline_executions += 1
            batch.work.run(&batch.work)
            batch.deliver()
        elif self.backend.overlapping:
            try:
                self.backend.begin(batch)
            except Exception as error:
                self.not_begun(batch, error)
        else:
            self.mailbox.submit(batch)

    cdef int not_begun(self, Batch batch, error) except -1:
        """The backend could not begin the batch, and does not know it: it comes back with the error, as if executed."""
        if not isinstance(error, TritonError):
            log.error("%s could not begin a batch", self.name, exc_info=error)
            error = self.backend.describe_failure(error)
        batch.error = error
        batch.count_execution = False
        batch.compute_start = batch.compute_start or now_ns()
        batch.compute_end = now_ns()
        self.mailbox.completions.post(batch)
        return 0

    def fetch(self, batch):
        # type: (Batch) -> None
        """Has the batch's inputs copied to the host; begins it and those behind it when they are there."""
        raise NotImplementedError(f"{type(self).__name__}.fetch")

    def await_copies(self, batch):
        # type: (Batch) -> None
        """Begins the batch and those behind it when the tensors of its requests' traces are copied."""
        raise NotImplementedError(f"{type(self).__name__}.await_copies")

    cpdef make_batch(self, list requests, str close_reason, int64_t oldest_wait_ns):
        # type: (list[InferRequest], ..., ...) -> Batch
        """A batch made and prepared from `requests`; when that fails, the batch's error says why. One whose inputs lie on
        a device that its instance can't read is prepared later (fetch); those of instances that execute in Python are
        copied in Batch.execute(), on their thread."""
        cdef InferRequest request
        cdef Batch batch
        if self.plain_batch:
            batch = <Batch>new_object(self.batch_type, _NOTHING)
            batch.set_up(self.model, requests, close_reason, oldest_wait_ns)
        else:
            batch = self.batch_type(self.model, requests, close_reason, oldest_wait_ns)
        batch.instance = self
        try:
            if (in_use() and (self.native or self.backend.overlapping) and not self.backend.takes_device_memory
                    and any_on_device(requests)):
                batch.fetching = True
            elif self.prepare is not None:
                batch = self.prepare(batch)
        except TritonError as error:
            batch.error = error
        except Exception as error:
            batch.error = self.backend.describe_failure(error)
        if batch.error is not None:
            batch.count_execution = False
            batch.compute_start = batch.compute_end = now_ns()
        for request in requests:
            request.batch = batch
            if request.trace is not None and not self.native and (<Trace>request.trace).copying():
                batch.copying = True  # no native backend writes to inputs
        return batch

    cdef int back(self, Batch batch) except -1:
        cdef int64_t took
        self.outstanding -= 1
        if self.under_way[0] is batch:  # nearly always, and found without comparing
            PyList_SetSlice(self.under_way, 0, 1, NULL)
        else:
            self.under_way.remove(batch)
        self.executions += 1
        if self.native:
            # batches known to be slow (large shapes, cext/backends/onnx/builder) say nothing about the others
            if not batch.off_loop:
                self.mean_ns = mean_after(self.mean_ns, batch.compute_end - batch.compute_start)
        else:  # clipped, since some of them wait for the GIL
            took = min(batch.compute_end - batch.compute_start, <int64_t>(2 * BRISK_NS))
            self.busy_ns += (<double>took - self.busy_ns) * 0.1
        if self.pool.on_finished is not None:
            self.pool.on_finished(batch)
        InstanceCore.give_back(self)
        return 0

    cpdef give_back(self):
        """A batch that has begun is not under way any more, whether it was executed or taken back: it frees its place and
        what its grant holds."""
        if self.claim is not None:
            if self.awaiting_grant:
                self.claim.ask()
            PoolCore.freed(self.pool)
            self.claim.end()
        else:
            PoolCore.freed(self.pool)
        if self.retired:
            self.pool.note_retired()

    cpdef answered(self):
        """A request whose batch was back already has had its final response."""
        self.owed -= 1
        if self.retired:
            self.pool.note_retired()
