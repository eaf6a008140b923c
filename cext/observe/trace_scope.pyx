"""The sampling counters of a scope: of all models, or of a model with trace settings of its own.

A scope's block collects the records of finished traces until the writer's thread takes it.

Rules:
 1. Filling a block and taking it are never interrupted by another thread: both are done with the GIL held.
Source: docs/protocol/observed.md 11, docs/protocol/trace-extension.md.
"""
from libc.stdint cimport int64_t

from neptrio.observe.trace_block cimport TraceBlock


cdef class Sampling:
    """The sampling counters of a scope (observe.trace_settings.Scope adds the settings)."""

    @property
    def level(self) -> tuple:
        # type: () -> tuple[str, ...]
        """What is traced: (), or some of "TIMESTAMPS" and "TENSORS"."""
        return self.levels

    @level.setter
    def level(self, tuple levels):
        # type: (tuple[str, ...]) -> tuple[str, ...]
        self.levels = levels
        self.timestamps = "TIMESTAMPS" in levels
        self.with_tensors = "TENSORS" in levels

    cpdef bint sample(self):
        """Counts a request; True when it is to be traced (the rate-th, the 2 * rate-th, ...)."""
        if not self.left or not self.rate or not (self.timestamps or self.with_tensors):
            return False
        self.seen += 1
        if self.seen < self.rate:
            return False
        self.seen = 0
        if self.left > 0 and not self.tail_us:
            self.left -= 1
        self.open += 1
        return True

    def take_block(self):
        # type: () -> TraceBlock | None
        """Removes and returns the scope's block (rule 1)."""
        cdef TraceBlock block = self.block
        self.block = None
        return block

    cpdef bint keep(self, bint slow_or_failed):
        """With trace_tail: whether a finished trace is kept. Counts it if so."""
        if not self.tail_us:
            return True
        if not slow_or_failed or not self.left:
            return False
        if self.left > 0:
            self.left -= 1
        return True
