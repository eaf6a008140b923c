"""Rings and slabs in shared memory: how processes hand each other requests and tensors."""
