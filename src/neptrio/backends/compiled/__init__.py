"""Triton's compiled backends, libtriton_NAME.so, each in the processes of its models (docs/compiled-backends.md)."""
