# The types of cext/execution/inline_policy.pyx, which says what everything does; written by tools/make_stubs.py.

LIMIT: float

def mean(before: float, took: int) -> float: ...
