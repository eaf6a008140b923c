"""Cooperative launches and thread block clusters, on the fake driver, which counts them and checks their limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from neptrio.backends.kernel.backend import KernelBackend
from neptrio.config import model_config as model_config
from neptrio.errors import InvalidArgument
from neptrio.execution.backend import LoadContext
from neptrio.settings import Settings
from tests.support.gpu import FakeGpu, needs_fake_gpu
from tests.support.gpu_models import ADD, add, add_config, reason
from tests.support.repository import write_model
from tests.support.server import ServerProcess

GPU = " instance_group { kind: KIND_GPU }"
PLAIN = "<<<ceil_div(X.size, 64), 64>>>"


def config(launch: str, group: str = GPU) -> str:
    return add_config(group).replace(PLAIN, launch)


@pytest.mark.slow
@needs_fake_gpu
def test_launches_have_the_attributes_that_the_configuration_asks_for(tmp_path: Path) -> None:
    launches = {
        "plain": PLAIN,
        "cooperative": "<<<ceil_div(X.size, 64), 64, 0, cooperative>>>",
        "clusters": "<<<2 * ceil_div(X.size, 128), 64, cluster(2)>>>",
        "both": "<<<(2, 2), 64, 0, cluster(1, 2), cooperative>>>",
    }
    for name, launch in launches.items():
        write_model(tmp_path, name, config(launch), {"1/model.cu": ADD})
    counted = {"plain": (0, 0), "cooperative": (1, 0), "clusters": (0, 1), "both": (1, 1)}
    with FakeGpu() as gpu:
        with ServerProcess(tmp_path, env=gpu.env) as server:
            for name, expected in counted.items():
                before = gpu["cooperative"], gpu["clusters"]
                assert add(server, name, 1, 2) == (200, [2, 3])
                assert (gpu["cooperative"] - before[0], gpu["clusters"] - before[1]) == expected, name
            for i in range(10):
                assert add(server, "both", i) == (200, [i + 1])
            assert gpu["graph_launches"] > 0, "attributes are recorded with their launches"
        assert gpu.live() == {}


@pytest.mark.slow
@needs_fake_gpu
def test_more_blocks_than_run_at_once_fail_their_request_alone(tmp_path: Path) -> None:
    write_model(tmp_path, "add", config("<<<X.size, 64, 0, cooperative>>>"), {"1/model.cu": ADD})
    with FakeGpu() as gpu:
        with ServerProcess(tmp_path, env=gpu.env) as server:
            status, said = add(
                server, "add", *range(133)
            )  # as many as the fake GPU has multiprocessors, and one
            assert (
                status == 500 and "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE while launching a kernel" in said
            )
            assert add(server, "add", 1, 2) == (200, [2, 3])
            assert reason(server, "add") == ("READY", "")
        assert gpu.live() == {}


@pytest.mark.parametrize(("more", "word"), [("cooperative", "cooperative"), ("cluster(1)", "cluster")])
def test_the_host_refuses_blocks_that_wait_for_each_other(tmp_path: Path, more: str, word: str) -> None:
    """There one block begins when another has ended: such a kernel would never end."""
    folder = write_model(
        tmp_path,
        "add",
        config(f"<<<1, 64, 0, {more}>>>", " instance_group { kind: KIND_CPU }"),
        {"1/model.cu": ADD},
    )
    read = model_config.read(folder).config
    read.name = "add"
    backend = KernelBackend(LoadContext("add", 1, folder, folder / "1", read, Settings(), None))
    with pytest.raises(InvalidArgument, match=f"is launched with '{word}', which can't run on the host"):
        backend.load()
