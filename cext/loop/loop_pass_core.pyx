"""The compiled part of the loop pass: collects marked schedulers and connections, and ends the pass.

Compiled connections call want_flush() by the class's name, LoopPassCore.want_flush(loop_pass, self): the class in Python that
extends this one does not replace it, and to look whether it does takes longer than the call.
"""
import logging

from neptrio.request.infer_request cimport now_ns

log = logging.getLogger("neptrio.loop")


cdef class LoopPassCore:
    """The schedulers with something to decide and the connections with something to send. Trio thread only."""

    def __cinit__(self):
        self.dispatchers = []
        self.connections = []
        self.later = []
        self.marked = set()
        self.flushing = set()

    cpdef mark(self, dispatcher):
        """Has `dispatcher.dispatch(now)` called at the end of this pass."""
        if dispatcher not in self.marked:
            self.marked.add(dispatcher)
            self.dispatchers.append(dispatcher)

    cpdef mark_later(self, dispatcher):
        """Like mark(), but the pass ends only after every task that can run now has run."""
        if dispatcher not in self.marked:
            self.marked.add(dispatcher)
            self.later.append(dispatcher)
            self.soon()

    cpdef want_flush(self, connection):
        """Has `connection.flush()` called at the end of this pass."""
        if connection not in self.flushing:
            self.flushing.add(connection)
            self.connections.append(connection)

    cpdef soon(self):
        """Has end() called after the tasks that can run now have run; implemented by the subclass."""
        raise NotImplementedError(f"{type(self).__name__}.soon")

    cpdef end(self):
        """Ends the pass: calls dispatch() of all marked schedulers, then flush() of all connections with output."""
        cdef list taken
        if self.ending:
            return
        self.ending = True
        try:
            while self.dispatchers or self.connections:
                if self.dispatchers:
                    taken = self.dispatchers
                    self.dispatchers = []
                    now = now_ns()
                    for dispatcher in taken:
                        self.marked.discard(dispatcher)
                        try:
                            dispatcher.dispatch(now)
                        except Exception:
                            log.exception("a scheduler failed to dispatch")
                    continue
                taken = self.connections
                self.connections = []
                for connection in taken:
                    try:
                        # a trace: called through a C pointer, and not in `flushing`
                        if type(connection) is self.follower:
                            self.follow(connection)
                            continue
                        self.flushing.discard(connection)
                        connection.flush()
                    except Exception:
                        log.exception("a connection failed to flush")
        finally:
            self.ending = False

    @property
    def unended(self) -> bool:
        """Something is marked or has output to send, and nobody has ended the pass."""
        return bool(self.dispatchers or self.connections)

    cpdef take_later(self):
        """Marks the schedulers that mark_later() has collected. The caller must then call end()."""
        self.dispatchers += self.later
        self.later = []
