# The types of cext/backends/kernel/cuda_pipeline.pyx, which says what everything does; written by tools/make_stubs.py.

