# The types of cext/codec/json_strings.pyx, which says what everything does; written by tools/make_stubs.py.

