"""ONNX Runtime's execution providers: chosen, with Triton's options, and checked. Needs no GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neptrio.backends.onnx import providers
from neptrio.backends.onnx import python_session as onnx_python
from neptrio.backends.onnx.options import Options
from neptrio.errors import InvalidArgument
from tests.support import onnx_models
from tests.support.onnx_instances import context

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"


@pytest.fixture(autouse=True)
def with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "available", lambda: (TENSORRT, CUDA, CPU))


def chosen(folder: Path, accelerators: str = "", kind: str = "GPU", **parameters: str) -> list[Any]:
    config = f"max_batch_size: 8 optimization {{ execution_accelerators {{ {accelerators} }} }}"
    return providers.chosen(context(folder, b"", config), kind, 1, parameters)


def tensorrt(**options: str) -> str:
    listed = " ".join(f'parameters {{ key: "{k}" value: "{v}" }}' for k, v in options.items())
    return f'gpu_execution_accelerator [ {{ name: "tensorrt" {listed} }} ]'


def test_a_gpu_means_cuda_with_the_cpu_behind_it(tmp_path: Path) -> None:
    assert chosen(tmp_path) == [(CUDA, {"device_id": "1"}), CPU]
    assert chosen(tmp_path, tensorrt()) == [(TENSORRT, {"device_id": "1"}), (CUDA, {"device_id": "1"}), CPU]
    assert chosen(tmp_path, tensorrt(), kind="CPU") == [CPU], "a GPU's accelerators are not for the CPU"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"precision_mode": "FP16"}, {"trt_fp16_enable": "True"}),
        ({"precision_mode": "INT8"}, {"trt_int8_enable": "True"}),
        ({"precision_mode": "FP32"}, {}),
        ({"max_workspace_size_bytes": "1073741824"}, {"trt_max_workspace_size": "1073741824"}),
        ({"int8_calibration_table_name": "t"}, {"trt_int8_calibration_table_name": "t"}),
        ({"int8_use_native_calibration_table": "1"}, {"trt_int8_use_native_calibration_table": "True"}),
        ({"trt_engine_cache_enable": "true"}, {"trt_engine_cache_enable": "True"}),
        ({"trt_engine_cache_enable": "0"}, {"trt_engine_cache_enable": "False"}),
        ({"trt_auxiliary_streams": "-1"}, {"trt_auxiliary_streams": "-1"}),
        ({"trt_profile_min_shapes": "X:1x3"}, {"trt_profile_min_shapes": "X:1x3"}),
    ],
)
def test_tensorrts_options_have_tritons_names(
    tmp_path: Path, given: dict[str, str], expected: dict[str, str]
) -> None:
    assert chosen(tmp_path, tensorrt(**given))[0] == (TENSORRT, {**expected, "device_id": "1"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"precision_mode": "FP8"},
            "parameter 'precision_mode' .* must be one of FP32, FP16, INT8, got 'FP8'",
        ),
        ({"max_workspace_size_bytes": "1G"}, "'max_workspace_size_bytes' .* must be an integer, got '1G'"),
        ({"trt_engine_cache_enable": "yes"}, "must be 1 or true, 0 or false, got 'yes'"),
        (
            {"segment_size": "1"},
            "parameter 'segment_size' of execution accelerator 'tensorrt' of model 'm' is unknown",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(tmp_path: Path, given: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        chosen(tmp_path, tensorrt(**given))


def test_paths_of_options_stay_in_the_models_folder(tmp_path: Path) -> None:
    found = chosen(tmp_path, tensorrt(trt_engine_cache_path="cache"))[0][1]
    assert found["trt_engine_cache_path"] == f"{tmp_path}/cache"
    for key, value in (
        ("trt_engine_cache_path", "/cache"),
        ("trt_timing_cache_path", "../elsewhere"),
        ("trt_extra_plugin_lib_paths", "own.so;/tmp/evil.so"),
    ):
        with pytest.raises(InvalidArgument, match=f"parameter '{key}' .* must lie in the model's folder"):
            chosen(tmp_path, tensorrt(**{key: value}))
    with pytest.raises(InvalidArgument, match=r"must be a name without folders, got '\.\./t'"):
        chosen(tmp_path, tensorrt(trt_engine_cache_prefix="../t"))


def test_no_option_is_an_address(tmp_path: Path) -> None:
    own = 'gpu_execution_accelerator [ { name: "cuda" parameters { key: "gpu_external_alloc" value: "4096" } } ]'
    with pytest.raises(InvalidArgument, match=r"'gpu_external_alloc' .* is an address in memory"):
        chosen(tmp_path, own)


def test_cudas_options_are_an_accelerators_or_a_models(tmp_path: Path) -> None:
    """As Triton reads them; its numbers become ONNX Runtime's words."""
    own = 'gpu_execution_accelerator [ { name: "cuda" parameters { key: "gpu_mem_limit" value: "5" } } ]'
    given = {"cudnn_conv_algo_search": "1", "arena_extend_strategy": "kSameAsRequested", "gpu_mem_limit": "9"}
    assert chosen(tmp_path, own, **given)[0] == (
        CUDA,
        {
            "gpu_mem_limit": "5",
            "cudnn_conv_algo_search": "HEURISTIC",
            "arena_extend_strategy": "kSameAsRequested",
            "device_id": "1",
        },
    )
    with pytest.raises(
        InvalidArgument, match=r"must be 0 \(EXHAUSTIVE\), 1 \(HEURISTIC\), 2 \(DEFAULT\), got '3'"
    ):
        chosen(tmp_path, cudnn_conv_algo_search="3")
    with pytest.raises(InvalidArgument, match="'gpu_mem_limit' of model 'm' must be an integer, got 'much'"):
        chosen(tmp_path, gpu_mem_limit="much")


