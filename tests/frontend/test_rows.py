"""One server with a row for each front end: metrics, statistics and `neptrio top`."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

from tests.commands.test_top import top
from tests.frontend.test_front_ends import COUNT, clients_of_both, infer_body, pids
from tests.support.metrics import scrape, value
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until


def told(server: ServerProcess) -> dict[int, dict[str, Any]]:
    """The rows of the statistics, by process."""
    with urllib.request.urlopen(f"http://{server.http}/v2/models/stats?live=true") as answer:
        return {row["pid"]: row for row in json.loads(answer.read())["front_ends"]}


def test_each_front_end_has_a_row(tmp_path: Path) -> None:
    write_model(tmp_path, "echo", identity_config(dims="-1", pairs=1))
    with ServerProcess(tmp_path, f"--frontends={COUNT}") as server:
        found = clients_of_both(server)
        for _ in range(5):
            for client in found.values():
                assert client.request("POST", "/v2/models/echo/infer", infer_body([1])).status == 200
        until(lambda: all(row["requests"] >= 6 for row in told(server).values()), "they have told of it")
        rows = told(server)
        assert set(rows) == set(found) == set(pids(server))
        for row in rows.values():
            assert row["connections"] >= 1
            assert row["resident_bytes"] > 1e6
            assert row["restarts"] == 0
            assert row["loop_lag"]["count"] > 0
            assert row["loop_lag"]["cumulative"][-1][1] <= row["loop_lag"]["count"]
            labels = {"front_end": str(row["number"])}
            text = scrape(server)
            assert value(text, "neptrio_front_end_process_id", **labels) == row["pid"]
            assert value(text, "neptrio_front_end_connections", **labels) >= 1
            assert value(text, "neptrio_front_end_requests_total", **labels) >= row["requests"]
            assert (
                value(text, "neptrio_front_end_loop_lag_seconds_count", **labels) >= row["loop_lag"]["count"]
            )
            assert value(text, "neptrio_front_end_resident_bytes", **labels) > 1e6
        shown = top(server.http, "--once", "--interval=0.1")
        assert shown.returncode == 0, shown.stderr
        lines = shown.stdout.splitlines()
        at = lines.index("front ends:")
        for line, row in zip(
            lines[at + 1 :], sorted(rows.values(), key=lambda row: row["number"]), strict=False
        ):
            assert line.startswith(f"  {row['number']}: pid {row['pid']}, ")
            assert "0 restarts" in line
        victim = next(iter(found))
        number = rows[victim]["number"]
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(set(pids(server)) - {victim}) == COUNT, "another has started")
        until(
            lambda: [row["restarts"] for row in told(server).values() if row["number"] == number] == [1],
            "it is counted",
        )
        for client in found.values():
            client.close()


def test_no_rows_without_front_ends(tmp_path: Path) -> None:
    write_model(tmp_path, "echo", identity_config(dims="-1", pairs=1))
    with ServerProcess(tmp_path, "--frontends=0") as server:
        with urllib.request.urlopen(f"http://{server.http}/v2/models/stats?live=true") as answer:
            assert "front_ends" not in json.loads(answer.read())
        assert "neptrio_front_end" not in scrape(server)
