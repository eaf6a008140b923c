"""The statistics counters, updated from a request's timestamps when it is answered.

The problem: the statistics extension promises relations between its numbers (queue.count equals success.count, compute
is success without cache hits), operators read them during heavy traffic, and updating them may cost a request at most a
microsecond. The choice: plain structs, written only on the trio thread at the moment a request is answered, and read
on the same thread.

Rules (sources: docs/protocol/rules.md E3, docs/protocol/statistics-extension.md):
 1. answered() is called once per accepted request. It updates either success, queue and (without a cache hit) the three
    compute durations, or only fail.
 2. Each request of a batch is counted with the batch's whole durations; they are not divided among requests.
 3. Executions are counted by the class above (cext/observe/executions), whatever happened to their requests.
 4. An ensemble's request (`composing`) has the sums of its steps' compute durations and an execution of its own, and
    counts 2 when it fails.
 5. A decoupled request that ended with an error response has failed, and so has one that was cancelled before its
    final response without contents.
 6. A cache miss counts whatever became of the answer. Of a request that succeeded it adds the time of lookup and insertion
    to success.ns, and nothing to success.count.
 7. Microseconds (for the metrics) are rounded down for each event.
 8. Negative durations count as zero.
 9. Whatever changes what the statistics extension shows adds to `changes` or sets another `memory_usage`, so a text
    with the same two is still true. Most of a server's models are idle, and their texts are asked for again and again.
 10. A backend that reports the durations of its responses itself is believed: what was counted of responses before its first
     report is dropped, and from there on its reports alone count.
 11. So is one that reports a request: its times are the request's, and whether it succeeded is what the backend says. A request
     whose answer goes out before its backend has reported or released it counts when one of both has happened.
"""
from libc.stdint cimport int64_t, uint64_t

from neptrio.observe.executions cimport BatchCounters, Duration, ExecutionCounters, add, more, plain
from neptrio.observe.histogram cimport Histogram, SlidingHistogram
from neptrio.request.infer_request cimport (
    CACHE_INSERT_END,
    CACHE_INSERT_START,
    CACHE_LOOKUP_END,
    CACHE_LOOKUP_START,
    COMPUTE_END,
    COMPUTE_INPUT_END,
    COMPUTE_OUTPUT_START,
    COMPUTE_START,
    QUEUE_START,
    REQUEST_END,
    REQUEST_START,
    InferRequest,
    InferResponse,
)
from neptrio.observe.stated cimport Stated, add_to_ensemble
from neptrio.rings.kinds cimport CANCELLED, EMPTY, FAILED, LATER, SUCCEEDED

from bisect import bisect_left

from neptrio.errors import Cancelled, Internal, Reason
from neptrio.observe.last_errors import LastErrors

cdef enum:
    FEW = 64               # as long as CloseCounters.few
    LONGEST_TEXT = 8192    # bytes of a text that is kept

STAGES = ("request", "queue", "compute_input", "compute_infer", "compute_output")  # type: tuple[str, ...]
# Responses of one request with a higher index share the last key: a model that streams without end must not make its
# statistics grow without end.
MAX_RESPONSE_KEYS = 4096
CANCELED = Reason.CANCELED  # type: Reason
CANCELLATION = Cancelled()  # type: Cancelled
REPORTED_FAILED = Internal("the backend has reported that the request failed", reason=Reason.BACKEND)  # type: Internal


cdef class ResponseCounters:
    """Durations of the responses with one index (decoupled models)."""

    cdef dict snapshot(self):
        return {
            "compute_infer": plain(&self.compute_infer),
            "compute_output": plain(&self.compute_output),
            "success": plain(&self.success),
            "fail": plain(&self.fail),
            "empty_response": plain(&self.empty_response),
            "cancel": plain(&self.cancel),
        }


cdef class CloseCounters:
    """The batches that were closed for one reason: their sizes, and how long the oldest request of each waited."""

    def __cinit__(self):
        self.many = {}

    @property
    def sizes(self) -> dict:
        # type: () -> dict[int, int]
        """Batch size -> executions."""
        found = {size: self.few[size] for size in range(FEW) if self.few[size]}
        found.update(self.many)
        return found


