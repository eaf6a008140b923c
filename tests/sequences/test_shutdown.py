"""A server that exits lets running sequences end (docs/protocol/rules.md E1.17)."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from tests.sequences.models import Caller, Stream, rest, sequence_config
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

REFUSED = "Server is stopping, scheduler for model has stopped accepting new inference requests"
HOUR_US = 3_600_000_000


@pytest.mark.parametrize("protocol", ["stream", "http", "grpc"])
def test_running_sequences_go_on_and_new_ones_are_refused(tmp_path: Path, protocol: str) -> None:
    write_model(tmp_path, "m", sequence_config("direct { }", 4, idle_us=HOUR_US))
    server = ServerProcess(tmp_path)
    with Stream(server) as stream, Caller(server, "http" if protocol == "http" else "grpc") as call:

        def send(sequence: int, text: str) -> int:
            if protocol != "stream":
                return int(call("m", sequence, text, 1)["OUTPUT"])
            stream.send("m", sequence, text, 1)
            return int(stream.receive()["OUTPUT"])

        assert send(1, "s") == 1
        server.process.send_signal(signal.SIGTERM)
        until(lambda: rest(server, "GET", "/v2/health/ready")[0] == 400)
        for total in range(2, 12):
            assert send(1, "") == total
            with pytest.raises(InferenceServerException) as info:
                send(2, "s")
            assert info.value.message() == REFUSED
            if protocol != "stream":  # its errors have no status
                assert info.value.status() in ("503", "StatusCode.UNAVAILABLE")
        assert send(1, "e") == 12
    assert server.ended() == 0


def test_idle_time_ends_what_its_client_does_not(tmp_path: Path) -> None:
    """The exit timeout is an hour: only the idle time can have let the server go."""
    write_model(tmp_path, "m", sequence_config("oldest { }", 4, idle_us=300_000))
    server = ServerProcess(tmp_path, "--exit-timeout-secs=3600")
    with Stream(server) as stream:
        stream.send("m", 1, "s", 1)
        stream.receive()
        assert server.stop() == 0


@pytest.mark.slow
def test_the_exit_timeout_ends_what_idles_for_longer(tmp_path: Path) -> None:
    write_model(tmp_path, "m", sequence_config("direct { }", 4, idle_us=HOUR_US))
    server = ServerProcess(tmp_path, "--exit-timeout-secs=8")
    with Stream(server) as stream:
        stream.send("m", 1, "s", 1)
        stream.receive()
        assert server.stop() == 0


def test_sequences_that_nobody_can_continue_hold_nothing_up(tmp_path: Path) -> None:
    """No client is connected, idle time and exit timeout are an hour."""
    write_model(tmp_path, "m", sequence_config("direct { }", 4, idle_us=HOUR_US))
    server = ServerProcess(tmp_path, "--exit-timeout-secs=3600")
    with Stream(server) as stream:
        stream.send("m", 1, "s", 1)
        stream.receive()
    assert server.stop() == 0


def test_what_waits_for_company_is_sent(tmp_path: Path) -> None:
    for name, strategy in {
        "direct": f"direct {{ max_queue_delay_microseconds: {HOUR_US} minimum_slot_utilization: 1.0 }}",
        "oldest": f"oldest {{ max_queue_delay_microseconds: {HOUR_US} preferred_batch_size: [ 4 ] }}",
    }.items():
        write_model(tmp_path, name, sequence_config(strategy, 4, idle_us=HOUR_US))
    server = ServerProcess(tmp_path)
    with Stream(server) as stream:
        for name in ("direct", "oldest"):
            stream.send(name, 1, "se", 7)
            until(lambda name=name: rest(server, "GET", f"/v2/models/{name}/sequences")[1]["slots_used"])
        server.process.send_signal(signal.SIGTERM)
        assert [stream.receive()["OUTPUT"] for _ in range(2)] == [7, 7]
    assert server.ended() == 0
