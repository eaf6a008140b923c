"""Statistics, metrics, traces: they listen, and nothing on the path waits for them."""
