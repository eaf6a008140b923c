# The types of cext/service/held_core.pyx, which says what everything does.

class HeldCore:
    full: bool
