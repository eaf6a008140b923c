"""A region of shared memory of which a part takes longer to read than the loop reads itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import tritonclient.utils.shared_memory as shm

REGION = f"/neptrio_test_large_{os.getpid()}"  # its own in every process
COUNT = 1 << 19
LARGE = 4 * COUNT  # bytes, twice as many as the loop reads itself
VALUES = np.arange(COUNT, dtype=np.int32)


@contextmanager
def large_region() -> Iterator[None]:
    """The region, of 2 * LARGE bytes, which begins with VALUES."""
    handle = shm.create_shared_memory_region("region", REGION, 2 * LARGE)
    try:
        shm.set_shared_memory_region(handle, [VALUES])
        yield
    finally:
        shm.destroy_shared_memory_region(handle)
