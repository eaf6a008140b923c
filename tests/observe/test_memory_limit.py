"""The memory that a process may have, from control groups of both versions as containers see them."""

from __future__ import annotations

from pathlib import Path

import pytest

from neptrio.observe import memory_limit
from neptrio.service import held_bytes, system_shared_memory
from neptrio.transport.grpc import server as grpc_server

GIB = 1 << 30


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"memory.max": f"{GIB}\n"}, GIB),
        ("0::/\n", {"memory.max": "max\n"}, 64 * GIB),
        ("0::/\n", {}, 64 * GIB),
        # the smallest limit on the way up
        (
            "0::/pods/one\n",
            {"pods/one/memory.max": "max\n", "pods/memory.max": f"{2 * GIB}\n", "memory.max": f"{4 * GIB}\n"},
            2 * GIB,
        ),
        # the first version; its number for no limit is larger than any machine
        ("5:cpu,memory:/\n0::/\n", {"memory/memory.limit_in_bytes": f"{3 * GIB}\n"}, 3 * GIB),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 64 * GIB),
        # the path of the machine, of which the container sees the end as its top
        ("4:memory:/kubepods/pod1/abc\n", {"memory/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        ("4:pids:/x\n", {"memory/memory.limit_in_bytes": "1\n"}, 64 * GIB),
    ],
)
def test_the_smallest_limit_counts(
    cgroup: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limit, "physical", lambda: 64 * GIB)
    assert memory_limit.memory_limit(machine(tmp_path, cgroup, files)) == expected


def test_without_control_groups_it_is_the_machine(tmp_path: Path) -> None:
    assert memory_limit.memory_limit(tmp_path) == memory_limit.physical() > 0
    assert 0 < memory_limit.memory_limit() <= memory_limit.physical()


def test_limits_of_the_server_are_shares_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were shares of the machine: a container of 512 MiB let clients bring 32 GiB."""
    monkeypatch.setattr(memory_limit, "physical", lambda: 64 * GIB)
    defaults = (
        held_bytes.default_limit,
        system_shared_memory.default_input_limit,
        grpc_server.default_input_limit,
    )
    monkeypatch.setattr(memory_limit, "memory_limit", lambda: GIB // 2)
    assert [default() for default in defaults] == [GIB // 4] * 3
    monkeypatch.setattr(memory_limit, "memory_limit", lambda: 64 * GIB)
    assert [default() for default in defaults] == [32 * GIB] * 3
    monkeypatch.setattr(memory_limit, "physical", lambda: GIB)
    monkeypatch.setattr(memory_limit, "memory_limit", lambda: GIB)
    assert [default() for default in defaults] == [GIB, GIB // 2, 5 * GIB // 2]
