"""What is freed goes back to the system when that is asked for, as after the unload of a model."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest

from neptrio.loop.allocator import anonymous_resident_bytes
from tests.support.sanitizer import no_memory_figures

MIB = 1 << 20
# a block that is in use at the end of the heap keeps what is free below it
PROGRAM = """
import ctypes, json
from neptrio.loop import allocator
allocator.set_up()
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
blocks = [c.malloc(65536) for _ in range(1600)]
for block in blocks:
    ctypes.memset(block, 1, 65536)
for block in blocks[:-1]:
    c.free(block)
freed = allocator.anonymous_resident_bytes()
allocator.give_back()
print(json.dumps([freed, allocator.anonymous_resident_bytes()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
@no_memory_figures
def test_holes_between_what_is_in_use_go_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    freed, left = json.loads(done.stdout)
    assert freed - left > 90 * MIB


def test_the_size_of_this_process_is_known() -> None:
    assert anonymous_resident_bytes() > 10 * MIB


WEIGHTS = """
import ctypes, json
from neptrio.loop import allocator
allocator.set_up()
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
c.free(c.malloc(24 << 20))  # from then on glibc takes as much from its heap, without more ado
def freed():
    blocks = [c.malloc(1 << 20) for _ in range(50)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 20)
    full = allocator.anonymous_resident_bytes()
    for block in blocks[:-1]:
        c.free(block)
    return full - allocator.anonymous_resident_bytes()
with allocator.mapping_weights():
    with allocator.mapping_weights():
        pass
    during = freed()
print(json.dumps([during, freed()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
@no_memory_figures
def test_large_blocks_of_loads_go_back_by_themselves() -> None:
    done = subprocess.run([sys.executable, "-c", WEIGHTS], capture_output=True, check=True)
    during, after = json.loads(done.stdout)
    assert during > 45 * MIB and after < 4 * MIB
