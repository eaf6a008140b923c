"""The compiled half of a socket writer (neptrio/loop/socket_writer.py): the system calls.

All connections receive into one buffer, so an idle connection costs none. Whoever is given received bytes
copies what it keeps before it returns: the next receive() writes over them.

The GIL is kept over a small send: it takes as long as giving the GIL up and getting it back, and
a model's thread that takes it in between may keep it for a whole switch interval.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from libc.errno cimport EAGAIN, EINTR, errno
from libc.string cimport memset

import os
from collections import deque

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

cdef enum:
    RECEIVE = 256 << 10     # bytes of one recv
    CONGESTED = 1 << 20     # above this, callers should hold their output back
    AT_ONCE = 128           # buffers of one sendmsg
    KEEP_GIL = 64 << 10     # bytes up to which a send is over sooner than a switch of threads

CONGESTED_BYTES = CONGESTED
RECEIVE_BYTES = RECEIVE
cdef bytearray _memory = bytearray(RECEIVE)
cdef char* _buffer = _memory
BUFFER = _memory
VIEW = memoryview(_memory)    # while there is a view, the memory stays where it is


cdef const char* received_bytes() noexcept:
    return _buffer


cdef ssize_t receive(int fd) except -2:
    """Reads once into BUFFER. Raises OSError for a connection that is broken."""
    cdef ssize_t n = recv(fd, _buffer, RECEIVE, 0)
    if n < 0 and errno not in (EAGAIN, EINTR):
        raise OSError(errno, os.strerror(errno))
    return n


cdef class SocketWriterCore:
    """Sends what the kernel takes at once; the subclass's task sends the rest."""

    def __init__(self, sock):
        self.sock = sock
        self.fd = sock.fileno()
        self.queue = deque()

    def write_later(self):
        """Has the rest sent when there is room."""
        raise NotImplementedError(f"{type(self).__name__}.write_later")

    cdef bint congested_now(self) noexcept:
        return self.pending > CONGESTED

    @property
    def congested(self) -> bool:
        """True while the peer does not keep up."""
        return self.pending > CONGESTED

    cpdef send(self, list buffers):
        """Sends the buffers in order, now or as soon as the peer takes them."""
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

    cdef ssize_t try_send(self, list buffers, Py_ssize_t* total) except? -2:
        """Bytes sent; -1 when the writer is broken. `total` becomes the bytes of all buffers; where they
        are too many for one call, it is only known to be more than were sent."""
        cdef iovec[AT_ONCE] parts
        cdef Py_buffer[AT_ONCE] held
        cdef msghdr message
        cdef Py_ssize_t i, taken = 0, n = 0
        cdef ssize_t sent
        cdef int flags = MSG_NOSIGNAL
        cdef const char* text
        if len(buffers) == 1 and PyBytes_CheckExact(buffers[0]):
            data = buffers[0]
            total[0] = n = PyBytes_GET_SIZE(data)
            text = PyBytes_AS_STRING(data)
            if n <= KEEP_GIL:
                sent = send(self.fd, text, n, flags)
            else:
                with nogil:
                    sent = send(self.fd, text, n, flags)
        else:
            try:
                for data in buffers:
                    if taken == AT_ONCE:
                        break
                    PyObject_GetBuffer(data, &held[taken], PyBUF_SIMPLE)
                    parts[taken].iov_base = held[taken].buf
                    parts[taken].iov_len = held[taken].len
                    n += held[taken].len
                    taken += 1
                memset(&message, 0, sizeof(message))
                message.msg_iov = parts
                message.msg_iovlen = taken
                if n <= KEEP_GIL:
                    sent = sendmsg(self.fd, &message, flags)
                else:
                    with nogil:
                        sent = sendmsg(self.fd, &message, flags)
                total[0] = n + (len(buffers) > taken)
            finally:
                for i in range(taken):
                    PyBuffer_Release(&held[i])
        if sent < 0:
            return 0 if errno in (EAGAIN, EINTR) else -1
        return sent

    cpdef append(self, list buffers):
        """Keeps the buffers for when there is room."""
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            if len(view):
                self.queue.append(view)
                self.pending += len(view)

    cpdef drop(self, Py_ssize_t sent):
        """Forgets the first bytes of what was kept: the kernel has them."""
        self.pending -= sent
        while sent > 0:
            first = self.queue[0]
            if len(first) <= sent:
                sent -= len(first)
                self.queue.popleft()
            else:
                self.queue[0] = first[sent:]
                sent = 0

    cpdef fail(self):
        """The peer is gone: pending output is dropped."""
        self.broken = True
        self.fd = -1     # the number may soon be another connection's
        self.queue.clear()
        self.pending = 0
