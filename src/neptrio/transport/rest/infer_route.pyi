# The types of cext/transport/rest/infer_route.pyx, which says what everything does; written by tools/make_stubs.py.

