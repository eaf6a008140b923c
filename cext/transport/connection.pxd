# What HTTP/1.1 and HTTP/2 connections have in common. Trio thread only.
from neptrio.execution.admission cimport Admission
from neptrio.loop.loop_pass_core cimport LoopPassCore
from neptrio.loop.socket_writer_core cimport SocketWriterCore
from neptrio.request.file_part cimport LargeFiles

cdef class Connection:
    cdef readonly object wire          # transport.wire.Wire
    cdef readonly object sock  # type: socket.socket
    cdef object secure                 # transport.secure_socket.SecureSocket; None: there is no TLS
    cdef readonly object services  # type: Services
    cdef readonly SocketWriterCore writer
    cdef readonly LoopPassCore loop_pass
    cdef int fd
    cdef Admission admission
    cdef object shared_memory
    cdef public object access          # the access log (service.access_log); None: there is none  # type: AccessLog | None
    cdef LargeFiles large_files        # whether requests may name large parts of shared memory
