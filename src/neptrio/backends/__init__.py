"""Backends: how a model's files become something that executes batches."""
