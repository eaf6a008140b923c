"""What is freed stays with a process while it works, and goes back to the system when it rests."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from neptrio.loop.allocator import (
    BUSY_LOOKS,
    CALM_LOOKS,
    KEPT,
    LITTLE,
    MUCH,
    OWN_WISHES,
    FreeMemory,
    anonymous_resident_bytes,
)
from tests.support.memory import resident
from tests.support.repository import write_model
from tests.support.sanitizer import no_memory_figures
from tests.support.server import ServerProcess, without_front_ends
from tests.support.waiting import until

MIB = 1 << 20
glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is not glibc 2.33 or newer"
)


def test_memory_goes_back_when_no_large_work_comes() -> None:
    memory = FreeMemory(100 * MIB)
    for work in range(5):
        assert memory.look(200 * MIB, work) is None, "there is large work"
    found = [memory.look(200 * MIB, 4) for _ in range(CALM_LOOKS)]
    assert found == [None] * (CALM_LOOKS - 1) + [0]


def test_a_little_growth_is_not_worth_the_work() -> None:
    memory = FreeMemory(100 * MIB)
    for _ in range(3 * BUSY_LOOKS):
        assert memory.look(100 * MIB + LITTLE, 0) is None
    assert memory.look(100 * MIB + LITTLE + 1, 0) == 0


def test_what_was_given_back_is_not_given_back_again() -> None:
    memory = FreeMemory(100 * MIB)
    for _ in range(CALM_LOOKS):
        memory.look(300 * MIB, 0)
    assert memory.look(300 * MIB, 0) == 0
    memory.gave_back(250 * MIB)  # models were loaded meanwhile
    for _ in range(3 * BUSY_LOOKS):
        assert memory.look(250 * MIB, 0) is None


def test_beside_work_without_end_much_goes_back_now_and_then() -> None:
    memory = FreeMemory(100 * MIB)
    much = 100 * MIB + MUCH + 1
    found = [memory.look(much, work) for work in range(BUSY_LOOKS)]
    assert found == [None] * (BUSY_LOOKS - 1) + [KEPT]
    memory.gave_back(100 * MIB + KEPT)
    for work in range(BUSY_LOOKS, 4 * BUSY_LOOKS):
        assert memory.look(100 * MIB + MUCH, work) is None, "no more than it works with"


PROGRAM = """
import json, sys
import numpy as np
from neptrio.loop import allocator
allocator.set_up()
def use():
    for size in (2, 9, 30):
        blocks = [np.full(size << 20, 1, np.uint8), np.full(size << 20, 2, np.uint8)]
        del blocks
use()
before = allocator.anonymous_resident_bytes()
use()
used = allocator.anonymous_resident_bytes()
allocator.give_back(16 << 20)
kept = allocator.anonymous_resident_bytes()
allocator.give_back()
print(json.dumps([before, used, kept, allocator.anonymous_resident_bytes()]))
"""


def program(**environment: str) -> list[float]:
    """MiB: after some work, after the same again, all but 16 given back, all given back."""
    given = {name: value for name, value in os.environ.items() if name not in OWN_WISHES} | environment
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, env=given)
    return [size / MIB for size in json.loads(done.stdout)]


@glibc
@no_memory_figures
def test_what_is_freed_stays_until_it_is_given_back() -> None:
    before, used, kept, after = program()
    assert abs(used - before) < 4, "the same memory is used again"
    assert used - after > 45, "60 MiB were in use at once"
    assert 10 < kept - after < 20


@glibc
@no_memory_figures
@pytest.mark.parametrize("wish", OWN_WISHES)
def test_an_environment_that_has_wishes_is_respected(wish: str) -> None:
    value = "glibc.malloc.top_pad=131072" if wish == "GLIBC_TUNABLES" else "131072"
    _, used, _, after = program(**{wish: value})
    assert used - after < 45, "much of it went back when it was freed"


@glibc
@no_memory_figures
@without_front_ends  # which have that memory
def test_a_server_that_rests_has_given_back(tmp_path: Path) -> None:
    config = """backend: "identity" max_batch_size: 0
    input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
    output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]"""
    write_model(tmp_path, "m", config, {})
    values = np.arange(3 * MIB, dtype=np.float32)  # JSON of 24 MiB and more, tensors of 12
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [len(values)], "data": values.tolist()}
    body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    with ServerProcess(tmp_path) as server:
        before = resident(server.process.pid)
        connection = http.client.HTTPConnection(server.http)
        peak = 0
        for _ in range(4):
            connection.request("POST", "/v2/models/m/infer", body)
            response = connection.getresponse()
            assert response.status == 200 and len(response.read()) > 12 * MIB
            peak = max(peak, resident(server.process.pid))
        connection.close()
        assert peak - before > 40 * MIB, "what was freed is kept for the next request"
        until(lambda: peak - resident(server.process.pid) > 40 * MIB, "memory goes back")


def test_the_size_of_this_process_is_known() -> None:
    assert anonymous_resident_bytes() > 10 * MIB
