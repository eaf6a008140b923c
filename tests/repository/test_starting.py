"""What a start leaves to the loop: making instances is cut, and files are a thread's."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
import tritonclient.http as httpclient

from neptrio.backends.python import backend
from neptrio.loop import slices
from neptrio.repository.model import Model
from tests.backends.python.models import config, python_model
from tests.support.embedded import EmbeddedServer
from tests.support.repository import identity_config, write_model

PLAIN = """
class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor)]) for tensor in tensors]
"""


def test_others_are_served_between_the_instances_of_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slices of no length the loop passes before each of eight instances."""
    monkeypatch.setattr(slices, "SLICE_NS", -1)
    passes = 0
    seen: list[int] = []
    made = Model.make_instance

    def make_instance(self: Model, *given: Any) -> Any:
        seen.append(passes)
        return made(self, *given)

    async def count() -> None:
        nonlocal passes
        while not done:
            passes += 1
            await trio.lowlevel.checkpoint()

    done = False
    write_model(tmp_path, "m", identity_config(extra="instance_group { count: 8 kind: KIND_CPU }"))
    with EmbeddedServer(tmp_path, model_control_mode="explicit") as server:
        monkeypatch.setattr(Model, "make_instance", make_instance)
        server.ask(trio.lowlevel.spawn_system_task, count)
        with httpclient.InferenceServerClient(server.http) as client:
            client.load_model("m")
            assert client.is_model_ready("m")
        done = True
    assert len(seen) == 8
    # trio runs the tasks of a pass in any order, so two neighbours may see the same number, but no three
    assert all(later > earlier for earlier, later in zip(seen, seen[2:], strict=False)), seen


def test_the_environment_of_a_model_is_looked_for_on_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive takes seconds to unpack; without auto-completion nothing else asks for it before the instances."""
    threads: list[threading.Thread] = []
    real = backend.environment_python

    def environment_python(*given: Any) -> str:
        threads.append(threading.current_thread())
        return real(*given)

    monkeypatch.setattr(backend, "environment_python", environment_python)
    parameter = f'parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{sys.prefix}" }} }}'
    python_model(tmp_path, "m", PLAIN, config(extra=parameter))
    with EmbeddedServer(tmp_path, disable_auto_complete_config=True) as server:
        loop = server.ask(threading.current_thread)
        with httpclient.InferenceServerClient(server.http) as client:
            assert client.is_model_ready("m")
    assert threads and loop not in threads
