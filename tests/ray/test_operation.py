"""What Ray does with replicas: kills, ends, scales and configures them, and looks after their health."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from ray import serve

import neptrio
import neptrio.ray
from tests.ray.support import (
    SMALL,
    Answer,
    Ports,
    Rest,
    application,
    declare,
    replicas,
    running,
    tensor,
    until_running,
)
from tests.support.repository import write_model
from tests.support.waiting import until


def test_a_killed_replica_loses_only_what_it_had(cluster: Ports) -> None:
    """Requests that fail were at the dead replica; all others are answered, those included that are sent after."""
    with running(cluster, "tests.ray.models:make", num_replicas=3) as rest:
        until_running(3)
        done = threading.Event()
        asked: list[tuple[float, float, int]] = []
        errors: list[Answer] = []
        lock = threading.Lock()

        def load() -> None:
            while not done.is_set():
                began = time.monotonic()
                answer = rest.infer("slow", seconds=("FP32", [0.02]))
                with lock:
                    asked.append((began, time.monotonic(), answer.status))
                    if answer.status != 200:
                        errors.append(answer)

        with ThreadPoolExecutor(8) as pool:
            loads = [pool.submit(load) for _ in range(8)]
            until(lambda: len(asked) > 100)
            killed = time.monotonic()
            os.kill(rest.infer("process").output(), signal.SIGKILL)
            dead = time.monotonic()
            count = len(asked)
            until(lambda: len(asked) > count + 300)
            until_running(3)
            done.set()
            for one in loads:
                one.result()
        failed = [row for row in asked if row[2] != 200]
        # 8 clients have 8 requests under way at most
        assert len(failed) <= 8
        assert all(began <= dead and ended >= killed for began, ended, _ in failed), failed
        for error in errors:  # in the protocol's form, by neptrio.ray.proxy
            assert (error.status, error.headers["retry-after"]) == (503, "1"), error
            assert error.json == {
                "error": "the replica that had this request has ended; send the request again"
            }


def test_what_ray_answers_by_itself_is_in_the_protocols_form(cluster: Ports) -> None:
    with running(cluster, "tests.ray.models:make") as rest:
        until_running(1)
        assert rest.ask("/v2/models/none").json["error"].startswith("Request for unknown model")
    lost = rest.ask("/v2/models/none")
    assert lost.status == 404 and "neptrio-replica" not in lost.headers
    assert list(lost.json) == ["error"]


def test_a_replica_that_is_taken_away_answers_what_it_has(cluster: Ports) -> None:
    with running(cluster, "tests.ray.models:make") as rest, ThreadPoolExecutor(1) as pool:
        (first,) = until_running(1)
        slow = pool.submit(rest.infer, "slow", seconds=("FP32", [5.0]))
        handle = serve.get_app_handle("t")
        until(lambda: handle.record_autoscaling_stats.remote().result()["neptrio_executing"] == 1)
        # another version of the deployment: the replica is replaced
        serve.run(application("tests.ray.models:make", settings={"id": "other"}), name="t")
        answer = slow.result()
        answer.output()
        assert answer.replica == first
        assert rest.ask("/v2").json["name"] == "other"
        assert rest.ask("/v2").replica != first


def test_user_config_loads_and_unloads_models_of_all_replicas(cluster: Ports, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_model(tmp_path, name, 'backend: "identity" max_batch_size: 0 ' + TENSORS)

    def ready(rest: Any) -> dict[str, set[str]]:
        """Model -> replicas that have it."""
        found: dict[str, set[str]] = {"a": set(), "b": set()}
        for _ in range(20):
            for name, seen in found.items():
                answer = rest.ask(f"/v2/models/{name}/ready")
                if answer.status == 200:
                    seen.add(answer.replica)
        return found

    where, options = str(tmp_path), {"settings": {"model_control_mode": "explicit"}}

    def configure(models: Any) -> None:
        declare(where, "t", num_replicas=2, user_config={"models": models}, **options)

    rest = Rest(cluster)
    configure(["a"])
    try:
        both = until_running(2)
        assert ready(rest) == {"a": both, "b": set()}
        configure({"b": {"backend": "identity", **CONFIG}})
        until(lambda: ready(rest) == {"a": set(), "b": both}, "the other model")
        assert replicas() == both, "the replicas were replaced"
    finally:
        serve.delete("t")


CONFIG = {
    "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
}
TENSORS = (
    'input [{name: "INPUT0" data_type: TYPE_FP32 dims: [-1]}] '
    'output [{name: "OUTPUT0" data_type: TYPE_FP32 dims: [-1]}]'
)


def test_an_engine_that_ended_is_replaced(cluster: Ports) -> None:
    options = {"health_check_period_s": 1, "drain_seconds": 1.0}
    with running(cluster, "tests.ray.models:make", **options) as rest:
        (first,) = until_running(1)
        serve.get_app_handle("t").options(method_name="_stop").remote().result()
        until(lambda: (found := until_running(1)) and first not in found, "another replica")
        assert rest.infer("double", x=("FP32", [1.0])).output() == 2


def test_queued_requests_add_replicas(cluster: Ports) -> None:
    """All of them in one gRPC stream, which Ray counts as one request."""
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "upscale_delay_s": 0,
        "downscale_delay_s": 1,
        "look_back_period_s": 2,
        "target_ongoing_requests": 1000,
        "policy": {
            "policy_function": "neptrio.ray:QueueDepthPolicy",
            "policy_kwargs": {"requests_per_replica": 20},
        },
    }
    made = neptrio.ray.app(
        "tests.ray.models:make", autoscaling_config=scaling, ray_actor_options=SMALL, drain_seconds=5
    )
    serve.run(made, name="t")
    try:
        assert len(until_running(1)) == 1
        answers: list[Any] = []
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{cluster.grpc}") as client:
            client.start_stream(lambda result, error: answers.append(error))
            inputs = [tensor(tritonclient.grpc, "seconds", np.array([0.25], np.float32))]
            for _ in range(240):
                client.async_stream_infer("slow", inputs)
            assert len(until_running(2)) == 2
            until(lambda: len(answers) == 240)
            client.stop_stream()
        assert answers == [None] * 240
        until_running(1)
    finally:
        serve.delete("t")


def test_build_takes_what_a_configuration_file_says(cluster: Ports) -> None:
    args = {"server": "tests.ray.models:make", "num_replicas": 1, "ray_actor_options": SMALL}
    serve.run(neptrio.ray.build({**args, "share_sequences": False}), name="t")
    try:
        handle = serve.get_app_handle("t")
        assert handle.replicas.remote().result() == {}
        assert Rest(cluster).add(1, 2, start=True).output() == 2
    finally:
        serve.delete("t")
    with pytest.raises(ValueError, match="server"):
        neptrio.ray.build({})


@pytest.mark.parametrize("given", [1, lambda: None, "tests.ray.models:CONTROL"])
def test_what_is_no_server_is_refused(given: Any) -> None:
    from neptrio.ray.replica import make_server

    with pytest.raises(TypeError, match=r"expected a neptrio\.Server"):
        make_server(given, {})


def test_settings_are_checked() -> None:
    from neptrio.ray.replica import make_server

    with pytest.raises(TypeError, match="nonsense"):
        make_server(neptrio.Server, {"nonsense": 1})
