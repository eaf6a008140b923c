# The types of cext/codec/proto_contents.pyx, which says what everything does; written by tools/make_stubs.py.

