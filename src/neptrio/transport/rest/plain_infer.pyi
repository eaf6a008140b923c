# The types of cext/transport/rest/plain_infer.pyx, which says what everything does; written by tools/make_stubs.py.

