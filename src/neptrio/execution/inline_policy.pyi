# The types of cext/execution/inline_policy.pyx, which says what everything does.

LIMIT: float

def mean(before: float, took: int) -> float: ...
