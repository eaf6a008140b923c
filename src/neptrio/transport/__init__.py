"""Sockets and protocols only: transports convert, services decide."""
