# Texts on their way to a file: see file_sink.pyx. The texts must stay where they are until flush_sink().
cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void* iov_base
        size_t iov_len

cdef enum:
    SINK_PARTS = 64

cdef struct Sink:
    int fd
    int failed                   # the number of the first error; nothing is written after it
    int count                    # of the parts
    Py_ssize_t size              # bytes of the parts
    Py_ssize_t unoffered         # bytes written since the core was offered
    iovec parts[SINK_PARTS]

cdef void open_sink(Sink* sink, int fd) noexcept nogil
cdef void put_text(Sink* sink, const char* text, Py_ssize_t size) noexcept nogil
cdef int flush_sink(Sink* sink) noexcept nogil   # returns 0, or the number of the error
