# The types of cext/observe/file_sink.pyx, which says what everything does; written by tools/make_stubs.py.

