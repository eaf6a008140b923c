"""Backends: they load models' files and execute batches."""
