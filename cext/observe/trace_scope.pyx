"""What sampling counts in a scope of settings: all models, or one that has settings of its own.

A scope's block collects what is finished in it until the writer's thread takes it.

Rules:
 1. A scope's block is filled and taken without a step in between at which another thread could run.
Source: docs/protocol/observed.md 11, docs/protocol/trace-extension.md.
"""
from libc.stdint cimport int64_t

from neptrio.observe.trace_block cimport TraceBlock


cdef class Sampling:
    """What sampling counts in a scope of settings (observe.trace_settings.Scope)."""

    @property
    def level(self) -> tuple:
        """What is traced: (), or some of TIMESTAMPS and TENSORS."""
        return self.levels

    @level.setter
    def level(self, tuple levels):
        self.levels = levels
        self.timestamps = "TIMESTAMPS" in levels
        self.with_tensors = "TENSORS" in levels

    cpdef bint sample(self):
        """Counts a request; True when it is one to trace (the rate-th, 2 * rate-th, ...)."""
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
        """The block, which the scope then has no more (rule 1)."""
        cdef TraceBlock block = self.block
        self.block = None
        return block

    cpdef bint keep(self, bint slow_or_failed):
        """With a tail: whether a finished trace is kept, which counts it."""
        if not self.tail_us:
            return True
        if not slow_or_failed or not self.left:
            return False
        if self.left > 0:
            self.left -= 1
        return True
