"""Connections that stay on the machine are not paced, whatever congestion control the machine has chosen."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trio

from neptrio.transport import same_machine
from neptrio.transport.accept import Acceptor

AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
needs_bbr = pytest.mark.skipif(
    not AVAILABLE.exists() or "bbr" not in AVAILABLE.read_text().split(), reason="this kernel has no BBR"
)


@pytest.mark.parametrize(
    ("address", "own", "stays"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.2", "127.0.0.1", True),
        ("::1", "::1", True),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1", True),
        ("10.1.2.3", "10.1.2.3", True),
        ("::ffff:10.1.2.3", "::ffff:10.1.2.3", True),
        ("10.1.2.4", "10.1.2.3", False),
        ("2001:db8::2", "2001:db8::1", False),
        ("12.7.0.1", "12.7.0.2", False),
    ],
)
def test_which_connections_stay_on_the_machine(address: str, own: str, stays: bool) -> None:
    assert same_machine.stays(address, own) is stays


async def _accepted(chosen: str) -> str:
    """The congestion control of a connection that is accepted where the machine's choice is `chosen`."""
    found: list[str] = []
    done = trio.Event()

    def handle(sock: socket.socket, address: str) -> bool:
        assert address == "127.0.0.1"
        found.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode())
        sock.close()
        done.set()
        return True

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, chosen.encode())
    acceptor = Acceptor(listener, handle)
    with socket.create_connection(listener.getsockname()):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(acceptor.run)
            await done.wait()
            acceptor.stop()
    return found[0]


@needs_bbr
def test_a_connection_on_the_machine_is_not_paced() -> None:
    assert trio.run(_accepted, "bbr") == "reno"


@pytest.mark.skipif(
    not AVAILABLE.exists() or "cubic" not in AVAILABLE.read_text().split(), reason="this kernel has no CUBIC"
)
def test_the_choice_of_a_machine_that_does_not_pace_stays() -> None:
    assert trio.run(_accepted, "cubic") == "cubic"


def test_a_unix_socket_has_nothing_to_pace(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        assert not same_machine.paces(listener)