def test_a_model_can_refuse_what_would_run_on_the_cpu(tmp_path: Path) -> None:
    """ONNX Runtime refuses that entry of a session that was given the CPU's provider."""
    entry = {"session.disable_cpu_ep_fallback": "1"}
    assert chosen(tmp_path, **entry) == [(CUDA, {"device_id": "1"})]
    assert chosen(tmp_path, kind="CPU", **entry) == [CPU]
    assert chosen(tmp_path, **{"session.disable_cpu_ep_fallback": "0"}) == [(CUDA, {"device_id": "1"}), CPU]


def test_a_package_without_cuda_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "available", lambda: (CPU,))
    with pytest.raises(
        InvalidArgument, match=r"no CUDA provider \(it has CPUExecutionProvider\); onnxruntime-gpu"
    ):
        chosen(tmp_path)
    with pytest.raises(InvalidArgument, match="accelerator 'tensorrt' of model 'm' is not available"):
        chosen(tmp_path, tensorrt())


def session(*names: str, device: str = "0") -> Any:
    options = {name: {} if name == CPU else {"device_id": device} for name in names}
    return SimpleNamespace(get_providers=lambda: list(names), get_provider_options=lambda: options)


def test_a_session_is_checked() -> None:
    asked = [(TENSORRT, {"device_id": "0"}), (CUDA, {"device_id": "0"}), CPU]
    providers.verify(session(TENSORRT, CUDA, CPU), asked, "m")
    with pytest.raises(
        InvalidArgument, match=rf"asks for {TENSORRT}, and .* without it \(it has {CUDA}, {CPU}\)"
    ):
        providers.verify(session(CUDA, CPU), asked, "m")
    with pytest.raises(InvalidArgument, match="on GPU 0, and it runs on GPU 1"):
        providers.verify(session(TENSORRT, CUDA, CPU, device="1"), asked, "m")


def test_onnx_runtime_itself_goes_on_without_a_provider_and_we_do_not(tmp_path: Path) -> None:
    """The real module, which has no CUDA here: it warns and takes the CPU."""
    (tmp_path / "model.onnx").write_bytes(onnx_models.scale(("N", 4)))
    asked = [(CUDA, {"device_id": "0"}), CPU]
    with pytest.warns(UserWarning, match="'CUDAExecutionProvider' is not in available provider names"):
        with pytest.raises(
            InvalidArgument, match=f"model 'm' asks for {CUDA}, and ONNX Runtime made a session without"
        ):
            onnx_python.open_session(tmp_path / "model.onnx", Options("m"), asked)
