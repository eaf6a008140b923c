"""A front end that writes what cannot be into the memory it shares with the engine costs its own connections, no others."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from neptrio.frontend.channel import Layout
from neptrio.frontend.front import AREA
from tests.frontend.test_front_ends import COUNT, clients_of_both, infer_body, pids
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until


def shared_memory(pid: int) -> int:
    """The memory that a front end shares with the engine, opened once more."""
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(each).startswith("/memfd:neptrio-front"):
                return os.open(each, os.O_RDWR)
        except FileNotFoundError:
            continue  # it was closed meanwhile
    raise AssertionError("it has none")


@pytest.mark.slow
def test_an_index_that_cannot_be(tmp_path: Path) -> None:
    """Of what it has taken, which the engine looks at whenever it has sent something."""
    write_model(tmp_path, "echo", identity_config(dims="-1", pairs=1))
    with ServerProcess(tmp_path, f"--frontends={COUNT}", failures="is killed") as server:
        found = clients_of_both(server)
        (victim, client), (_, other) = found.items()
        for each in (client, other):
            assert each.request("POST", "/v2/models/echo/infer", infer_body([1])).status == 200
        memory = shared_memory(victim)
        os.pwrite(memory, struct.pack("<Q", 2**63), Layout(AREA).to_front + 64)
        os.close(memory)
        server.until_logged("is killed: its index of a ring cannot be")
        until(lambda: len(set(pids(server)) - {victim}) == COUNT, "another has started")
        assert other.request("POST", "/v2/models/echo/infer", infer_body([1])).status == 200
        for each in found.values():
            each.close()
