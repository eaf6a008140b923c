"""Memory of GPUs, and page-locked memory, that a compiled backend asks the server for. The GPUs are those of the fake driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http as http

from tests.backends.compiled.asking import ONE, TEXT, text_of
from tests.support.gpu import FakeGpu, needs_fake_gpu
from tests.support.repository import write_model
from tests.support.server import ServerProcess

pytestmark = [pytest.mark.slow, needs_fake_gpu]


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with FakeGpu(devices=2, main_thread=1) as made:  # a model's process executes on its first one
        yield made


@pytest.fixture
def client(gpu: FakeGpu, backends: Path, tmp_path: Path) -> Iterator[http.InferenceServerClient]:
    write_model(tmp_path, "probe", TEXT + ONE)
    with (
        ServerProcess(tmp_path, f"--backend-directory={backends}", env=gpu.env) as server,
        http.InferenceServerClient(server.http) as made,
    ):
        yield made


def test_memory_of_a_gpu_and_what_is_page_locked_for_it(client: Any, gpu: FakeGpu) -> None:
    before = gpu["live_allocations"]
    assert text_of(client, "memory of 1") == ""
    assert (gpu["live_allocations"], gpu["live_pinned"]) == (before + 1, 1)
    assert text_of(client, "memory back") == ""
    assert (gpu["live_allocations"], gpu["live_pinned"]) == (before, 0)


def test_what_is_page_locked_goes_back_as_that_whatever_the_backend_says(client: Any, gpu: FakeGpu) -> None:
    assert text_of(client, "memory of 1") == ""
    assert text_of(client, "memory back as the CPU's") == ""
    assert gpu["live_pinned"] == 0


def test_a_gpu_that_is_not_there_or_has_no_room(client: Any, gpu: FakeGpu) -> None:
    missing = "3 TRITONBACKEND_MemoryManagerAllocate: there is no GPU 2 here"
    assert text_of(client, "memory of 2") == missing
    gpu["fail_allocation"] = 1
    assert text_of(client, "memory of 0") == "4 GPU 0 has no 1000 bytes of memory left"


def test_a_process_that_uses_no_gpu_is_given_no_page_locked_memory(client: Any, gpu: FakeGpu) -> None:
    contexts = gpu["live_contexts"]
    assert text_of(client, "memory page-locked") == ""
    assert (gpu["live_pinned"], gpu["live_contexts"]) == (0, contexts)
    assert text_of(client, "memory back") == ""