class BoundedHistogram:
    """A Prometheus histogram with bounds set by the user; values are integers."""

    def __init__(self, bounds):
        # type: (Sequence[int]) -> None
        self.bounds = tuple(bounds)  # type: tuple[int, ...]
        self.counts = [0] * (len(self.bounds) + 1)  # type: list[int]
        self.sum = 0

    def record(self, value):
        # type: (int) -> None
        """Counts a value in the first bucket whose bound is at or above it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


cdef class ModelCounters(ExecutionCounters):
    """Counters of one model version, from its load to its unload."""

    def __cinit__(self):
        self.responses = []
        self.closings = {}
        self.memory_usage = []
        self.texts = {}
        self.failures = {"CANCELED": 0, "REJECTED": 0, "BACKEND": 0, "OTHER": 0}
        self.request_histogram = Histogram()
        self.queue_histogram = Histogram()
        self.input_histogram = Histogram()
        self.infer_histogram = Histogram()
        self.output_histogram = Histogram()

    def enable_summaries(self, bint cached):
        """Keeps a sliding window for each stage; with `cached` (the model has a cache) not for whole requests."""
        stages = STAGES[1:] + ("cache_hit", "cache_miss") if cached else STAGES
        self.summaries = {stage: SlidingHistogram() for stage in stages}

    def enable_first_response(self, bounds):
        # type: (Sequence[int]) -> None
        """Counts times to the first response in milliseconds, in buckets with the ascending `bounds`."""
        self.first_response = BoundedHistogram(bounds)

    def text_in(self, form, make):
        # type: (str, Callable[[], bytes]) -> bytes
        """`make()`, bytes that must follow from what snapshot() shows, the model's name and version alone; or what it
        returned for the same `form` when nothing had changed since."""
        kept = self.texts.get(form)
        if kept is not None and <uint64_t>kept[0] == self.changes and kept[1] is self.memory_usage:
            return kept[2]
        text = make()
        if len(text) <= LONGEST_TEXT:
            self.texts[form] = (self.changes, self.memory_usage, text)
        return text

    cdef int answered(self, InferRequest r, InferResponse response) except -1:
        cdef int64_t* s = r.timestamps
        cdef int64_t end = s[<int>REQUEST_END]
        cdef int64_t total = end - s[<int>REQUEST_START]
        cdef int64_t waited, c_in, c_infer, c_out
        cdef uint64_t size = <uint64_t>r.batch_size if r.batch_size > 1 else 1
        cdef Stated stated = r.stated
        self.changes += 1
        error = response.error
        if error is None and response.null:
            error = r.failure
        if stated is not None and not r.cache_hit:
            if stated.how == LATER:
                stated.put_off(r, response, error)
                add_to_ensemble(r, end)
                return 0
            if stated.how == SUCCEEDED or stated.how == FAILED:
                stated.apply(r)
                if stated.how == SUCCEEDED:
                    error = None
                elif error is None:
                    error = REPORTED_FAILED
        if error is not None:
            add(&self.fail, total)
            self.note_error(error)
            if error.reason is CANCELED:
                self.cancelled += 1
            else:
                self.failed += 1
            if r.composing:
                add(&self.fail, total)
                self.failures["CANCELED" if error.reason is CANCELED else "OTHER"] += 2
            else:
                self.failures[error.reason.value] += 1
            return 0
        add(&self.success, total)
        self.request_histogram.add(total)
        if self.first_response is not None and not r.model.decoupled:  # its only one
            self.first_response.record(max(total, 0) // 1000000)
        if r.cache_hit:
            waited = s[<int>CACHE_LOOKUP_START] - s[<int>QUEUE_START]
            c_in = s[<int>CACHE_LOOKUP_END] - s[<int>CACHE_LOOKUP_START]
            add(&self.queue, waited)
            add(&self.cache_hit, c_in)
            self.queue_histogram.add(waited)
            if self.summaries is not None:
                self.summarize("request", total, end)
                self.summarize("queue", waited, end)
                self.summarize("cache_hit", c_in, end)
            return 0
        if r.composing:
            waited = s[<int>COMPUTE_START] - s[<int>QUEUE_START]
            c_in, c_infer, c_out = r.steps_input_ns, r.steps_infer_ns, r.steps_output_ns
            self.executed(size, 0, c_in, c_in + c_infer, c_in + c_infer + c_out)
        elif s[<int>COMPUTE_START]:
            waited = s[<int>COMPUTE_START] - s[<int>QUEUE_START]
            c_in = s[<int>COMPUTE_INPUT_END] - s[<int>COMPUTE_START]
            c_infer = s[<int>COMPUTE_OUTPUT_START] - s[<int>COMPUTE_INPUT_END]
            c_out = s[<int>COMPUTE_END] - s[<int>COMPUTE_OUTPUT_START]
        else:
            waited = end - s[<int>QUEUE_START]
            c_in = c_infer = c_out = 0
        if r.parent is not None and r.parent.composing:
            r.parent.steps_queue_ns += waited + (r.steps_queue_ns if r.composing else 0)
            r.parent.steps_input_ns += c_in
            r.parent.steps_infer_ns += c_infer
            r.parent.steps_output_ns += c_out
        add(&self.queue, waited)
        add(&self.compute_input, c_in)
        add(&self.compute_infer, c_infer)
        add(&self.compute_output, c_out)
        self.inference_count += size
        self.queue_histogram.add(waited)
        self.input_histogram.add(c_in)
        self.infer_histogram.add(c_infer)
        self.output_histogram.add(c_out)
        if self.summaries is not None:
            self.summarize("request", total, end)
            self.summarize("queue", waited, end)
            self.summarize("compute_input", c_in, end)
            self.summarize("compute_infer", c_infer, end)
            self.summarize("compute_output", c_out, end)
        return 0

    cpdef reported(self, Stated stated, int how, times):
        """The backend has reported, or released, a request that was answered before (rule 11)."""
        cdef InferRequest request = stated.request
        if request is None:
            return
        stated.request = None
        stated.how = how
        stated.set(times)
        self.answered(request, stated.response)
        request.stated = None

    cpdef note_error(self, error, bint refused=False):
        # type: (TritonError, ...) -> None
        """Remembers an error that a request met, for whoever looks at the model; `refused`: it was not accepted."""
        if self.errors is None:
            self.errors = LastErrors()
        self.errors.note(error, refused)

    cdef int summarize(self, str stage, int64_t ns, int64_t now) except -1:
        cdef SlidingHistogram window = self.summaries.get(stage)
        if window is not None:
            window.record(ns, now)
        return 0

    cdef int responded(self, InferRequest r, InferResponse response, int64_t now) except -1:
        cdef ResponseCounters c
        cdef int64_t start, produced
        self.changes += 1
        # the computation of a response starts at the end of the previous one, or of the inputs
        start = r.previous_response_ns
        if not start:
            start = r.timestamps[<int>COMPUTE_INPUT_END] or r.timestamps[<int>REQUEST_START]
            if self.first_response is not None and r.timestamps[<int>REQUEST_START]:
                self.first_response.record((now - r.timestamps[<int>REQUEST_START]) // 1000000)
        r.previous_response_ns = now
        produced = response.produced_ns
        if not 0 < produced <= now:
            produced = now
        elif produced < start:  # handed over while the one before was still delivered
            produced = start
        c = self.at(<uint64_t>r.responses) if self.unseen is None else self.unseen
        if response.null and r.cancelled and r.failure is None:
            # the model has seen the cancellation and stopped without an error
            r.failure = CANCELLATION
            add(&c.cancel, now - r.cancelled_ns if r.cancelled_ns else 0)
        elif response.error is not None:
            r.failure = response.error
            if response.error.reason is CANCELED:
                add(&c.cancel, now - r.cancelled_ns if r.cancelled_ns else 0)
                return 0
            add(&c.compute_infer, produced - start)
            if response.outputs and now > produced:
                add(&c.compute_output, now - produced)
                add(&c.fail, now - start)
            else:  # the sum of inference and output, of which there is none
                add(&c.fail, produced - start)
        elif response.null or not response.outputs:
            add(&c.compute_infer, now - start)
            add(&c.empty_response, now - start)
            if not response.null:
                r.failure = None
        else:
            r.failure = None
            add(&c.compute_infer, produced - start)
            add(&c.compute_output, now - produced)
            add(&c.success, now - start)
        return 0

    cdef ResponseCounters at(self, uint64_t place):
        """The counters of the responses with that place in their requests."""
        cdef Py_ssize_t index = <Py_ssize_t>min(place, <uint64_t>MAX_RESPONSE_KEYS - 1)
        while len(self.responses) <= index:
            self.responses.append(ResponseCounters.__new__(ResponseCounters))
        return self.responses[index]

    cpdef measured(self, uint64_t place, int outcome, int64_t computing_ns, int64_t output_ns):
        """A response as the backend reports it (rule 10); `outcome` is one of kinds.pxd. Without outputs output_ns is 0."""
        cdef ResponseCounters c
        cdef int64_t total = computing_ns + output_ns
        if self.unseen is None:
            self.unseen = ResponseCounters.__new__(ResponseCounters)
            self.responses = []
        self.changes += 1
        c = self.at(place)
        if outcome == CANCELLED:
            add(&c.cancel, total)
            return
        add(&c.compute_infer, computing_ns)
        if outcome == EMPTY:
            add(&c.empty_response, total)
        elif outcome == FAILED:
            if output_ns > 0:
                add(&c.compute_output, output_ns)
            add(&c.fail, total)
        else:
            add(&c.compute_output, output_ns)
            add(&c.success, total)

    cdef int closed(self, str reason, uint64_t batch_size, int64_t oldest_wait_ns) except -1:
        cdef CloseCounters c = self.last_closing
        self.changes += 1
        if c is None or reason is not self.last_reason:
            c = self.closings.get(reason)
            if c is None:
                c = self.closings[reason] = CloseCounters()
            self.last_reason, self.last_closing = reason, c
        c.count += 1
        c.size_sum += batch_size
        if oldest_wait_ns > 0:
            c.oldest_wait_ns += oldest_wait_ns
        if batch_size < FEW:
            c.few[batch_size] += 1
        else:
            c.many[batch_size] = c.many.get(batch_size, 0) + 1
        return 0

    cpdef cache_missed(self, InferRequest request, bint succeeded=True):
        """Adds a cache miss, from the request's timestamps of lookup and insertion, which may have no insertion.

        To be called once, when the request has its answer and that was inserted, where it was.
        """
        cdef int64_t[16] s = request.timestamps
        cdef int64_t ns = (s[<int>CACHE_LOOKUP_END] - s[<int>CACHE_LOOKUP_START]
                           + s[<int>CACHE_INSERT_END] - s[<int>CACHE_INSERT_START])
        self.changes += 1
        add(&self.cache_miss, ns)
        if succeeded:
            more(&self.success, ns)
        if self.summaries is not None:
            self.summarize("cache_miss", ns, s[<int>CACHE_INSERT_END] or s[<int>CACHE_LOOKUP_END])

    def accounts(self) -> dict:
        # type: () -> dict[str, int]
        """Requests since the load; accepted = answered + failed + cancelled + in flight.

        Refused requests were valid, but the scheduler did not accept them.
        """
        return {
            "accepted": self.accepted,
            "refused": self.refused,
            "answered": self.success.count,
            "failed": self.failed,
            "cancelled": self.cancelled,
        }

    def microseconds(self) -> dict:
        # type: () -> dict[str, tuple[int, int]]
        """stage -> (count, sum of whole microseconds per event); stages as in inference_stats."""
        return {
            "success": (self.success.count, self.success.us),
            "fail": (self.fail.count, self.fail.us),
            "queue": (self.queue.count, self.queue.us),
            "compute_input": (self.compute_input.count, self.compute_input.us),
            "compute_infer": (self.compute_infer.count, self.compute_infer.us),
            "compute_output": (self.compute_output.count, self.compute_output.us),
            "cache_hit": (self.cache_hit.count, self.cache_hit.us),
            "cache_miss": (self.cache_miss.count, self.cache_miss.us),
        }

    def histograms(self) -> dict:
        # type: () -> dict[str, Histogram]
        """stage -> Histogram of nanoseconds of all successful requests since the load.

        Cache hits are counted in request and queue only.
        """
        return dict(zip(STAGES, (self.request_histogram, self.queue_histogram, self.input_histogram,
                                 self.infer_histogram, self.output_histogram)))

    def snapshot(self) -> dict:
        # type: () -> dict[str, Any]
        """The $model_stat of the statistics extension without name and version, in its order of keys."""
        cdef BatchCounters b
        batches = []
        for size in sorted(self.batches):
            b = self.batches[size]
            batches.append(
                {
                    "batch_size": b.batch_size,
                    "compute_input": plain(&b.compute_input),
                    "compute_infer": plain(&b.compute_infer),
                    "compute_output": plain(&b.compute_output),
                }
            )
        return {
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {
                "success": plain(&self.success),
                "fail": plain(&self.fail),
                "queue": plain(&self.queue),
                "compute_input": plain(&self.compute_input),
                "compute_infer": plain(&self.compute_infer),
                "compute_output": plain(&self.compute_output),
                "cache_hit": plain(&self.cache_hit),
                "cache_miss": plain(&self.cache_miss),
            },
            "response_stats": {
                str(i): (<ResponseCounters>c).snapshot() for i, c in enumerate(self.responses)
            },
            "batch_stats": batches,
            "memory_usage": [dict(usage) for usage in self.memory_usage],
        }
