"""The compiled half of the loop pass: what was marked, and the end of the pass (neptrio/loop/loop_pass.py)."""
import logging

from neptrio.request.infer_request cimport now_ns

log = logging.getLogger("neptrio.loop")


cdef class LoopPassCore:
    """Who has something to decide and who has something to send, until end(). On the trio thread only."""

    def __cinit__(self):
        self.dispatchers = []
        self.connections = []
        self.later = []
        self.marked = set()
        self.flushing = set()

    cpdef mark(self, dispatcher):
        """`dispatcher.dispatch(now)` is called before this pass ends."""
        if dispatcher not in self.marked:
            self.marked.add(dispatcher)
            self.dispatchers.append(dispatcher)

    cpdef mark_later(self, dispatcher):
        """Like mark(), after every task that is runnable now."""
        if dispatcher not in self.marked:
            self.marked.add(dispatcher)
            self.later.append(dispatcher)
            self.soon()

    cpdef want_flush(self, connection):
        """`connection.flush()` is called before this pass ends."""
        if connection not in self.flushing:
            self.flushing.add(connection)
            self.connections.append(connection)

    cpdef soon(self):
        """Has end() called once the runnable tasks have run; the subclass knows how."""
        raise NotImplementedError(f"{type(self).__name__}.soon")

    cpdef end(self):
        """Takes every decision that is due and sends what came of it."""
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
                        if type(connection) is self.follower:  # not looked up by name, and not in `flushing`
                            self.follow(connection)
                            continue
                        self.flushing.discard(connection)
                        connection.flush()
                    except Exception:
                        log.exception("a connection failed to flush")
        finally:
            self.ending = False

    cpdef take_later(self):
        """Marks the dispatchers that mark_later() put aside. The caller then calls end()."""
        self.dispatchers += self.later
        self.later = []
