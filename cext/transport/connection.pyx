"""What HTTP/1.1 and HTTP/2 connections have in common: the wire, and what requests need of the server."""


cdef class Connection:
    """Base of the compiled parts of connections."""

    def __init__(self, wire, services):
        # type: (..., Services) -> None
        self.wire = wire
        self.sock = wire.sock
        self.fd = wire.sock.fileno()
        self.secure = wire.secure
        self.writer = wire.writer
        self.services = services
        self.access = services.access
        self.loop_pass = services.loop.loop_pass
        self.admission = services.admission
        self.shared_memory = services.shared_memory
        self.large_files = services.shared_memory.large
