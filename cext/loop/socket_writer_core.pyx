"""The compiled part of a socket writer (neptrio/loop/socket_writer.py): the system calls.

All connections of a thread receive into one buffer, so an idle connection needs none. Whoever is given received bytes must
copy what it keeps before it returns, because the next receive() overwrites them. Each thread has its own, since servers in
one process run on threads of their own, and Python code that reads from the buffer lets the others run.

The GIL is kept during a small send: sending takes no longer than giving up the GIL and getting it back, and a model's
thread that gets it in between may keep it for a whole switch interval.

Who receives a large body has the next part of it to receive at once, for milliseconds in all. The system takes the core
away at its next tick only, up to 4 ms later, also where a process waits for it that would need it for microseconds.
So the core is offered behind each large part.

A large answer is given to the kernel in portions. Behind each one the sockets are looked at, which takes a microsecond: when
somebody waits for the loop, the rest follows in a later pass of it.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport int64_t
from libc.errno cimport EAGAIN, EINTR, errno
from libc.string cimport memset

from neptrio.request.sched cimport sched_yield

import os
import threading
from collections import deque

cdef extern from *:
    """
    static __thread char* neptrio_received = NULL;
    static __thread PyObject* neptrio_received_view = NULL;
    """
    # of the thread that looks: borrowed from its ReceiveBuffer, NULL before there is one
    char* neptrio_received
    PyObject* neptrio_received_view

cdef extern from *:
    """
    #include <sys/socket.h>
    #ifndef MSG_NOSIGNAL
    #define MSG_NOSIGNAL 0  /* the interpreter ignores SIGPIPE */
    #endif
    """

cdef extern from "<sys/socket.h>" nogil:
    struct iovec:
        void* iov_base
        size_t iov_len
    struct msghdr:
        iovec* msg_iov
        size_t msg_iovlen
    int MSG_NOSIGNAL
    ssize_t recv(int fd, void* data, size_t n, int flags)
    ssize_t send(int fd, const void* data, size_t n, int flags)
    ssize_t sendmsg(int fd, const msghdr* message, int flags)
    ssize_t recvmsg(int fd, msghdr* message, int flags)

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
    int poll(pollfd* fds, unsigned long n, int timeout)
    short POLLIN

cdef enum:
    CONGESTED = 1 << 20     # pending bytes; above this, callers should not produce more output
    AT_ONCE = 128           # most buffers in one sendmsg call
    SEND = 1 << 20          # most bytes given to the kernel in one pass of the loop
    PORTION = 256 << 10     # most bytes given to it by one call: copying them takes 50 to 150 microseconds
    LAST = 64 << 10         # so many more if they are the last: a call of their own costs more than copying them
    KEEP_GIL = 64 << 10     # bytes; sending fewer takes less time than switching threads
    LARGE = 128 << 10       # bytes received by one call: 25 to 100 microseconds, many times what offering the core takes

CONGESTED_BYTES = CONGESTED
RECEIVE_BYTES = RECEIVE
_threads = threading.local()


cdef class ReceiveBuffer:
    """The memory that a thread's connections receive into; it ends with the thread."""
    cdef bytearray memory
    cdef object view     # while it exists, the bytearray cannot move its memory
    cdef char* at

    def __init__(self):
        self.memory = bytearray(RECEIVE)
        self.view = memoryview(self.memory)
        self.at = self.memory

    def __dealloc__(self):
        global neptrio_received, neptrio_received_view
        if self.at == neptrio_received:  # a thread of another language may come back to Python later
            neptrio_received = NULL
            neptrio_received_view = NULL


cdef int _make_buffer() except -1:
    global neptrio_received, neptrio_received_view
    cdef ReceiveBuffer made = ReceiveBuffer()
    _threads.buffer = made
    neptrio_received = made.at
    neptrio_received_view = <PyObject*>made.view
    return 0


cdef char* received_bytes() except NULL:
    if neptrio_received == NULL:
        _make_buffer()
    return neptrio_received


cpdef object received_view():
    # type: () -> memoryview
    """The memory into which the calling thread's connections receive, RECEIVE_BYTES of it."""
    if neptrio_received == NULL:
        _make_buffer()
    return <object>neptrio_received_view


