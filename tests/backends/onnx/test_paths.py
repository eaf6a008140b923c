"""What a configuration of an ONNX model may make the server open or write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from neptrio.backends.onnx import options as onnx_options
from neptrio.errors import InvalidArgument
from tests.support import onnx_models
from tests.support.control import load, refused
from tests.support.onnx_instances import context, instance
from tests.support.repository import write_model
from tests.support.server import ServerProcess

IO = (
    'backend: "onnxruntime" input { name: "X" data_type: TYPE_FP32 dims: [4] } '
    'output { name: "Y" data_type: TYPE_FP32 dims: [4] } max_batch_size: 8'
)


def parameter(key: str, value: str) -> str:
    return f' parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


@pytest.mark.parametrize("api", ["c", "python"])
@pytest.mark.parametrize(
    "key",
    [
        "session.optimized_model_filepath",
        "session.enable_profiling",
        "session.model_external_initializers_file_folder_path",
        "session.collect_node_memory_stats_to_file",
        "session.node_partition_config_file",
        "session.moe_expert_counter_state_file",
        "ep.context_file_path",
    ],
)
def test_options_that_reach_files_are_refused(tmp_path: Path, api: str, key: str) -> None:
    written = tmp_path / "written"
    with pytest.raises(
        InvalidArgument, match=f"parameter '{re.escape(key)}' of model 'm' is no session option"
    ):
        instance(tmp_path / "m", onnx_models.identity(), IO + parameter(key, str(written)), api)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("where", ["/tmp/none.so", "../none.so", "1/../../none.so", "link.so"])
def test_a_library_outside_of_the_models_folder_is_not_opened(tmp_path: Path, where: str) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "link.so").symlink_to(tmp_path / "other.so")
    library = f' model_operations {{ op_library_filename: "{where}" }}'
    with pytest.raises(
        InvalidArgument, match=r"model_operations of model 'm': .* must lie in the model's folder"
    ):
        instance(tmp_path / "m", onnx_models.identity(), IO + library)
    with pytest.raises(InvalidArgument, match="must lie in the model's folder"):
        onnx_options.examine(context(tmp_path / "m", onnx_models.identity(), IO + library))


def test_the_operator_may_name_more(tmp_path: Path) -> None:
    """Options and a folder of the command line hold for all models, a configuration's own stay where they are."""
    repository = tmp_path / "models"
    inside = tmp_path / "shared" / "none.so"
    outside = tmp_path / "elsewhere" / "none.so"
    for name, file in (("inside", inside), ("outside", outside)):
        library = f' model_operations {{ op_library_filename: "{file}" }}'
        write_model(repository, name, IO + library, {"1/model.onnx": onnx_models.identity()})
    write_model(repository, "plain", IO, {"1/model.onnx": onnx_models.identity()})
    dump = tmp_path / "optimized.onnx"
    with ServerProcess(
        repository,
        "--model-control-mode=explicit",
        "--load-model=plain",
        f"--backend-config=onnxruntime,allowed-directory={tmp_path}/shared",
        f"--backend-config=onnxruntime,session.optimized_model_filepath={dump}",
    ) as server:
        assert f"cannot load '{inside}'" in refused(load(server, "inside"), 400)
        assert "must lie in the model's folder" in refused(load(server, "outside"), 400)
