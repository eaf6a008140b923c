"""HTTP/2 sessions without I/O, over libnghttp2 or h2, and the gRPC streams in them."""