cdef ssize_t receive(int fd, size_t most) except -2:
    """Reads once into the thread's buffer, at most RECEIVE bytes. Raises OSError when the connection is broken."""
    cdef ssize_t n = recv(fd, received_bytes(), most, 0)
    if n < 0 and errno not in (EAGAIN, EINTR):
        raise OSError(errno, os.strerror(errno))
    return n


cdef ssize_t receive_at(int fd, char* place, size_t size, size_t more) except -2:
    """Reads once: to `place` up to its end, only then into the thread's buffer. Raises OSError when the connection is broken."""
    cdef iovec[2] parts
    cdef msghdr message
    cdef ssize_t n
    parts[0].iov_base = place
    parts[0].iov_len = size
    parts[1].iov_base = received_bytes()
    parts[1].iov_len = more
    memset(&message, 0, sizeof(message))
    message.msg_iov = parts
    message.msg_iovlen = 2
    if size <= KEEP_GIL:
        n = recvmsg(fd, &message, 0)
    else:
        with nogil:
            n = recvmsg(fd, &message, 0)
            if n >= LARGE:
                sched_yield()
    if n < 0 and errno not in (EAGAIN, EINTR):
        raise OSError(errno, os.strerror(errno))
    return n


def receive_into(int fd, place not None):
    # type: (..., object) -> int
    """Reads once to a writable buffer; the bytes read, 0 at the end of input, -1 when there are none now. Raises OSError when
    the connection is broken."""
    cdef Py_buffer view
    PyObject_GetBuffer(place, &view, PyBUF_WRITABLE)
    try:
        return receive_at(fd, <char*>view.buf, <size_t>view.len, 0)
    finally:
        PyBuffer_Release(&view)


cdef Py_ssize_t too_much(Py_ssize_t n, Py_ssize_t last) noexcept nogil:
    """How many of `n` bytes one pass does not send, where the last buffer has `last` of them."""
    return 0 if n <= SEND + LAST else min(n - SEND, last)


cdef ssize_t push(int fd, iovec* parts, Py_ssize_t n, int look, bint* full) noexcept nogil:
    """Sends the first n bytes of the parts, less when the kernel takes no more (`full`) or, behind a portion, when `look`, a
    descriptor or -1, has something to read. Returns the bytes sent, or -1 with errno. Changes the parts."""
    cdef msghdr message
    cdef pollfd waits
    cdef ssize_t got, sent = 0
    cdef Py_ssize_t want, left, whole
    cdef iovec* last = parts
    memset(&message, 0, sizeof(message))
    waits.fd = look
    waits.events = POLLIN
    full[0] = False
    while True:
        want = left = PORTION if n - sent > PORTION + LAST else n - sent
        message.msg_iov = last
        message.msg_iovlen = 1
        while <Py_ssize_t>last.iov_len < left:
            left -= last.iov_len
            last += 1
            message.msg_iovlen += 1
        whole = last.iov_len
        last.iov_len = left
        got = sendmsg(fd, &message, MSG_NOSIGNAL)
        if got < 0:
            full[0] = True
            return sent if sent else -1    # an error comes again
        sent += got
        if got < want or sent == n:
            full[0] = got < want
            return sent
        if look >= 0 and poll(&waits, 1, 0) > 0:
            return sent
        last.iov_base = <char*>last.iov_base + left
        last.iov_len = whole - left


