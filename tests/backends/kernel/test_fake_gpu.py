"""The GPU path of the server, end to end, on the fake driver (tests/support/fake_cuda/fake.h).

What these tests prove is the server's side: what it asks of the driver, in which order, what it waits
for and what it gives back. What a GPU makes of it, `make test-gpu` proves on a GPU.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.backends.kernel.family import FAMILY, Case, parameter
from tests.backends.kernel.family.served import BATCHED, check_alone, check_together
from tests.support.control import progress
from tests.support.gpu import FakeGpu, needs_fake_gpu
from tests.support.gpu_models import ADD, add, add_config, get, held, post, reason, unload
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers
from tests.support.waiting import until

pytestmark = needs_fake_gpu


# ---------------------------------------------------------------- the GPU's own tests, and the family


ENDING = "test_in_a_process_of_its_own_only_the_process_ends"


@pytest.mark.slow
def test_the_gpu_test_of_a_process_that_ends_passes_on_the_fake_driver() -> None:
    tests = Path(__file__).parent / "test_gpu.py"
    with FakeGpu(main_thread=1) as gpu:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), "-k", ENDING]
        done = subprocess.run(command, env=gpu.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert done.stdout.startswith(".") and gpu["launches"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", [0, 2], ids=["lazy", "random"])
def test_the_gpu_tests_pass_on_the_fake_driver(mode: int) -> None:
    """`make test-gpu` with the fake driver in the GPU's place, with work executed in several orders."""
    tests = Path(__file__).parent / "test_gpu.py"
    # what ends with its process frees nothing: the driver does
    chosen = ["-k", f"not {ENDING}" if mode == 0 else "graph or staged or pool"]
    with FakeGpu(mode=mode, main_thread=1) as gpu:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), *chosen]
        done = subprocess.run(command, env=gpu.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert "skipped" not in done.stdout and gpu["launches"] > 10 and gpu["graph_launches"] > 0
        assert not set(gpu.live()) & {"live_allocations", "live_modules", "live_events", "live_execs"}


@pytest.mark.slow
@pytest.mark.parametrize("required", ["", "1"])
def test_without_a_gpu_its_tests_are_skipped_or_fail(required: str) -> None:
    tests = Path(__file__).parent / "test_gpu.py"
    with FakeGpu(devices=0, main_thread=1) as gpu:
        command = [sys.executable, "-m", "pytest", "-rs", str(tests), "-k", "graph"]
        env = gpu.env | {"NEPTRIO_REQUIRE_GPU": required}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == (1 if required else 0), done.stdout
        said = "NEPTRIO_REQUIRE_GPU=1, and there is no GPU: cuInit" if required else "no GPU: cuInit"
        assert said in done.stdout


@pytest.fixture(scope="module")
def family_gpu() -> Any:
    with FakeGpu(mode=5) as gpu:
        yield gpu


@pytest.fixture(scope="module", params=["none", "process"])
def family(
    request: pytest.FixtureRequest, family_gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    repository = tmp_path_factory.mktemp("family")
    for case in FAMILY:
        case.write(repository, " dynamic_batching { max_queue_delay_microseconds: 2000 }")
    flags = [
        f"--backend-config=kernel,{setting}"
        for setting in (f"isolation={request.param}", "environment=FAKE_CUDA_*")
    ]
    with ServerProcess(repository, *flags, env=family_gpu.env) as process:
        yield process
    assert family_gpu.live() == {}


def test_kind_auto_picks_the_gpu(family: ServerProcess) -> None:
    for case in FAMILY:
        assert re.search(rf"{case.name} .*1 x GPU 0", family.log()), family.log()
    assert "Fake GPU 0" in family.log()


@pytest.mark.parametrize("case", FAMILY, ids=lambda c: c.name)
def test_against_numpy(family: ServerProcess, case: Case) -> None:
    check_alone(family, case)


@pytest.mark.parametrize("case", BATCHED, ids=lambda c: c.name)
def test_requests_batched_together_get_their_own_rows(family: ServerProcess, case: Case) -> None:
    check_together(family, case)


# ---------------------------------------------------------------- places


@pytest.mark.slow
def test_instances_go_where_gpus_says(tmp_path: Path) -> None:
    write_model(
        tmp_path, "both", add_config(" instance_group { kind: KIND_GPU count: 2 }"), {"1/model.cu": ADD}
    )
    write_model(tmp_path, "second", add_config(" instance_group { gpus: [ 1 ] }"), {"1/model.cu": ADD})
    write_model(tmp_path, "cpu", add_config(" instance_group { kind: KIND_CPU }"), {"1/model.cu": ADD})
    write_model(
        tmp_path, "third", add_config(" instance_group { kind: KIND_GPU gpus: [ 2 ] }"), {"1/model.cu": ADD}
    )
    with FakeGpu(devices=2) as gpu:
        with ServerProcess(tmp_path, "--exit-on-error=false", env=gpu.env) as server:
            log = server.log()
            assert re.search(r"both .*2 x GPU 0, 2 x GPU 1", log) and re.search(r"second .*1 x GPU 1", log)
            assert re.search(r"cpu .*1 x CPU", log)
            assert "instance group 'third_0' names GPU 2, available are 0, 1" in log
            with ThreadPoolExecutor(8) as pool:
                for i, answer in enumerate(pool.map(lambda i: add(server, "both", i, i), range(40))):
                    assert answer == (200, [i + 1, i + 1])
            assert add(server, "second", 5) == (200, [6]) and add(server, "cpu", 5) == (200, [6])
            assert ("GPU", 1) in held(server, "second") and ("GPU", 0) not in held(server, "second")
            assert not any(kind == "GPU" for kind, _ in held(server, "cpu"))
        assert gpu.live() == {}


@pytest.mark.slow
def test_a_driver_without_devices(tmp_path: Path) -> None:
    write_model(tmp_path, "auto", add_config(), {"1/model.cu": ADD})
    write_model(tmp_path, "gpu", add_config(" instance_group { kind: KIND_GPU }"), {"1/model.cu": ADD})
    with FakeGpu(devices=0) as gpu, ServerProcess(tmp_path, "--exit-on-error=false", env=gpu.env) as server:
        assert re.search(r"auto .*1 x CPU", server.log())
        server.until_logged("has kind KIND_GPU but no GPUs are available")
        assert add(server, "auto", 1) == (200, [2])


@pytest.mark.slow
def test_warm_up_runs_on_the_device(tmp_path: Path) -> None:
    sample = 'model_warmup { name: "w" batch_size: 2 inputs { key: "X" value { data_type: TYPE_INT32 dims: [ 9 ] random_data: true } } }'
    group = " instance_group { kind: KIND_GPU count: 2 }"
    write_model(tmp_path, "add", add_config(group + sample), {"1/model.cu": ADD})
    with FakeGpu() as gpu:
        with ServerProcess(tmp_path, env=gpu.env) as server:
            assert gpu["launches"] == 2, "each instance once"
            assert held(server, "add")["GPU", 0] == 4 * 65536, "what it took is told from the start"
        assert gpu.live() == {}


# ---------------------------------------------------------------- memory


@pytest.mark.slow
def test_memory_is_told_and_given_back(tmp_path: Path) -> None:
    write_model(tmp_path, "add", add_config(), {"1/model.cu": ADD})
    with FakeGpu(memory=256 << 20) as gpu:
        flags = ("--model-control-mode=explicit", "--metrics-interval-ms=50")
        with ServerProcess(tmp_path, *flags, env=gpu.env) as server:
            assert gpu.live() == {}, "nothing is opened before a model needs it"
            assert "nv_gpu_memory_total_bytes{" not in get(server.metrics, "/metrics")
            for cycle in range(3):
                assert post(server, "/v2/repository/models/add/load")[0] == 200
                assert add(server, "add", *range(100_000))[0] == 200
                usage = held(server, "add")
                assert usage["GPU", 0] == 2 * (1 << 19) and usage["CPU_PINNED", 0] == 1 << 19
                assert gpu["live_bytes"] == usage["GPU", 0]
                if cycle == 0:
                    uuid = "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfe00"
                    total, used, pool = (
                        f'{name}{{gpu_uuid="{uuid}"}}'
                        for name in (
                            "nv_gpu_memory_total_bytes",
                            "nv_gpu_memory_used_bytes",
                            "neptrio_gpu_pool_used_bytes",
                        )
                    )
                    # the sampler has its own pace
                    until(lambda: samples(server).get(used, 0) >= usage["GPU", 0], used)  # noqa: B023
                    seen = samples(server)
                    assert (seen[total], seen[pool]) == (256 << 20, usage["GPU", 0])
                    assert not any(key.startswith("nv_gpu_utilization{") for key in seen), "no NVML here"
                unload(server, "add")
                assert gpu.live() == {}


def samples(server: ServerProcess) -> dict[str, float]:
    """The samples of /metrics."""
    lines = get(server.metrics, "/metrics").splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    return {key: float(value) for key, value in pairs}


# ---------------------------------------------------------------- errors


@pytest.fixture
def two_models(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        write_model(tmp_path, name, add_config(" instance_group { kind: KIND_GPU }"), {"1/model.cu": ADD})
    return tmp_path


@pytest.mark.slow
def test_out_of_memory_fails_the_batch_and_nothing_else(two_models: Path) -> None:
    with FakeGpu(fail_times=2) as gpu:  # also when it was tried again
        with ServerProcess(
            two_models, "--model-control-mode=explicit", "--load-model=one", env=gpu.env
        ) as server:
            for n in (1, 2, 3):  # the pinned buffer is there; device memory for inputs, then for outputs
                gpu["fail_allocation"] = n
                status, answer = add(server, "one", *range(n * 100_000))
                if status == 500:
                    assert "CUDA_ERROR_OUT_OF_MEMORY while allocating memory" in answer
                gpu["fail_allocation"] = 0
                assert add(server, "one", *range(n * 100_000))[0] == 200
            assert reason(server, "one") == ("READY", "")
            gpu["fail_pinned"] = (
                2  # after the buffer for inputs come outputs of a new size: they go to ordinary memory
            )
            assert add(server, "one", *range(1_000_000))[0] == 200
        assert gpu.live() == {}


@pytest.mark.slow
def test_a_failed_batch_gives_its_memory_back_at_once(two_models: Path) -> None:
    """Without the collector, which may come much later or (for what lived at start-up) never."""
    flags = ("--model-control-mode=explicit", "--load-model=one")
    with FakeGpu() as gpu, ServerProcess(two_models, *flags, env=gpu.env) as server:
        asked = grpcclient.InferInput("X", [1, 1000], "INT32")
        asked.set_data_from_numpy(np.zeros((1, 1000), np.int32))

        def pinned_after(ask: Any) -> list[str]:
            gpu["fail_launch_with"], gpu["fail_launch"] = 701, 1
            assert "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" in ask()
            return re.findall(
                r"^nv_pinned_memory_pool_used_bytes (\d+)", get(server.metrics, "/metrics"), re.M
            )

        def over_grpc() -> str:
            with grpcclient.InferenceServerClient(server.grpc) as client:
                with pytest.raises(InferenceServerException) as failed:
                    client.infer("one", [asked])
            return str(failed.value)

        def over_a_stream() -> str:
            with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client) as got:
                client.async_stream_infer("one", [asked])
                return str(got.error())

        for ask in (lambda: add(server, "one", *range(1000))[1], over_grpc, over_a_stream):
            assert pinned_after(ask) == ["0"]


@pytest.mark.slow
def test_an_allocation_that_fails_is_tried_again_with_what_the_pool_kept(two_models: Path) -> None:
    flags = ("--model-control-mode=explicit", "--load-model=one")
    with FakeGpu(fail_allocation=1) as gpu, ServerProcess(two_models, *flags, env=gpu.env) as server:
        assert add(server, "one", 1) == (200, [2])
        assert gpu["trims"] == 1


@pytest.mark.slow
def test_a_failed_allocation_has_its_error(two_models: Path) -> None:
    with FakeGpu(fail_allocation=1, fail_times=2) as gpu:
        with ServerProcess(
            two_models, "--model-control-mode=explicit", "--load-model=one", env=gpu.env
        ) as server:
            status, answer = add(server, "one", 1)
            assert status == 500 and answer == (
                "model 'one': CUDA_ERROR_OUT_OF_MEMORY while allocating memory"
            )
            assert add(server, "one", 1) == (200, [2])
        assert gpu.live() == {}


@pytest.mark.slow
def test_a_launch_that_fails_is_the_batchs_error(two_models: Path) -> None:
    with FakeGpu(fail_launch_with=701) as gpu:
        with ServerProcess(
            two_models, "--model-control-mode=explicit", "--load-model=one", env=gpu.env
        ) as server:
            assert add(server, "one", 1) == (200, [2])
            gpu["fail_launch"] = 1
            status, answer = add(server, "one", 1)
            assert status == 500
            assert answer == "model 'one': CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES while launching a kernel"
            assert add(server, "one", 2) == (200, [3]) and reason(server, "one") == ("READY", "")
        assert gpu.live() == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, name",
    [(700, "ILLEGAL_ADDRESS"), (719, "LAUNCH_FAILED"), (721, "TENSOR_MEMORY_LEAK"), (911, "EXTERNAL_DEVICE")],
)
def test_a_broken_context_takes_every_model_on_that_gpu_out_of_service(
    two_models: Path, code: int, name: str
) -> None:
    write_model(
        two_models, "other", add_config(" instance_group { kind: KIND_GPU gpus: [ 1 ] }"), {"1/model.cu": ADD}
    )
    for model in ("one", "two"):
        path = two_models / model / "config.pbtxt"
        path.write_text(path.read_text().replace("KIND_GPU", "KIND_GPU gpus: [ 0 ]"))
    flags = ("--model-control-mode=explicit", *(f"--load-model={m}" for m in ("one", "two", "other")))
    with FakeGpu(devices=2, fault_kernel_with=code) as gpu:
        with ServerProcess(two_models, *flags, env=gpu.env) as server:
            assert add(server, "one", 1) == add(server, "two", 1) == (200, [2])
            gpu["fault_kernel"] = 1
            status, answer = add(server, "one", 1)
            assert status == 500 and answer == f"model 'one': CUDA_ERROR_{name} while executing"
            failure = f"GPU 0 cannot be used any more after CUDA_ERROR_{name} in model 'one'; the server must be started anew"
            for model in ("one", "two"):
                state, why = reason(server, model)
                assert state == "UNAVAILABLE"
                assert why == f"Unavailable: {failure}"
                assert add(server, model, 1)[0] == 503
            assert add(server, "other", 1) == (200, [2]), "the other GPU's models go on"
            for model in ("two", "one"):
                status, body = post(server, f"/v2/repository/models/{model}/load")
                assert status == 400 and failure in body["error"]
                assert reason(server, model)[0] == "UNAVAILABLE" and add(server, model, 7)[0] == 503
            assert add(server, "other", 2) == (200, [3])
            assert post(server, "/v2/repository/models/other/unload")[0] == 200
        assert gpu["resets"] == 0, "the primary context belongs to others too"


@pytest.mark.slow
def test_a_model_on_demand_goes_on_with_the_gpu_that_is_left(tmp_path: Path) -> None:
    """No load can bring the other one back. When none is left, loads are tried at the pace of those that fail."""
    write_model(
        tmp_path, "m", add_config(" instance_group { kind: KIND_GPU gpus: [ 0, 1 ] }"), {"1/model.cu": ADD}
    )
    with (
        FakeGpu(devices=2, fault_kernel_with=700) as gpu,
        ServerProcess(tmp_path, "--model-control-mode=on-demand", env=gpu.env) as server,
    ):

        def loads() -> tuple[int, int]:
            found = progress(server, "m")["on_demand"]
            return found["loads"], found["load_failures"]

        assert add(server, "m", 1) == (200, [2])
        gpu["fault_kernel"] = 1
        assert add(server, "m", 1)[0] == 500
        assert [add(server, "m", number) for number in range(3)] == [(200, [1]), (200, [2]), (200, [3])]
        assert loads() == (1, 0) and "GPU" in reason(server, "m")[1]
        gpu["fault_kernel"] = 1
        assert add(server, "m", 1)[0] == 500
        status, answer = add(server, "m", 1)
        assert status == 503 and "the server must be started anew" in answer
        assert loads() == (1, 1)
        answers = []

        def put_off() -> bool:  # the first one, unless more than a second has passed
            answers.append(add(server, "m", 1))
            return "it is tried again in" in answers[-1][1]

        until(put_off)
        assert {status for status, _ in answers} == {503}
        assert loads() == (1, len(answers))


@pytest.mark.slow
def test_a_context_that_breaks_under_load_loses_no_request(two_models: Path) -> None:
    """Every request is answered, before and after."""
    flags = ("--model-control-mode=explicit", "--load-model=one", "--load-model=two")
    with FakeGpu(mode=9, fault_kernel_with=700) as gpu:
        with ServerProcess(two_models, *flags, env=gpu.env) as server, ThreadPoolExecutor(8) as pool:
            gpu["fault_kernel"] = 10
            answers = list(pool.map(lambda i: add(server, ("one", "two")[i % 2], i), range(60)))
            for i, (status, answer) in enumerate(answers):
                assert status in (500, 503) or answer == [i + 1]
            assert any(status == 500 for status, _ in answers)
            assert reason(server, "one")[0] == reason(server, "two")[0] == "UNAVAILABLE"


@pytest.mark.slow
@pytest.mark.parametrize("code, name", [(46, "DEVICE_UNAVAILABLE"), (999, "UNKNOWN")])
def test_a_doubtful_error_breaks_the_context_when_it_comes_again(
    two_models: Path, code: int, name: str
) -> None:
    flags = ("--model-control-mode=explicit", "--load-model=one")
    with FakeGpu(fail_launch_with=code) as gpu, ServerProcess(two_models, *flags, env=gpu.env) as server:
        for _ in range(2):  # a success between them: it has passed
            gpu["fail_launch"] = 1
            assert add(server, "one", 1)[0] == 500
            assert add(server, "one", 1) == (200, [2])
        gpu["fail_launch"] = 1
        assert add(server, "one", 1)[0] == 500
        gpu["fail_launch"] = 1
        assert add(server, "one", 1)[0] == 500
        assert f"CUDA_ERROR_{name}" in reason(server, "one")[1] and add(server, "one", 1)[0] == 503


@pytest.mark.slow
def test_the_server_ends_where_the_flag_says_so(two_models: Path) -> None:
    flags = ("--model-control-mode=explicit", "--load-model=one", "--exit-on-device-error=true")
    with FakeGpu(fault_kernel_with=719) as gpu:
        with ServerProcess(two_models, *flags, env=gpu.env) as server:
            gpu["fault_kernel"] = 1
            assert add(server, "one", 1)[0] == 500, "the request is answered first"
            assert server.ended() == 1
            server.until_logged("because of --exit-on-device-error: GPU 0 cannot be used any more")


# ---------------------------------------------------------------- hanging kernels


def limited(seconds: str) -> str:
    group = " instance_group { kind: KIND_GPU }"
    return add_config(group + parameter("EXECUTE_TIMEOUT_SECONDS", seconds))


@pytest.mark.slow
def test_a_hanging_kernel_ends_in_time(tmp_path: Path) -> None:
    """Its batch and those of other models on that GPU fail, unload and shutdown do not wait for the device."""
    write_model(tmp_path, "one", limited("2"), {"1/model.cu": ADD})
    write_model(tmp_path, "two", limited("300"), {"1/model.cu": ADD})
    large = list(range(100_000))  # outputs in page-locked memory, which the device may write to for ever
    flags = (
        "--model-control-mode=explicit",
        "--load-model=one",
        "--load-model=two",
        "--exit-timeout-secs=60",
    )
    with FakeGpu() as gpu:
        with ServerProcess(tmp_path, *flags, env=gpu.env) as server, ThreadPoolExecutor(1) as pool:
            assert add(server, "one", 1) == add(server, "two", 1) == (200, [2])
            gpu["hang_kernel"] = 1
            hanging = pool.submit(add, server, "two", *large)
            until(lambda: gpu["hang_kernel"] == 0, "the kernel hangs")
            gpu["hang_kernel"] = 1
            status, answer = add(server, "one", *large)
            assert status == 504, answer
            assert answer == "model 'one': no end of a kernel within 2 s (EXECUTE_TIMEOUT_SECONDS)"
            assert hanging.result(60)[0] == 500, "the other model's batch hangs on the same device"
            for model in ("one", "two"):
                assert "no end of a kernel within 2 s" in reason(server, model)[1]
                assert add(server, model, 1)[0] == 503
            unload(server, "one")


@pytest.mark.slow
def test_a_hanging_kernel_does_not_keep_the_server_from_ending(tmp_path: Path) -> None:
    write_model(tmp_path, "one", limited("300"), {"1/model.cu": ADD})
    with FakeGpu() as gpu, ThreadPoolExecutor(1) as pool:
        with ServerProcess(tmp_path, "--exit-timeout-secs=2", env=gpu.env) as server:
            gpu["hang_kernel"] = 1
            hanging = pool.submit(add, server, "one", 1)
            until(lambda: gpu["hang_kernel"] == 0, "the kernel hangs")
            assert server.stop() == 1
        with pytest.raises((OSError, http.client.HTTPException)):
            hanging.result(60)


@pytest.mark.slow
def test_unloads_do_not_wait_for_another_models_kernel(tmp_path: Path) -> None:
    """Freeing page-locked memory and unloading a module wait for all that runs on a device, and hold up other calls."""
    for model in ("one", "two", "three"):
        write_model(tmp_path, model, limited("300"), {"1/model.cu": ADD})
    flags = ["--model-control-mode=explicit", "--exit-timeout-secs=2"]
    flags += [f"--load-model={model}" for model in ("one", "two", "three")]
    with FakeGpu() as gpu, ThreadPoolExecutor(1) as pool:
        with ServerProcess(tmp_path, *flags, env=gpu.env) as server:
            # large enough for page-locked outputs
            for model in ("one", "three"):
                assert add(server, model, *range(100_000))[0] == 200
            gpu["hang_kernel"] = 1
            hanging = pool.submit(add, server, "two", 1)
            until(lambda: gpu["hang_kernel"] == 0, "the kernel hangs")
            modules = gpu["live_modules"]
            unload(server, "one")
            assert gpu["live_modules"] == modules == 3, "it is given back when nothing hangs any more"
            assert add(server, "three", 1) == (200, [2]), "the device serves"
            assert server.stop() == 1
        with pytest.raises((OSError, http.client.HTTPException)):
            hanging.result(60)


@pytest.mark.slow
def test_what_an_unload_leaves_is_given_back_while_others_are_busy(tmp_path: Path) -> None:
    write_model(tmp_path, "one", limited("300"), {"1/model.cu": ADD})
    write_model(tmp_path, "two", limited("300"), {"1/model.cu": ADD})
    flags = ("--model-control-mode=explicit", "--load-model=one", "--load-model=two")
    with FakeGpu(kernel_ns=5_000_000) as gpu, ThreadPoolExecutor(4) as pool:
        with ServerProcess(tmp_path, *flags, env=gpu.env) as server:
            assert add(server, "one", *range(100_000))[0] == 200
            ended = threading.Event()

            def ask() -> None:
                while not ended.is_set():
                    assert add(server, "two", 1) == (200, [2])

            busy = [pool.submit(ask) for _ in range(4)]
            until(lambda: gpu["launches"] > 20, "the other model is busy")
            unload(server, "one")
            assert gpu["live_modules"] == 1
            ended.set()
            for asking in busy:
                asking.result(60)
        assert gpu.live() == {}


@pytest.mark.slow
def test_a_limit_must_be_a_time(tmp_path: Path) -> None:
    write_model(tmp_path, "one", limited("soon"), {"1/model.cu": ADD})
    with FakeGpu() as gpu, ServerProcess(tmp_path, "--exit-on-error=false", env=gpu.env) as server:
        assert (
            "'EXECUTE_TIMEOUT_SECONDS' of model 'one' must be a number of seconds > 0, got 'soon'"
            in server.log()
        )


@pytest.mark.slow
def test_a_module_that_does_not_load_is_the_loads_error(two_models: Path) -> None:
    with FakeGpu(fail_load=1) as gpu:
        with ServerProcess(two_models, "--model-control-mode=explicit", env=gpu.env) as server:
            status, body = post(server, "/v2/repository/models/one/load")
            assert status == 400 or status == 500
            assert (
                "CUDA_ERROR_INVALID_IMAGE while loading 'model.cu' of model 'one':\nptxas fatal"
                in body["error"]
            )
            assert "Unresolved extern function 'fake_missing'" in body["error"]
            assert gpu.live() == {}
            assert post(server, "/v2/repository/models/one/load")[0] == 200
            assert add(server, "one", 1) == (200, [2])
        assert gpu.live() == {}


# ---------------------------------------------------------------- times


@pytest.mark.slow
def test_durations_are_the_devices(tmp_path: Path) -> None:
    """The fake's copies and kernels take a while; each is found in its own duration."""
    write_model(tmp_path, "add", add_config(), {"1/model.cu": ADD})
    with FakeGpu(htod_ns=3_000_000, kernel_ns=9_000_000, dtoh_ns=5_000_000) as gpu:
        with ServerProcess(tmp_path, env=gpu.env) as server:
            assert add(server, "add", 1) == (200, [2])
            stats = json.loads(get(server.http, "/v2/models/add/stats"))["model_stats"][0]["inference_stats"]
            assert stats["compute_input"]["ns"] >= 3_000_000
            assert stats["compute_infer"]["ns"] >= 9_000_000
            assert stats["compute_output"]["ns"] >= 5_000_000
