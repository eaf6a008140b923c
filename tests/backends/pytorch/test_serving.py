"""Modules of PyTorch through the server. `make test-backends` runs these, where PyTorch is installed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio import commands
from tests.support.control import load, post
from tests.support.repository import write_model
from tests.support.server import ServerProcess

torch = pytest.importorskip("torch", reason="make test-backends")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Scaled(torch.nn.Module):
    """Two inputs, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) * scale, x.sum(1, keepdim=True)


class Keyed(torch.nn.Module):
    """A dictionary in, a dictionary out."""

    def forward(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": tensors["a"] + tensors["b"], "unused": tensors["a"]}


class Shouting(torch.nn.Module):
    """Texts in, texts and their lengths out."""

    def forward(self, texts: list[str]) -> tuple[list[str], torch.Tensor]:
        return [text + "!" for text in texts], torch.tensor([[len(text)] for text in texts])


class Same(torch.nn.Module):
    """What came."""

    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
        return [a, b, c]


class Summed(torch.nn.Module):
    """A result without the batch's dimension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0, keepdim=True)


def tensors(*rows: str) -> str:
    """`name:FP32:4` rows as those of a configuration."""
    made = []
    for row in rows:
        name, kind, dims = row.split(":")
        made.append(f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] }}')
    return f"[ {', '.join(made)} ]"


def parameter(key: str, value: str) -> str:
    return f' parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


MODULE = Scaled().eval()
TWO_WAYS = tensors("INPUT__0:FP32:4", "INPUT__1:FP32:1"), tensors("OUTPUT__0:FP32:2", "OUTPUT__1:FP32:1")
SCRIPT = f'platform: "pytorch_libtorch" max_batch_size: 8 input {TWO_WAYS[0]} output {TWO_WAYS[1]}'
REFUSED = {
    "pickled": ("", "was made by torch.save(): it is a pickle"),
    "silent": ("", "does not say which tensors it takes (x: Tensor, scale: Tensor): write input into the configuration"),
    "numbered": (
        f"max_batch_size: 8 input {TWO_WAYS[0]} output {tensors('OUTPUT__0:FP32:2', 'OUTPUT__5:FP32:1')}",
        "output 'OUTPUT__5' is none of the module's results: it gives 2",
    ),
    "flag": (SCRIPT.partition('" ')[2] + parameter("INFERENCE_MODE", "maybe"), "'INFERENCE_MODE' must be 'true' or"),
    "threads": (SCRIPT.partition('" ')[2] + parameter("INTRA_OP_THREAD_COUNT", "0"), "must be a number above 0, got '0'"),
    "missing": ("", "must hold one of model.pt, model.pt2"),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    for name in ("exported", "script", "named", "keyed", "texts", "summed", "same", *REFUSED):
        write_model(repository, name, f'backend: "pytorch" {REFUSED.get(name, ("",))[0]}')
    batch = torch.export.Dim("batch", max=64)
    program = torch.export.export(
        MODULE, (torch.ones(2, 4), torch.ones(2, 1)), dynamic_shapes={"x": {0: batch}, "scale": {0: batch}}
    )
    torch.export.save(program, repository / "exported/1/model.pt2")
    (repository / "exported/config.pbtxt").unlink()
    scripted = torch.jit.script(MODULE)
    for name in ("script", "named", "silent", "numbered", "flag", "threads"):
        scripted.save(repository / name / "1/model.pt")
    (repository / "script/config.pbtxt").write_text(
        SCRIPT
        + " dynamic_batching { max_queue_delay_microseconds: 200000 preferred_batch_size: 4 }"
        + " instance_group { count: 2 kind: KIND_CPU }"
        + parameter("INTRA_OP_THREAD_COUNT", "1")
        + parameter("INTER_OP_THREAD_COUNT", "1")
        + parameter("DISABLE_OPTIMIZED_EXECUTION", "true")
        + parameter("ENABLE_WEIGHT_SHARING", "true")
        + parameter("ENABLE_JIT_EXECUTOR", "true")
    )
    # in another order than forward's, and with the results by their order
    (repository / "named/config.pbtxt").write_text(
        f'backend: "pytorch" max_batch_size: 0 input {tensors("scale:FP32:-1,1", "x:FP32:-1,4")} '
        f"output {tensors('scaled:FP32:-1,2', 'rows:FP32:-1,1')}"
    )
    torch.jit.script(Keyed()).save(repository / "keyed/1/model.pt")
    (repository / "keyed/config.pbtxt").write_text(
        f'backend: "pytorch" max_batch_size: 4 input {tensors("b:INT64:-1", "a:INT64:-1")} output {tensors("sum:INT64:-1")}'
    )
    torch.jit.script(Shouting()).save(repository / "texts/1/model.pt")
    (repository / "texts/config.pbtxt").write_text(
        f'backend: "pytorch" max_batch_size: 4 input {tensors("IN:STRING:1")} '
        f"output {tensors('OUT:STRING:1', 'SIZE:INT64:1')}"
    )
    torch.jit.script(Summed()).save(repository / "summed/1/model.pt")
    (repository / "summed/config.pbtxt").write_text(
        f'backend: "pytorch" max_batch_size: 4 input {tensors("x:FP32:4")} output {tensors("y:FP32:4")}'
    )
    torch.jit.script(Same()).save(repository / "same/1/model.pt")
    (repository / "same/config.pbtxt").write_text(
        f'backend: "pytorch" max_batch_size: 4 input {tensors("a:BOOL:2", "b:BF16:2", "c:FP16:2")} '
        f"output {tensors('A__0:BOOL:2', 'A__1:BF16:2', 'A__2:FP16:2')}"
    )
    torch.save(MODULE, repository / "pickled/1/model.pt")
    flags = ("--exit-on-error=false", "--model-control-mode=explicit")
    with ServerProcess(repository, *flags, env=dict(os.environ, PYTHONWARNINGS="")) as server:
        for folder in sorted(
            repository.iterdir()
        ):  # one after the other: each imports PyTorch, some of them twice
            load(server, folder.name)
        yield server


def ask(server: ServerProcess, model: str, **arrays: np.ndarray) -> Any:
    """The response of a model."""
    inputs = []
    for name, array in arrays.items():
        kind = "BYTES" if array.dtype == object else {"f": "FP32", "i": "INT64"}[array.dtype.kind]
        inputs.append(httpclient.InferInput(name, list(array.shape), kind))
        inputs[-1].set_data_from_numpy(array)
    with httpclient.InferenceServerClient(server.http) as client:
        return client.infer(model, inputs)


X = np.random.default_rng(3).normal(size=(5, 4)).astype(np.float32)
SCALE = np.arange(1, 6, dtype=np.float32).reshape(5, 1)


def expected(x: np.ndarray, scale: np.ndarray) -> list[np.ndarray]:
    with torch.no_grad():
        return [value.numpy() for value in MODULE(torch.from_numpy(x), torch.from_numpy(scale))]


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, 1e-5, 1e-6)


def test_an_exported_module_tells_its_tensors(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        config = client.get_model_config("exported")
        assert client.get_model_metadata("exported")["platform"] == "pytorch_libtorch"
    assert config["max_batch_size"] == 64 and "dynamic_batching" in config
    rows = [(row["name"], row["data_type"], row["dims"]) for row in (*config["input"], *config["output"])]
    assert rows == [
        ("x", "TYPE_FP32", [4]), ("scale", "TYPE_FP32", [1]),
        ("OUTPUT__0", "TYPE_FP32", [2]), ("OUTPUT__1", "TYPE_FP32", [1]),
    ]  # fmt: skip
    for rows in (5, 1):
        response = ask(server, "exported", x=X[:rows], scale=SCALE[:rows])
        for i, wanted in enumerate(expected(X[:rows], SCALE[:rows])):
            close(response.as_numpy(f"OUTPUT__{i}"), wanted)


def test_requests_are_joined_and_divided(server: ServerProcess) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(
                lambda i: ask(server, "script", INPUT__0=X[i : i + 1], INPUT__1=SCALE[i : i + 1]), range(4)
            )
        )
    for i, answer in enumerate(answers):
        for place, wanted in enumerate(expected(X[i : i + 1], SCALE[i : i + 1])):
            close(answer.as_numpy(f"OUTPUT__{place}"), wanted)
    with httpclient.InferenceServerClient(server.http) as client:
        (row,) = client.get_inference_statistics("script")["model_stats"]
    assert row["inference_count"] == 4 and row["execution_count"] < 4


def test_arguments_by_their_names(server: ServerProcess) -> None:
    response = ask(server, "named", scale=SCALE, x=X)
    for name, wanted in zip(("scaled", "rows"), expected(X, SCALE), strict=True):
        close(response.as_numpy(name), wanted)


def test_dictionaries_and_texts(server: ServerProcess) -> None:
    a, b = np.arange(6).reshape(2, 3), np.arange(10, 16).reshape(2, 3)
    assert (ask(server, "keyed", a=a, b=b).as_numpy("sum") == a + b).all()
    response = ask(server, "texts", IN=np.array([["a"], ["höre"]], object))
    assert [value.decode() for value in response.as_numpy("OUT").ravel()] == ["a!", "höre!"]
    assert response.as_numpy("SIZE").tolist() == [[1], [5]]  # TorchScript counts bytes


def test_types_that_are_not_everywhere(server: ServerProcess) -> None:
    arrays = (
        np.array([[True, False]]),
        np.array([[1.5, -2]], ml_dtypes.bfloat16),
        np.array([[0.5, 3]], np.float16),
    )
    inputs = []
    for name, kind, array in zip("abc", ("BOOL", "BF16", "FP16"), arrays, strict=True):
        inputs.append(httpclient.InferInput(name, [1, 2], kind))
        inputs[-1].set_data_from_numpy(array)
    with httpclient.InferenceServerClient(server.http) as client:
        response = client.infer("same", inputs)
    for i, array in enumerate(arrays):
        assert (response.as_numpy(f"A__{i}") == array).all()


def test_a_result_without_the_batch_is_refused(server: ServerProcess) -> None:
    with pytest.raises(InferenceServerException, match="its first dimension must be the batch"):
        ask(server, "summed", x=X[:2])


def test_what_cannot_be_served_says_why(server: ServerProcess) -> None:
    rows = {row["name"]: row.get("reason", "") for row in json.loads(post(server, "index").body)}
    assert {name for name, reason in rows.items() if reason} == set(REFUSED)
    for name, (_, reason) in REFUSED.items():
        assert reason in rows[name]
    for command in (
        "torch.export.save(torch.export.export(",
        "torch.jit.script(model.eval()).save('model.pt')",
    ):
        assert command in rows["pickled"]


def test_an_exported_module_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.export.save(torch.export.export(MODULE, (torch.ones(2, 4), torch.ones(2, 1))), tmp_path / "net.pt2")
    assert commands.run("import", [str(tmp_path / "net.pt2"), "--repository", str(tmp_path / "models")]) == 0
    assert "input   x  FP32 [2, 4]" in capsys.readouterr().out
    torch.jit.script(MODULE).save(tmp_path / "net.pt")
    assert commands.run("import", [str(tmp_path / "net.pt"), "--repository", str(tmp_path / "other")]) == 2
    assert (
        f"{tmp_path}/net.pt does not say which tensors it takes (x: Tensor, scale: Tensor)"
        in capsys.readouterr().err
    )


def scripted(
    module: torch.nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str], *inputs: str
) -> tuple[int, str]:
    """The exit status of importing a module, and what was said."""
    torch.jit.script(module).save(tmp_path / "net.pt")
    flags = [flag for one in inputs for flag in ("--input", one)]
    status = commands.run(
        "import", [str(tmp_path / "net.pt"), "--repository", str(tmp_path / "models"), *flags]
    )
    return status, "".join(capsys.readouterr())


def test_a_script_is_imported_with_inputs_that_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = scripted(MODULE, tmp_path, capsys, "x:FP32:-1,4", "scale:FP32:-1,1")
    assert status == 0, said
    for line in (
        "input   x  FP32 [-1, 4]",
        "output  OUTPUT__0  FP32 [-1, 2]",
        "output  OUTPUT__1  FP32 [-1, 1]",
    ):
        assert line in said
    with ServerProcess(tmp_path / "models", env=dict(os.environ, PYTHONWARNINGS="")) as server:
        response = ask(server, "net", x=X, scale=SCALE)
    for i, wanted in enumerate(expected(X, SCALE)):
        close(response.as_numpy(f"OUTPUT__{i}"), wanted)


def test_a_script_that_does_not_batch_is_imported_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = scripted(Summed(), tmp_path, capsys, "x:FP32:-1,4")
    assert status == 0, said
    assert "input   x  FP32 [-1, 4]" in said and "output  OUTPUT__0  FP32 [1, 4]" in said
    assert "max_batch_size" not in (tmp_path / "models/net/config.pbtxt").read_text()
