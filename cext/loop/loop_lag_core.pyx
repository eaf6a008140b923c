"""The compiled half of the loop's measure of itself: passes, their histogram and notes of large work."""
from libc.stdint cimport int64_t, uint64_t

from neptrio.request.infer_request cimport now_ns

import logging

log = logging.getLogger("neptrio.loop")

cdef extern from *:
    int __builtin_clzll(unsigned long long) noexcept nogil

# upper bounds of the buckets in nanoseconds, all but the last
BOUNDS_NS = tuple(1 << (FIRST_EXPONENT + i) for i in range(BUCKET_COUNT - 1))


cdef class LoopLagCore:
    """Counts the passes of one loop."""

    def __cinit__(self):
        self.notes = []

    cpdef woke(self):
        """The wait is over: a pass begins, unless one is under way."""
        if not self.begun_ns:
            self.begun_ns = now_ns()

    cpdef waits(self):
        """The loop looks at its sockets again: the pass is over."""
        cdef int64_t now, taken
        cdef int index
        if not self.begun_ns:
            return
        now = now_ns()
        taken = now - self.begun_ns
        self.begun_ns = 0
        index = 0
        if taken > (1 << FIRST_EXPONENT):
            # every power of two is an upper bound
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
        """Work begins, or began then, that takes time in proportion to `nbytes`; tell it only of many."""
        if self.begun_ns:
            self.notes.append((begun_ns or now_ns(), kind, model, self.source, nbytes))

    def step_begins(self, task):
        """A task of trio's runs."""
        self.step_ns = now_ns()

    def step_ends(self, task):
        """It has run."""
        cdef int64_t taken = now_ns() - self.step_ns
        if taken > self.longest_step_ns:
            self.longest_step_ns = taken
            self.longest_step = task

    def late(self, int64_t now, int64_t taken, list notes, task, int64_t task_ns):
        """A pass took longer than `warning_ns`; the subclass says so."""

    def cumulative(self, bounds):
        """How many passes took no longer than each of the ascending `bounds`, which are of BOUNDS_NS."""
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
