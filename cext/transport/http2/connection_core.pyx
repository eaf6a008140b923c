"""The compiled part of an HTTP/2 connection, of gRPC or REST: its bytes in and out.

The rules are those of neptrio/transport/http2/connection.py, which has everything that is rare: beginnings and ends, timers,
limits on whole connections.
"""
from cpython.buffer cimport PyBUF_READ
from cpython.memoryview cimport PyMemoryView_FromMemory

from neptrio.loop.loop_pass_core cimport LoopPassCore
from neptrio.loop.socket_writer_core cimport RECEIVE, receive, receive_at, received_view
from neptrio.request.infer_request cimport now_ns
from neptrio.transport.connection cimport Connection
from neptrio.transport.http2.stream cimport Account, Stream, Totals

import logging
from collections import deque

from neptrio.errors import Code, TritonError

log = logging.getLogger("neptrio.http2")

cdef enum:
    HELD = 32 << 20      # bytes of answers not yet sent; above this, further requests of the connection are parked
    RECEIVE_SMALL = 64 << 10   # most bytes of requests received at once: some hundreds of small ones
    RECEIVE_LARGE = 1 << 20    # most bytes of one large message received before others are served
    AT_ITS_PLACE = 16 << 10    # fewer bytes of it are received into the shared buffer, with what follows, and copied
    LARGE_FRAME = 64 << 10     # a peer that sends smaller frames has several of them received at once, and copied
    BEHIND = 16 << 10          # most bytes received behind those: the next frame's head, small requests


cdef class Http2Core(Connection):
    """The part of a connection through which all bytes pass."""

    def __init__(self, wire, services):
        # type: (..., Services) -> None
        Connection.__init__(self, wire, services)
        self.source_of = services.admission.body_source
        self.compression = services.settings.grpc_infer_response_compression_level
        self.parked = deque()
        self.totals = Totals()      # a connection has its server's
        self.received_at = now_ns()

    # ------------------------------------------------------------ hooks: the rest of the connection

    def close(self):
        """Ends the connection now."""
        raise NotImplementedError

    def finish_drain(self):
        """The client has seen the first GOAWAY of a drain: sends the second."""
        raise NotImplementedError

    def park(self, Stream stream):
        """Keeps a complete request back until the client has read some of its answers."""
        raise NotImplementedError

    def unpark(self):
        """Starts what was parked, as far as there is room."""
        raise NotImplementedError

    def shed(self):
        """Called when incomplete requests of all connections hold too many bytes."""

    # ------------------------------------------------------------ input

    def take(self):
        # type: () -> bool
        """Receives what the socket has, within bounds; returns False when nothing more is to be read.

        It looks again at once only in the middle of a large message, and only after a call that got all it asked for:
        many small requests are work for some milliseconds, a MiB of one message for a fraction of one.
        """
        cdef Account account = self.account
        cdef Py_ssize_t asked = 0, room = RECEIVE_LARGE
        cdef ssize_t n
        if account is None:
            account = self.account = self.session.account
        if self.secure is not None:
            return self.take_secure()
        while True:
            n = self.receive_some(account, room, &asked)
            if n <= 0:
                return n < 0
            room -= n
            if n < asked or room <= 0 or account.filling is None or self.session.dead:
                return not self.session.dead and not self.writer.broken

    cdef bint take_secure(self) except -1:
        """take() with TLS: passes on what one read of the socket has brought."""
        cdef ssize_t n
        while True:
            n = self.secure.receive()
            if n <= 0:
                return n < 0
            self.feed(received_view()[:n])
            if self.session.dead or self.writer.broken:
                return False
            if not self.secure.more:
                return True

    cdef ssize_t receive_some(self, Account account, Py_ssize_t room, Py_ssize_t* asked) except -2:
        """Receives once and passes it on; returns like receive(). `asked` becomes how much there was room for."""
        cdef Stream stream = account.filling
        cdef char* place
        cdef ssize_t n
        cdef Py_ssize_t size = 0
        if stream is None:
            asked[0] = RECEIVE_SMALL
        else:
            place = stream.place(&size)
            size = min(size, min(account.frame_left, room))
            if place != NULL and size >= AT_ITS_PLACE:
                message = stream.message    # whatever becomes of the stream, its memory stays while this runs
                asked[0] = size + BEHIND
                n = receive_at(self.fd, place, size, BEHIND)
                if n > 0:
                    account.placed += min(n, size)
                    self.feed(PyMemoryView_FromMemory(place, min(n, size), PyBUF_READ))
                if n > size:
                    self.feed(received_view()[:n - size])
                return n
            # the rest of a large frame, so that the next one, of which the head tells the size, can be placed
            asked[0] = RECEIVE if account.frame_size < LARGE_FRAME else min(account.frame_left + BEHIND, RECEIVE)
        n = receive(self.fd, asked[0])
        if n > 0:
            self.feed(received_view()[:n])
        return n

    cpdef feed(self, data):
        # type: (Buffer) -> None
        """Passes bytes from the peer to the session."""
        session = self.session
        self.received_at = now_ns()
        session.receive(data, self.received_at)
        if self.totals.in_bytes > self.input_limit:
            self.shed()
        if self.draining and session.pings_acked > self.drain_acked:
            self.finish_drain()
        LoopPassCore.want_flush(self.loop_pass, self)
        if session.dead and session.failure is not None:
            log.debug("connection from %s ended: %s", self.wire.client, session.failure)

    # ------------------------------------------------------------ output

    cpdef want_flush(self):
        """There is output: has it sent at the end of the loop pass."""
        LoopPassCore.want_flush(self.loop_pass, self)

    @property
    def held_bytes(self) -> int:
        """Bytes that the connection holds: of requests, from when there was room for them until they are answered, of the
        headers of open streams, and of answers until the kernel has them."""
        cdef Account account = self.session.account
        return (account.in_bytes + account.coming + account.served_bytes + account.heads + account.out_bytes + account.held
                + self.writer.pending)

    @property
    def overfull(self) -> bool:
        """True while more bytes of replies wait for the client than a connection may hold."""
        cdef Account account = self.session.account
        return account.out_bytes + self.writer.pending > HELD

    cpdef object unread(self):
        # type: () -> TritonError | None
        """The error to send instead of an answer, None if there is room for the answer. There is none when all clients
        together leave too many bytes unread, and this one leaves more than a connection may hold."""
        cdef Account account
        if self.totals.out_bytes <= self.output_limit:
            return None
        account = self.session.account
        if account.out_bytes + account.held + self.writer.pending <= HELD:
            return None
        return TritonError(
            f"the client does not read its answers: {account.out_bytes + account.held} bytes wait for it, and more "
            f"than {self.output_limit} for all clients; read them, and send the request again",
            Code.RESOURCE_EXHAUSTED)

    def flush(self):
        """Sends the session's output, unless too much is pending already."""
        session = self.session
        writer = self.writer
        while session.wants_output and not writer.congested:
            writer.send(session.data_to_send())
        if self.parked and not self.overfull:
            self.unpark()
            LoopPassCore.want_flush(self.loop_pass, self)
        elif session.finished and not writer.pending:
            self.close()
