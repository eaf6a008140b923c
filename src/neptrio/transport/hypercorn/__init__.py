"""The REST port on hypercorn: TLS, HTTP/2 and what the lean front leaves to it."""
