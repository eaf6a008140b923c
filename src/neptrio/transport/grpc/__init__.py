"""gRPC: calls, messages and their handlers over the HTTP/2 session."""
