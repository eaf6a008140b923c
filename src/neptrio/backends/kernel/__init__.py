"""The kernel backend: a CUDA source file is a model (docs/kernels.md)."""
