"""Sockets and protocols. Transports only convert messages; services decide."""
