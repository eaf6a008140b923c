"""Schedulers: they decide which requests execute next, and which share a batch. No I/O; time is an argument."""
