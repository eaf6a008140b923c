"""Statistics counters: written from a request's timestamp array when it is answered.

The bookkeeping rules are those of spec/rules.md E3.
"""
from libc.stdint cimport int64_t, uint64_t
from posix.time cimport CLOCK_REALTIME, clock_gettime, timespec

from neptrio._cext.request cimport (
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


cdef inline void add(Duration* d, int64_t ns) noexcept:
    d.count += 1
    if ns > 0:
        d.ns += <uint64_t>ns


cdef inline dict plain(Duration* d):
    return {"count": d.count, "ns": d.ns}


cdef class BatchCounters:
    """Durations of the executions with one batch size."""


cdef class ModelCounters:
    """Counters of one model version, from its load to its unload."""

    def __cinit__(self):
        self.batches = {}
        self.failures = {"REJECTED": 0, "CANCELED": 0, "BACKEND": 0, "OTHER": 0}

    cdef int answered(self, InferRequest r, InferResponse response) except -1:
        cdef int64_t[16] s = r.stamps
        if response.error is not None:
            add(&self.fail, s[<int>REQUEST_END] - s[<int>REQUEST_START])
            self.failures[response.error.reason.value] += 1
            return 0
        add(&self.success, s[<int>REQUEST_END] - s[<int>REQUEST_START])
        if s[<int>CACHE_LOOKUP_END]:
            add(&self.queue, s[<int>CACHE_LOOKUP_START] - s[<int>QUEUE_START])
            add(&self.cache_hit, s[<int>CACHE_LOOKUP_END] - s[<int>CACHE_LOOKUP_START])
            return 0
        add(&self.queue, s[<int>COMPUTE_START] - s[<int>QUEUE_START])
        add(&self.compute_input, s[<int>COMPUTE_INPUT_END] - s[<int>COMPUTE_START])
        add(&self.compute_infer, s[<int>COMPUTE_OUTPUT_START] - s[<int>COMPUTE_INPUT_END])
        add(&self.compute_output, s[<int>COMPUTE_END] - s[<int>COMPUTE_OUTPUT_START])
        self.inference_count += r.batch_size if r.batch_size > 1 else 1
        return 0

    cdef int executed(self, uint64_t batch_size, int64_t start, int64_t input_end,
                      int64_t output_start, int64_t end) except -1:
        cdef BatchCounters b = self.batches.get(batch_size)
        cdef timespec ts
        if b is None:
            b = BatchCounters.__new__(BatchCounters)
            b.batch_size = batch_size
            self.batches[batch_size] = b
        add(&b.compute_input, input_end - start)
        add(&b.compute_infer, output_start - input_end)
        add(&b.compute_output, end - output_start)
        self.execution_count += 1
        clock_gettime(CLOCK_REALTIME, &ts)
        self.last_inference_ms = <uint64_t>ts.tv_sec * 1000 + <uint64_t>ts.tv_nsec // 1000000
        return 0

    def snapshot(self) -> dict:
        """Everything but name and version of the statistics extension's $model_stat, in its key order."""
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
            "response_stats": {},
            "batch_stats": batches,
            "memory_usage": [],
        }
