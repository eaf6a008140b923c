"""The flag of the budget of held bytes (neptrio/service/held_bytes.py) that every receive looks at.

An attribute of a Python object takes a hundred instructions to read, this one takes one.
"""


cdef class HeldCore:
    """See held_core.pxd; HeldBytes is the whole."""
