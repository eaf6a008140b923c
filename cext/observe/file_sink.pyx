"""Writes many texts to a file with few system calls, and offers the core between them.

The problem: a trace file grows by hundreds of texts of some kilobytes at a time. A call for each kept the core for up to
5 ms in all, and whoever was woken there meanwhile, the server's loop among them, waited for all of it. The choice: texts are
collected up to AT_ONCE bytes and written by one call, and the core is offered behind every OFFER_BYTES (loop/yielding).

Rules:
 1. Texts are written in the order in which they were put.
 2. After an error nothing more is written, and flush_sink() tells it.
"""
from libc.errno cimport EINTR, errno

from neptrio.request.sched cimport sched_yield

cdef extern from "<sys/uio.h>" nogil:
    ssize_t writev(int fd, const iovec* parts, int count)

cdef enum:
    AT_ONCE = 65536         # bytes written by one call: 20 to 40 microseconds
    OFFER_BYTES = 32768     # bytes behind which the core is offered


cdef void open_sink(Sink* sink, int fd) noexcept nogil:
    sink.fd = fd
    sink.failed = sink.count = 0
    sink.size = sink.unoffered = 0


cdef void put_text(Sink* sink, const char* text, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t taken
    while size and not sink.failed:
        if sink.count == SINK_PARTS or sink.size == AT_ONCE:
            flush_sink(sink)
            continue
        taken = min(size, AT_ONCE - sink.size)
        sink.parts[sink.count].iov_base = <void*>text
        sink.parts[sink.count].iov_len = taken
        sink.count += 1
        sink.size += taken
        text += taken
        size -= taken


cdef int flush_sink(Sink* sink) noexcept nogil:
    cdef iovec* part = sink.parts
    cdef iovec* end = sink.parts + sink.count
    cdef ssize_t done
    while part < end and not sink.failed:
        done = writev(sink.fd, part, <int>(end - part))
        if done < 0:
            if errno != EINTR:
                sink.failed = errno
            continue
        sink.unoffered += done
        while part < end and <size_t>done >= part.iov_len:
            done -= part.iov_len
            part += 1
        if done:
            part.iov_base = <char*>part.iov_base + done
            part.iov_len -= done
        if sink.unoffered >= OFFER_BYTES:
            sink.unoffered = 0
            sched_yield()
    sink.count = 0
    sink.size = 0
    return sink.failed
