"""Log settings that are changed through one front end hold in all of them, and in those that start later."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.test_front_ends import COUNT, clients_of_both, pids
from tests.support.raw_http2 import RawClient
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

PINGS = (b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)) * 1000  # more than a client may send


def logged(server: ServerProcess, pid: int) -> list[str]:
    """What that front end has logged of connections that ended by too many pings."""
    return re.findall(rf"^.* {pid} .*connection from .* ended: .*$", server.log(), re.M)


def provoke(server: ServerProcess, pid: int, others: Iterable[int]) -> None:
    """Ends a connection to that front end by too many pings, which it logs as a detail."""
    for other in others:
        os.kill(other, signal.SIGSTOP)  # so that the connection is not theirs
    try:
        with RawClient(server.grpc) as client:
            client.send(PINGS)
            client.until_closed()
    finally:
        for other in others:
            os.kill(other, signal.SIGCONT)


def change(client: Any, **settings: Any) -> None:
    assert client.request("POST", "/v2/logging", json.dumps(settings).encode()).status == 200


@pytest.mark.slow
def test_what_one_changes_holds_in_all(tmp_path: Path) -> None:
    write_model(tmp_path, "echo", identity_config(dims="-1", pairs=1))
    with ServerProcess(tmp_path, f"--frontends={COUNT}") as server:
        found = clients_of_both(server)
        (first, client), (second, other) = found.items()

        def both() -> list[int]:
            provoke(server, first, [second])
            provoke(server, second, [first])
            return [len(logged(server, pid)) for pid in (first, second)]

        assert both() == [0, 0]
        change(client, log_verbose_level=1)
        both()
        until(lambda: all(logged(server, pid) for pid in found), lambda: server.log())
        change(other, log_verbose_level=0)
        both()
        change(client, log_verbose_level=1, log_format="ISO8601")
        both()
        until(lambda: all(len(logged(server, pid)) > 1 for pid in found), "they say it again")
        for pid in found:  # nothing was said meanwhile, and the format is theirs, too
            old, new = logged(server, pid)
            assert not re.match(r"\d{4}-\d\d-\d\dT", old) and re.match(r"\d{4}-\d\d-\d\dT", new)
        os.kill(first, signal.SIGKILL)
        until(lambda: len(set(pids(server)) - {first}) == COUNT, "another has started")
        (third,) = set(pids(server)) - {first, second}
        provoke(server, third, [second])
        until(lambda: logged(server, third), "it knows of the settings")
        for each in found.values():
            each.close()
