# The types of cext/codec/number_text.pyx, which says what everything does; written by tools/make_stubs.py.