cdef class SocketWriterCore:
    """Sends as much as the kernel takes at once; the subclass's task sends the rest."""

    def __init__(self, sock, int look=-1):
        # type: (socket.socket, ...) -> None
        self.sock = sock
        self.fd = sock.fileno()
        self.look = look
        self.queue = deque()

    def write_later(self):
        """Has the pending bytes sent when the socket is writable again; implemented by the subclass."""
        raise NotImplementedError(f"{type(self).__name__}.write_later")

    cdef bint congested_now(self) noexcept:
        return self.pending > CONGESTED

    @property
    def congested(self) -> bool:
        """True when so much output is pending that callers should wait."""
        return self.pending > CONGESTED

    cpdef send(self, list buffers):
        """Sends the buffers in order, now as far as the kernel takes them, the rest later."""
        cdef ssize_t sent
        cdef Py_ssize_t total = 0
        if self.broken or not buffers:
            return
        if self.queue:
            self.append(buffers)
            return
        sent = self.try_send(buffers, &total)
        if sent < 0:
            self.fail()
        elif sent < total:
            self.append(buffers)
            self.drop(sent)
            self.write_later()

    cpdef ssize_t send_pending(self) except -2:
        """Sends pending bytes once; the bytes sent, -1 when the writer is broken. `full` tells whether to wait for room."""
        cdef Py_ssize_t total = 0
        cdef ssize_t sent = self.try_send(self.some(), &total)
        if sent > 0:
            self.drop(sent)
        return sent

    cdef ssize_t try_send(self, list buffers, Py_ssize_t* total) except? -2:
        """Sends once; returns the bytes sent, -1 when the writer is broken. `total` becomes the bytes of all buffers; with
        too many buffers or bytes for one call, only some number greater than the bytes sent."""
        cdef iovec[AT_ONCE] parts
        cdef Py_buffer[AT_ONCE] held
        cdef msghdr message
        cdef Py_ssize_t i, taken = 0, n = 0, beyond
        cdef ssize_t sent
        if len(buffers) == 1 and PyBytes_CheckExact(buffers[0]):
            data = buffers[0]
            total[0] = n = PyBytes_GET_SIZE(data)
            if n <= KEEP_GIL:
                sent = send(self.fd, PyBytes_AS_STRING(data), n, MSG_NOSIGNAL)
                self.full = sent < n
            else:
                parts[0].iov_base = PyBytes_AS_STRING(data)
                parts[0].iov_len = n
                with nogil:
                    sent = push(self.fd, parts, n - too_much(n, n), self.look, &self.full)
        else:
            try:
                for data in buffers:
                    if taken == AT_ONCE or n > SEND + LAST:
                        break
                    PyObject_GetBuffer(data, &held[taken], PyBUF_SIMPLE)
                    parts[taken].iov_base = held[taken].buf
                    parts[taken].iov_len = held[taken].len
                    n += held[taken].len
                    taken += 1
                if n <= KEEP_GIL:
                    memset(&message, 0, sizeof(message))
                    message.msg_iov = parts
                    message.msg_iovlen = taken
                    sent = sendmsg(self.fd, &message, MSG_NOSIGNAL)
                    self.full = sent < n
                else:
                    beyond = too_much(n, held[taken - 1].len)
                    with nogil:
                        sent = push(self.fd, parts, n - beyond, self.look, &self.full)
                total[0] = n + (len(buffers) > taken)
            finally:
                for i in range(taken):
                    PyBuffer_Release(&held[i])
        if sent < 0:
            return 0 if errno in (EAGAIN, EINTR) else -1
        return sent

    cpdef append(self, list buffers):
        """Keeps the buffers as pending."""
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            if len(view):
                self.queue.append(view)
                self.pending += len(view)

    def some(self) -> list:
        # type: () -> list[memoryview]
        """Pending buffers for one call."""
        cdef Py_ssize_t n = 0, beyond
        cdef list taken = []
        for buffer in self.queue:
            taken.append(buffer)
            n += len(buffer)
            if n > SEND + LAST or len(taken) == AT_ONCE:
                break
        beyond = too_much(n, len(buffer))
        if beyond:
            taken[len(taken) - 1] = buffer[:len(buffer) - beyond]
        return taken

    cpdef drop(self, Py_ssize_t sent):
        """Removes the first `sent` pending bytes: the kernel has taken them."""
        self.pending -= sent
        self.gone += sent
        while sent > 0:
            first = self.queue[0]
            if len(first) <= sent:
                sent -= len(first)
                self.queue.popleft()
            else:
                self.queue[0] = first[sent:]
                sent = 0
        if self.watchers is not None:
            self.tell_watchers()

    cpdef bint when_taken(self, object callback) except -1:
        # type: (Callable[[], None]) -> bool
        """Has callback() called once when the kernel has taken what is pending now, or the writer is broken. False: nothing
        is pending; it is not called."""
        if not self.pending or self.broken:
            return False
        if self.watchers is None:
            self.watchers = []
        self.watchers.append((self.gone + self.pending, callback))
        return True

    cdef int tell_watchers(self) except -1:
        cdef list watchers = self.watchers
        while watchers and (self.broken or <int64_t>watchers[0][0] <= self.gone):
            watchers.pop(0)[1]()
        if not watchers:
            self.watchers = None
        return 0

    cpdef fail(self):
        """Drops pending output: the peer is gone."""
        self.broken = True
        if self.watchers is not None:
            self.tell_watchers()
        self.fd = -1     # the number may soon belong to another connection
        self.queue.clear()
        self.pending = 0
