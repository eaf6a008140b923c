# The types of cext/backends/kernel/cuda_graph.pyx, which says what everything does; written by tools/make_stubs.py.

