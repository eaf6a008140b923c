"""Statistics, metrics and traces. They only observe: no request ever waits for them."""
