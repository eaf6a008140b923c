# The types of cext/service/held_core.pyx, which says what everything does; written by tools/make_stubs.py.

class HeldCore:
    full: bool
