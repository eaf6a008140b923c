"""The counters of a model version's executions, by batch size.

Rules:
 1. executed() counts an execution once, whatever happened to its requests, and updates last_inference.
 2. An execution counts as the backend reports it; where it reports none, as it was measured here. One that is reported after
    its batch was counted takes that count's place.
 3. Microseconds (for the metrics) are rounded down for each event, and negative durations count as zero.
"""
from libc.stdint cimport int64_t, uint64_t
from posix.time cimport CLOCK_REALTIME, clock_gettime, timespec

MOST_SIZES = 4096  # of batches, that a backend may report


cdef class BatchCounters:
    """Durations of the executions with one batch size."""


cdef class ExecutionCounters:
    """See the module's text."""

    def __cinit__(self):
        self.batches = {}

    cdef int executed(self, uint64_t batch_size, int64_t start, int64_t input_end,
                      int64_t output_start, int64_t end) except -1:
        cdef BatchCounters b = self.last_size
        cdef timespec ts
        self.changes += 1
        if b is None or b.batch_size != batch_size:
            b = self.batches.get(batch_size)
            if b is None:
                b = BatchCounters.__new__(BatchCounters)
                b.batch_size = batch_size
                self.batches[batch_size] = b
            self.last_size = b
        add(&b.compute_input, input_end - start)
        add(&b.compute_infer, output_start - input_end)
        add(&b.compute_output, end - output_start)
        self.execution_count += 1
        clock_gettime(CLOCK_REALTIME, &ts)
        self.last_inference_ms = <uint64_t>ts.tv_sec * 1000 + <uint64_t>ts.tv_nsec // 1000000
        return 0

    cpdef execution_reported(self, tuple row, tuple instead_of):
        # type: (tuple[int, int, int, int, int], tuple[int, int, int, int] | None) -> None
        """Counts an execution as the backend reports it (rule 2): (batch size, when it began, had its inputs, had its outputs,
        ended). `instead_of`: (batch size, three durations) of how it was counted before."""
        cdef uint64_t batch_size
        cdef int64_t start, input_end, output_start, end
        cdef BatchCounters b
        batch_size, start, input_end, output_start, end = row
        if instead_of is not None:
            b = self.batches[instead_of[0]]
            take(&b.compute_input, instead_of[1])
            take(&b.compute_infer, instead_of[2])
            take(&b.compute_output, instead_of[3])
            self.execution_count -= 1
            if not b.compute_input.count:
                del self.batches[instead_of[0]]
                self.last_size = None
        if batch_size not in self.batches and len(self.batches) >= MOST_SIZES:
            batch_size = max(self.batches)
        input_end = max(input_end, start)
        output_start = max(output_start, input_end)
        self.executed(batch_size, start, input_end, output_start, max(end, output_start))
