"""The event loop's helpers: sockets without a task each, timers, work done once per pass, other threads."""
