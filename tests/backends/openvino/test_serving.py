"""Networks of OpenVINO through the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio import commands
from tests.support import onnx_models, tensorflow_models
from tests.support.control import post
from tests.support.repository import write_model
from tests.support.server import ServerProcess

openvino = pytest.importorskip("openvino")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def doubling(path: Path, rows: int = -1, named: bool = True) -> None:
    """y = 2 x, with rows of four, as IR. `named`: otherwise as a converted module of PyTorch, whose results have no names."""
    from openvino import opset13 as operators

    x = operators.parameter([rows, 4], np.float32)
    x.output(0).tensor.set_names({"x"})
    y = operators.multiply(x, operators.constant(np.full(4, 2, np.float32)))
    y.output(0).tensor.set_names({"y"})
    openvino.save_model(openvino.Model([operators.result(y)], [x], "doubling"), path, compress_to_fp16=False)
    if not named:
        content = path.read_text().replace(' names="y"', "").replace(' output_names="y"', "")
        path.write_text(content)


def summing(path: Path) -> None:
    """y is the sum of each row: a result without a dimension but the batch."""
    from openvino import opset13 as operators

    x = operators.parameter([-1, 4], np.float32)
    x.output(0).tensor.set_names({"x"})
    y = operators.reduce_sum(x, operators.constant(np.array([1])), False)
    y.output(0).tensor.set_names({"y"})
    openvino.save_model(openvino.Model([operators.result(y)], [x], "summing"), path, compress_to_fp16=False)


def text(max_batch_size: int = 0, extra: str = "", **parameters: str) -> str:
    """A configuration."""
    batch = f"max_batch_size: {max_batch_size} " if max_batch_size else ""
    given = [
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in parameters.items()
    ]
    return f'backend: "openvino" {batch} {extra} {" ".join(given)}'


X = 'input { name: "%s" data_type: TYPE_%s dims: [ 4 ] } '
Y = 'output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }'
REFUSED = {
    "hint": (text(PERFORMANCE_HINT="FAST"), "must be one of LATENCY, THROUGHPUT, CUMULATIVE_THROUGHPUT, got 'FAST'"),
    "streams": (text(NUM_STREAMS="some"), "'NUM_STREAMS' must be AUTO, NUMA or a number, got 'some'"),
    "threads": (text(INFERENCE_NUM_THREADS="-1"), "'INFERENCE_NUM_THREADS' must be a number, got '-1'"),
    "extended": (text(CPU_EXTENSION_PATH="/tmp/layers.so"), "libraries with layers of their own are not loaded"),
    "named": (text(4, X % ("z", "FP32") + Y), "the file has no input 'z', it has x"),
    "typed": (text(4, X % ("x", "INT8") + Y), "input 'x' is TYPE_INT8 in the configuration and TYPE_FP32 in the file"),
    "missing": (text(), "has no model.xml or model.onnx"),
    "weightless": (text(), "needs its weights beside it, model.bin"),
    "broken": (text(), "cannot be read"),
    "strings": (text(), "strings are not served by this backend"),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    texts = {
        "bare": text(),
        "onnx": text(),
        "single": text(8, "dynamic_batching { max_queue_delay_microseconds: 200000 preferred_batch_size: 4 }"),
        "fixed": text(4, SKIP_OV_DYNAMIC_BATCHSIZE="YES"),
        # as Triton's tools for choosing a configuration write it
        "padded": text(
            4, X % ("x", "FP32") + Y,
            RESHAPE_IO_LAYERS="YES", SKIP_OV_DYNAMIC_BATCHSIZE="YES", ENABLE_BATCH_PADDING="YES",
        ),
        "tuned": text(4, NUM_STREAMS="1", INFERENCE_NUM_THREADS="1", CPU_BIND_THREAD="NO", PERFORMANCE_HINT="THROUGHPUT"),
        "reshaped": text(
            0,
            'input { name: "x" data_type: TYPE_FP32 dims: [ 3, 4 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 3, 4 ] }',
            RESHAPE_IO_LAYERS="YES",
        ),
        # in small letters, as public examples have them
        "small": text(4, SKIP_OV_DYNAMIC_BATCHSIZE="yes", ENABLE_BATCH_PADDING="yes", NUM_STREAMS="auto",
                      PERFORMANCE_HINT="latency", CPU_BIND_THREAD="no", HINT_BF16="no"),
        "unnamed": text(),
        "summed": text(),
        "saved": text(0, 'default_model_filename: "model.saved_model"'),
        "graph": text(0, 'default_model_filename: "model.pb"'),
        **{name: config for name, (config, _) in REFUSED.items()},
    }  # fmt: skip
    for name, config in texts.items():
        write_model(repository, name, config)
        if name not in ("onnx", "missing", "broken", "strings", "saved", "graph", "summed"):
            doubling(
                repository / name / "1/model.xml",
                1 if name in ("single", "reshaped") else -1,
                name != "unnamed",
            )
    summing(repository / "summed/1/model.xml")
    (repository / "saved/1/model.saved_model/variables").mkdir(parents=True)
    (repository / "saved/1/model.saved_model/saved_model.pb").write_bytes(tensorflow_models.saved_doubling())
    (repository / "graph/1/model.pb").write_bytes(tensorflow_models.doubling())
    (repository / "onnx/1/model.onnx").write_bytes(onnx_models.add_sub())
    (repository / "strings/1/model.onnx").write_bytes(onnx_models.identity("BYTES"))
    (repository / "broken/1/model.onnx").write_bytes(b"no network")
    (repository / "weightless/1/model.bin").unlink()
    (repository / "bare/config.pbtxt").unlink()
    with ServerProcess(repository, "--exit-on-error=false") as server:
        yield server


def ask(
    server: ServerProcess, model: str, rows: np.ndarray, taken: str = "x", given: str = "y"
) -> np.ndarray:
    """y of x."""
    tensor = httpclient.InferInput(taken, list(rows.shape), "FP32")
    tensor.set_data_from_numpy(rows)
    with httpclient.InferenceServerClient(server.http) as client:
        found: np.ndarray = client.infer(model, [tensor]).as_numpy(given)
    return found


ROWS = np.arange(16, dtype=np.float32).reshape(4, 4)


def test_files_tell_their_tensors(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        bare, single = client.get_model_config("bare"), client.get_model_config("single")
        onnx: Any = client.get_model_config("onnx")
    assert bare["max_batch_size"] == 4 and "dynamic_batching" in bare
    assert [(row["name"], row["data_type"], row["dims"]) for row in (*bare["input"], *bare["output"])] == [
        ("x", "TYPE_FP32", [4]), ("y", "TYPE_FP32", [4]),
    ]  # fmt: skip
    assert single["input"][0]["dims"] == [4]
    assert {row["name"] for row in onnx["input"]} == {"A", "B"} and onnx["max_batch_size"] == 4


def test_networks_answer(server: ServerProcess) -> None:
    for name in ("bare", "tuned", "padded", "small"):
        for rows in (1, 3, 4):
            assert (ask(server, name, ROWS[:rows]) == 2 * ROWS[:rows]).all()
    assert (ask(server, "reshaped", ROWS[:3]) == 2 * ROWS[:3]).all()
    inputs = [httpclient.InferInput(name, [2, 16], "INT32") for name in "AB"]
    for i, tensor in enumerate(inputs):
        tensor.set_data_from_numpy(np.full((2, 16), 3 - i, np.int32))
    with httpclient.InferenceServerClient(server.http) as client:
        response = client.infer("onnx", inputs)
    assert (response.as_numpy("SUM") == 5).all() and (response.as_numpy("DIFF") == 1).all()


def test_results_without_names_have_numbers(server: ServerProcess) -> None:
    assert (ask(server, "unnamed", ROWS, given="OUTPUT__0") == 2 * ROWS).all()


def test_a_result_of_one_value_for_each_row(server: ServerProcess) -> None:
    assert (ask(server, "summed", ROWS) == ROWS.sum(1, keepdims=True)).all()


def test_graphs_of_tensorflow(server: ServerProcess) -> None:
    assert (ask(server, "saved", ROWS) == 2 * ROWS).all()
    assert (ask(server, "graph", ROWS, "x:0", "y:0") == 2 * ROWS).all()


def test_requests_are_joined_and_divided(server: ServerProcess) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: ask(server, "single", ROWS[i : i + 1]), range(4)))
    assert (np.concatenate(answers) == 2 * ROWS).all()
    with httpclient.InferenceServerClient(server.http) as client:
        (row,) = client.get_inference_statistics("single")["model_stats"]
    assert row["inference_count"] == 4 and row["execution_count"] < 4


def test_a_network_of_one_size_of_batch_is_padded_on_request(server: ServerProcess) -> None:
    assert (ask(server, "fixed", ROWS) == 2 * ROWS).all()
    with pytest.raises(InferenceServerException, match="takes 4 rows, the batch has 3: ENABLE_BATCH_PADDING"):
        ask(server, "fixed", ROWS[:3])


def test_what_cannot_be_served_says_why(server: ServerProcess) -> None:
    rows = {row["name"]: row.get("reason", "") for row in json.loads(post(server, "index").body)}
    assert {name for name, reason in rows.items() if reason} == set(REFUSED)
    for name, (_, reason) in REFUSED.items():
        assert reason in rows[name]


def test_openvinos_makers_are_told_nothing(tmp_path: Path) -> None:
    """What its package tells them when it is imported begins with a number for the user, in a folder at home."""
    write_model(tmp_path / "models", "m", text())
    doubling(tmp_path / "models/m/1/model.xml", -1)
    home = tmp_path / "home"
    home.mkdir()
    with ServerProcess(tmp_path / "models", env={"HOME": str(home), "CI": "false"}) as server:
        assert ask(server, "m", ROWS).tolist() == (2 * ROWS).tolist()
        assert list(home.iterdir()) == []


def test_a_network_is_imported_with_its_weights(tmp_path: Path) -> None:
    doubling(tmp_path / "net.xml")
    (tmp_path / "folder").mkdir()
    doubling(tmp_path / "folder/other.xml")
    repository = tmp_path / "models"
    (tmp_path / "sums.onnx").write_bytes(onnx_models.add_sub())
    asked = [str(tmp_path / "sums.onnx"), "--backend", "openvino", "--repository", str(repository)]
    assert commands.run("import", asked) == 0
    assert 'backend: "openvino"' in (repository / "sums/config.pbtxt").read_text()
    for source in (tmp_path / "net.xml", tmp_path / "folder"):
        assert commands.run("import", [str(source), "--repository", str(repository)]) == 0
        names = sorted(path.name for path in (repository / source.stem / "1").iterdir())
        assert names == ["model.bin", "model.xml"]
