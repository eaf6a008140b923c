"""The compiled part of the loop's measurement of itself: passes, their histogram, and notes of large work."""
from libc.stdint cimport int64_t, uint64_t

from neptrio.request.infer_request cimport now_ns

import logging

log = logging.getLogger("neptrio.loop")

cdef extern from *:
    int __builtin_clzll(unsigned long long) noexcept nogil

# upper bounds of the buckets in nanoseconds, except the last one's
BOUNDS_NS = tuple(1 << (FIRST_EXPONENT + i) for i in range(BUCKET_COUNT - 1))  # type: tuple[int, ...]


cdef class LoopLagCore:
    """Counts the passes of one loop."""

    def __cinit__(self):
        self.notes = []

    cpdef woke(self):
        """The wait for sockets has ended: begins a pass, unless one is under way."""
        if not self.begun_ns:
            self.begun_ns = now_ns()

    cpdef waits(self):
        """The loop looks at its sockets again: ends the pass."""
        cdef int64_t now, taken
        cdef int index
        if not self.begun_ns:
            return
        now = now_ns()
        taken = now - self.begun_ns
        self.begun_ns = 0
        index = 0
        if taken > (1 << FIRST_EXPONENT):
            # buckets end at powers of two, inclusive
            index = 64 - __builtin_clzll(<unsigned long long>(taken - 1)) - FIRST_EXPONENT
            if index >= BUCKET_COUNT:
                index = BUCKET_COUNT - 1
        self.counts[index] += 1
        self.count += 1
        self.sum_ns += <uint64_t>taken
        if taken > self.max_ns:
            self.max_ns = taken
        notes, task = self.notes, self.longest_step
        if notes:
            self.notes = []
        if self.warning_ns and taken > self.warning_ns:
            try:
                self.late(now, taken, notes, task, self.longest_step_ns)
            except Exception:
                log.exception("what kept the loop could not be told")
        self.source = self.longest_step = None
        self.longest_step_ns = 0

    cpdef note(self, str kind, str model, Py_ssize_t nbytes, int64_t begun_ns=0):
        """Notes work that takes time in proportion to `nbytes` and begins now, or began at `begun_ns`.

        To be called for many bytes only, as each note costs time.
        """
        if self.begun_ns:
            self.notes.append((begun_ns or now_ns(), kind, model, self.source, nbytes))

    def step_begins(self, task):
        """A trio task begins a step."""
        self.step_ns = now_ns()

    def step_ends(self, task):
        """The task's step has ended."""
        cdef int64_t taken = now_ns() - self.step_ns
        if taken > self.longest_step_ns:
            self.longest_step_ns = taken
            self.longest_step = task

    def late(self, int64_t now, int64_t taken, list notes, task, int64_t task_ns):
        # type: (..., ..., list[tuple[int, str, str, Any, int]], ..., ...) -> None
        """Called for a pass that took longer than `warning_ns`; the subclass logs it."""

    def cumulative(self, bounds):
        # type: (Iterable[int]) -> list[int]
        """The number of passes that took at most each of the ascending `bounds` (a choice of BOUNDS_NS)."""
        cdef int i = 0
        cdef uint64_t seen = 0
        cdef int64_t limit
        found = []
        for bound in bounds:
            limit = bound
            while i < BUCKET_COUNT - 1 and (<int64_t>1 << (FIRST_EXPONENT + i)) <= limit:
                seen += self.counts[i]
                i += 1
            found.append(seen)
        return found
