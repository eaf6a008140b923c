"""The compiled half of instances and their pool (neptrio/execution/instance.py has the rest).

A native instance that has nothing under way and whose executions have been measured at a few
microseconds runs on the trio thread itself: handing such work to a thread and back costs several
times the work. `inline_executions` says how often that happened. The GIL is kept meanwhile: giving
it up for so short a time could cost a wait for it, which is far longer.
"""
from libc.stdint cimport int64_t

from neptrio.execution.batch cimport Batch
from neptrio.request.device_memory cimport fetch_inputs, in_use
from neptrio.loop.mailbox cimport CompletionQueue, Mailbox
from neptrio.execution.inline_policy cimport INLINE_NS, mean_after
from neptrio.request.infer_request cimport InferRequest, ModelCore, now_ns

from neptrio.errors import TritonError

cdef enum:
    BRISK_NS = 5000000       # an execution in Python below this is given BRISK_DEPTH batches
    QUICK_NS = 200000        # below this in processes of their own several instances are, too
    BRISK_DEPTH = 16


cdef class PoolCore:
    """The instances of a model version, and which of them has room."""

    def __cinit__(self):
        self.instances = []

    def _granted(self):
        raise NotImplementedError(f"{type(self).__name__}._granted")

    def note_retired(self):
        raise NotImplementedError(f"{type(self).__name__}.note_retired")

    cpdef available(self, int64_t limit):
        """The instance with the fewest batches under way, if that is below `limit`.

        Instances that work on several batches at once take that many more. With a rate limiter
        it is an idle instance that has a grant. None when there is no such instance.
        """
        cdef InstanceCore instance
        cdef InstanceCore best = None
        cdef int64_t room
        if self.limiter is not None:
            return self._granted()
        for instance in self.instances:
            backend = instance.backend
            room = 1 if backend.blocked else limit + <int64_t>backend.capacity - 1
            if instance.outstanding < room and (best is None or instance.outstanding < best.outstanding):
                best = instance
                if best.outstanding == 0:
                    break
        return best

    cdef int64_t depth(self):
        """Batches that one instance may have under way and in line.

        Two: one that executes, and one in line that keeps the instance busy. A sole instance in Python
        whose executions are short takes more ahead: it works through several while it has the GIL,
        and the trio thread hears of them in one wake-up, instead of two changes of threads for each.
        With more instances, or long executions, a request in line would wait while another
        instance is free; where they all are processes and so quick that waiting costs less than being
        woken, they have as many ahead.
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
        """An instance has room again."""
        if self.on_free is not None:
            self.on_free()


cdef class InstanceCore:
    """One instance, as schedulers and batches see it."""

    def __init__(self, str name, ModelCore model, backend, CompletionQueue completions, PoolCore pool):
        self.name = name
        self.model = model
        self.backend = backend
        self.pool = pool
        self.under_way = []
        self.native = backend.native
        self.batch_type = backend.batch_type
        self.mean_ns = backend.expected_ns if self.native else float("inf")
        self.busy_ns = float("inf") if self.native else 2 * BRISK_NS
        self.mailbox = Mailbox(completions)

    cpdef submit(self, list requests, str close_reason, int64_t oldest_wait_ns):
        """Executes `requests` as one batch."""
        cdef Batch batch = self.make_batch(requests, close_reason, oldest_wait_ns)
        self.outstanding += 1
        self.under_way.append(batch)
        if self.claim is None:
            self.begin(batch)
        elif self.claim.granted:
            self.claim.begin()
            self.begin(batch)
        else:  # from a scheduler that does not ask first: the batch waits for its grant
            self.awaiting_grant.append(batch)
            self.claim.ask()
            self.pool.serve()

    cpdef begin(self, Batch batch):
        """Starts a batch: here, on the instance's thread, or as the backend does it."""
        if batch.error is not None:
            batch.deliver()
        elif self.outstanding == 1 and self.mean_ns < INLINE_NS and not batch.off_loop:
            self.inline_executions += 1
            batch.work.run(&batch.work)
            batch.deliver()
        elif self.backend.overlapping:
            self.backend.begin(batch)
        else:
            self.mailbox.submit(batch)

    cpdef make_batch(self, list requests, str close_reason, int64_t oldest_wait_ns):
        """A prepared batch, or one whose error says why it cannot be."""
        cdef InferRequest request
        cdef Batch batch = self.batch_type(self.model, requests, close_reason, oldest_wait_ns)
        batch.instance = self
        try:
            if in_use() and (self.native or self.backend.overlapping) and not self.backend.takes_device_memory:
                fetch_inputs(requests)  # for other instances, Batch.execute() does that on their thread
            batch = self.backend.prepare(batch)
        except TritonError as error:
            batch.error = error
        except Exception as error:
            batch.error = self.backend.describe_failure(error)
        if batch.error is not None:
            batch.count_execution = False
            batch.compute_start = batch.compute_end = now_ns()
        for request in requests:
            request.batch = batch
        return batch

    cpdef finished(self, Batch batch):
        """The batch is back on the trio thread and about to be answered."""
        cdef int64_t took
        self.outstanding -= 1
        self.under_way.remove(batch)
        self.executions += 1
        if self.native:
            # what is known to be slow (large shapes of a model, cext/backends/onnx/builder) says nothing of the rest
            if not batch.off_loop:
                self.mean_ns = mean_after(self.mean_ns, batch.compute_end - batch.compute_start)
        else:  # clipped too: it waits for the GIL now and then
            took = min(batch.compute_end - batch.compute_start, <int64_t>(2 * BRISK_NS))
            self.busy_ns += (<double>took - self.busy_ns) * 0.1
        if self.pool.on_finished is not None:
            self.pool.on_finished(batch)
        if self.claim is not None:
            if self.awaiting_grant:
                self.claim.ask()
            self.pool.freed()
            self.claim.end()
        else:
            self.pool.freed()
        if self.retired:
            self.pool.note_retired()

    cpdef answered(self):
        """A request that outlived its batch has had its final response."""
        self.owed -= 1
        if self.retired:
            self.pool.note_retired()
