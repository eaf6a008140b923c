"""The memory of a GPU has a budget of its own (docs/on-demand.md), on the fake driver."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio.config.model_config import new_config
from neptrio.flags import MemoryBudget, memory_budget
from neptrio.repository.expected_size import device_need, need
from neptrio.settings import Settings
from tests.support.gpu import FakeGpu, needs_fake_gpu
from tests.support.gpu_models import ADD, add_config, get, held
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.slow_models import parameter
from tests.support.waiting import until

MIB = 1 << 20
LARGE = 1 << 20  # elements: 4 MiB


def infer(client: httpclient.InferenceServerClient, name: str, count: int = LARGE) -> None:
    given = httpclient.InferInput("X", [1, count], "INT32")
    given.set_data_from_numpy(np.zeros((1, count), np.int32))
    assert client.infer(name, [given]).as_numpy("Y")[0, -1] == 1


def states(client: httpclient.InferenceServerClient) -> dict[str, str]:
    return {row["name"]: row.get("reason") or row["state"] for row in client.get_model_repository_index()}


@pytest.mark.slow
@needs_fake_gpu
def test_models_on_a_gpu_make_room_for_each_other_there(tmp_path: Path) -> None:
    for name, groups in (("a", "gpus: [ 0 ]"), ("b", "gpus: [ 0 ]"), ("other", "gpus: [ 1 ]")):
        config = add_config(f" instance_group {{ {groups} }} " + parameter("minimum_loaded_seconds", "0.001"))
        write_model(tmp_path, name, config, {"1/model.cu": ADD})
    weighty = write_model(
        tmp_path, "weighty", add_config(" instance_group { gpus: [ 0 ] }"), {"1/model.cu": ADD}
    )
    with (weighty / "1" / "weights.bin").open("wb") as file:
        file.truncate(30 * MIB)
    flags = ("--model-control-mode=on-demand", "--model-memory-budget=gpu:0=15MiB")
    with (
        FakeGpu(devices=2) as gpu,
        ServerProcess(tmp_path, *flags, env=gpu.env) as server,
        httpclient.InferenceServerClient(server.http) as client,
    ):
        infer(client, "a")
        infer(client, "other")
        a = held(server, "a")["GPU", 0]
        assert a == 8 * MIB
        infer(client, "b", 1)  # it was never loaded, and its files say nothing of what requests need
        assert states(client)["a"] == "READY"
        infer(client, "b")
        until(lambda: states(client)["a"] == "put away: models have grown beyond the budget")
        infer(client, "a", 1)  # now it is known what it takes
        found = states(client)
        assert found["b"] == "put away: room for 'a'" and {found["a"], found["other"]} == {"READY"}
        with pytest.raises(
            InferenceServerException,
            match=r"'weighty' takes about 30\.0 MiB of GPU 0, more than --model-memory-budget=gpu:0=15\.0 MiB",
        ):
            infer(client, "weighty")
        text = get(server.metrics, "/metrics")
        assert re.search(r'^neptrio_demand_gpu_budget_bytes\{gpu="0"\} 15728640$', text, re.M)
        assert re.search(r'^neptrio_demand_gpu_held_bytes\{gpu="0"\} [1-9]', text, re.M)
        assert "neptrio_demand_held_bytes " not in text.replace("# ", "#")


def found(backend: str, *groups: dict[str, Any]) -> Any:
    """A model whose version has 10 bytes of files."""
    config = new_config()
    config.backend = backend
    for group in groups:
        config.instance_group.add(**group)
    files = {"1/": (0, -1), "1/model": (5, 10), "config.pbtxt": (1, 100)}
    return SimpleNamespace(source=SimpleNamespace(config=config), versions=[1], fingerprint=files)


GPU, CPU = {"kind": 1}, {"kind": 2}


@pytest.mark.parametrize(
    ("backend", "groups", "expected"),
    [
        ("onnxruntime", [], 10),
        ("python", [], 0),
        ("python", [GPU], 10),
        ("python", [CPU], 0),
        ("python", [{"gpus": [0]}], 10),
        ("onnxruntime", [{**GPU, "count": 3}, CPU], 30),
        ("onnxruntime", [{"gpus": [1]}], 0),
        ("kernel", [{"gpus": [0, 1], "count": 2}, GPU], 30),
    ],
)
def test_a_model_is_expected_to_take_its_files_for_each_instance_there(
    backend: str, groups: list[dict[str, Any]], expected: int
) -> None:
    assert device_need(found(backend, *groups), 0, 0) == expected
    assert device_need(found(backend, *groups), 0, 1000) == 1000, "what is known counts"


def test_a_model_that_is_kept_takes_its_weights_once_more_while_it_is_written() -> None:
    assert [need(found("onnxruntime", CPU), 0, keeps) for keeps in (False, True)] == [21, 31]
    assert need(found("python", CPU), 0, True) == need(found("python", CPU), 0, False)


def test_budgets_are_of_the_host_and_of_each_gpu_once() -> None:
    assert memory_budget("gpu:3=1.5GiB") == MemoryBudget(3, 3 << 29)
    both = (memory_budget("1GiB"), memory_budget("gpu:0=2GiB"), memory_budget("gpu:1=0"))
    settings = Settings(model_control_mode="on-demand", model_memory_budget=both)
    assert settings.memory_budgets == {-1: 1 << 30, 0: 2 << 30} and settings.host_memory_budget == 1 << 30
    with pytest.raises(ValueError, match="twice"):
        Settings(model_control_mode="on-demand", model_memory_budget=(both[0], both[0]))
