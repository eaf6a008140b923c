"""GPUs as the driver's files show them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from neptrio.config import accelerators
from tests.support.gpu import FakeGpu, needs_fake_gpu


def driver(tmp_path: Path, infos: dict[str, str], devices: list[str]) -> tuple[accelerators.Gpu, ...]:
    proc, dev = tmp_path / "proc", tmp_path / "dev"
    proc.mkdir()
    dev.mkdir()
    for bus, text in infos.items():
        (proc / bus).mkdir()
        (proc / bus / "information").write_text(text)
    for device in devices:
        (dev / device).touch()
    return accelerators.gpus(proc, dev, "no-such-library.so")


def test_none(tmp_path: Path) -> None:
    assert driver(tmp_path, {}, ["nvidiactl", "nvidia-uvm", "null"]) == ()


def test_two(tmp_path: Path) -> None:
    infos = {
        "0000:01:00.0": "Model: \t\t NVIDIA A\nIRQ: 1\nDevice Minor: \t 0\n",
        "0000:02:00.0": "Model: \t\t NVIDIA B\nDevice Minor: \t 1\n",
    }
    found = driver(tmp_path, infos, ["nvidia0", "nvidia1", "nvidiactl"])
    assert [(gpu.index, gpu.name) for gpu in found] == [(0, "NVIDIA A"), (1, "NVIDIA B")]


def test_a_container_sees_some_devices(tmp_path: Path) -> None:
    infos = {
        "0000:01:00.0": "Model: NVIDIA A\nDevice Minor: 0\n",
        "0000:02:00.0": "Model: NVIDIA B\nDevice Minor: 1\n",
    }
    assert [g.name for g in driver(tmp_path, infos, ["nvidia1"])] == ["NVIDIA B"]


def test_a_choice_of_devices_is_the_drivers_to_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert driver(tmp_path, {}, ["nvidia0", "nvidia1"]) == (), "the files do not know"


@needs_fake_gpu
def test_the_driver_is_asked_where_there_are_no_files() -> None:
    code = "from neptrio.config import accelerators; print(accelerators.describe())"
    with FakeGpu(devices=2, main_thread=1) as gpu:
        done = subprocess.run(
            [sys.executable, "-c", code], env=gpu.env, capture_output=True, text=True, check=True
        )
    assert done.stdout == "GPU 0 Fake GPU 0, GPU 1 Fake GPU 1\n"


def test_devices_without_descriptions(tmp_path: Path) -> None:
    assert [gpu.index for gpu in driver(tmp_path, {}, ["nvidia0", "nvidia1"])] == [0, 1]
