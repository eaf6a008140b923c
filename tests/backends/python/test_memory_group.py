"""The memory of a model's process is limited by a control group where the server was delegated one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio.backends.python.memory_group import MemoryGroup, parent
from tests.backends.python.models import config, python_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

LIMIT = 512 << 20
TAKES = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            count = int(request.inputs()[0].as_numpy()[0])
            made = np.ones(count, np.uint8)
            group = open("/proc/self/cgroup").read().strip().rpartition("/")[2]
            answers.append(pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", made[:1].astype(np.float32))], parameters={"group": group}))
        return answers
"""

real = pytest.mark.skipif(
    parent() is None,
    reason="no control group (version 2) with the memory controller was delegated to whoever runs the tests",
)


def files(root: Path, own: str, controllers: str, given: str) -> Path:
    """What the kernel shows of a process in the group `own`; returns the group above it."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"5:memory:/elsewhere\n0::{own}\n")
    group = root / "sys/fs/cgroup" / own.lstrip("/")
    group.mkdir(parents=True)
    (group.parent / "cgroup.controllers").write_text(controllers)
    (group.parent / "cgroup.subtree_control").write_text(given)
    (group.parent / "cgroup.procs").write_text("")
    return group.parent


def test_groups_are_made_beside_the_servers_own(tmp_path: Path) -> None:
    above = files(tmp_path, "/system.slice/neptrio.service/server", "cpu memory pids\n", "cpu memory\n")
    assert parent(tmp_path) == above
    made = MemoryGroup(above / "neptrio-1", LIMIT)
    assert (above / "neptrio-1" / "memory.max").read_text() == str(LIMIT)
    made.add(77)
    assert (above / "neptrio-1" / "cgroup.procs").read_text() == "77"
    assert not made.exceeded
    (made.path / "memory.events").write_text("low 0\nmax 12\noom 1\noom_kill 1\n")
    assert made.exceeded
    with pytest.raises(FileExistsError):
        MemoryGroup(above / "neptrio-1", LIMIT)


def test_the_memory_controller_is_given_on_where_it_was_not(tmp_path: Path) -> None:
    above = files(tmp_path, "/neptrio.service/server", "memory\n", "\n")
    assert parent(tmp_path) == above
    assert (above / "cgroup.subtree_control").read_text() == "+memory"


@pytest.mark.parametrize(
    ("own", "controllers"),
    [
        ("/", "memory"),  # a container's: what is around it is out of sight
        ("/../neighbour", "memory"),
        ("/neptrio.service/server", "cpu pids"),
    ],
)
def test_there_is_none(tmp_path: Path, own: str, controllers: str) -> None:
    files(tmp_path, own, controllers, controllers)
    assert parent(tmp_path) is None


def test_there_is_none_without_version_2(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    assert parent(tmp_path) is None
    (tmp_path / "proc/self/cgroup").write_text("5:memory:/elsewhere\n")
    assert parent(tmp_path) is None


@real
def test_a_process_that_takes_more_is_killed_and_says_why(tmp_path: Path) -> None:
    above = parent()
    assert above is not None
    before = {path.name for path in above.iterdir()}
    limit = f' parameters {{ key: "MEMORY_LIMIT_BYTES" value: {{ string_value: "{LIMIT}" }} }}'
    python_model(tmp_path, "takes", TAKES, config() + limit)
    with ServerProcess(tmp_path) as server, httpclient.InferenceServerClient(server.http) as client:

        def ask(count: int) -> httpclient.InferResult:
            tensor = httpclient.InferInput("IN", [1], "FP32")
            tensor.set_data_from_numpy(np.full(1, count, np.float32))
            return client.infer("takes", [tensor])

        group = ask(1 << 20).get_response()["parameters"]["group"]
        assert (above / group / "memory.max").read_text().strip() == str(LIMIT)
        with pytest.raises(InferenceServerException, match=f"more than MEMORY_LIMIT_BYTES .{LIMIT} bytes"):
            ask(LIMIT + (64 << 20))
        until(lambda: client.is_model_ready("takes"), server.log)
        assert ask(1 << 20).get_response()["parameters"]["group"] != group
        assert not (above / group).exists()
    assert {path.name for path in above.iterdir()} == before
