"""Modules that take and give more than tensors side by side, and modules in source, through the server.
`make test-backends` runs these, where PyTorch is installed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.support.control import load, post
from tests.support.repository import write_model
from tests.support.server import ServerProcess

torch = pytest.importorskip("torch", reason="make test-backends")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Keyed(torch.nn.Module):
    """A dictionary in, a dictionary out."""

    def forward(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": tensors["a"] + tensors["b"], "difference": tensors["a"] - tensors["b"]}


class Listed(torch.nn.Module):
    """A list in, a list out."""

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensors[0] + tensors[1], tensors[0] - tensors[1]]


class Nested(torch.nn.Module):
    """An argument that is a pair, one with a name alone, a number that is none, and results in a dictionary and a tuple."""

    def forward(self, pair, times, *, less, what=None):  # type: ignore[no-untyped-def]
        a, b = pair
        return {"sum": a + b, "more": (a * times, b - less, times)}


class Counting(torch.nn.Module):
    """A result that is no tensor, beside one."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x + 1, 3


class Rowed(torch.nn.Module):
    """A result that has no dimension but the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1)


class Summing(torch.nn.Module):
    """The sum of a sequence so far."""

    def forward(
        self, x: torch.Tensor, start: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + torch.where(start > 0, torch.zeros_like(before), before)
        return total * 10, total


SOURCE = """import torch
from torch.nn import Linear  # nobody's model, though a Module


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = Linear(3, 2)

    def forward(self, x, less=None):
        return self.linear(x) if less is None else self.linear(x) - less


class Other(torch.nn.Module):
    pass
"""


def tensors(side: str, *names: str, size: int = 3) -> str:
    return "".join(f'{side} {{ name: "{name}" data_type: TYPE_FP32 dims: [ {size} ] }} ' for name in names)


TWO = tensors("input", "INPUT__0", "INPUT__1")
SOURCED = f'backend: "pytorch" runtime: "model.py" max_batch_size: 8 {tensors("input", "INPUT0")}'
CONFIGS = {
    "keyed": "",
    "listed": "",
    "nested": "",
    "rowed": "",
    "ways": f'backend: "pytorch" max_batch_size: 8 {tensors("input", "KWARGS[less]", "ARGS[0][1]", "ARGS[0][0]")}'
    + tensors("output", "RESULT[more][1]", "RESULT[sum]"),
    "scripted": f'platform: "pytorch_libtorch" max_batch_size: 8 {TWO}{tensors("output", "OUTPUT__1", "OUTPUT__0")}',
    "source": SOURCED
    + tensors("output", "OUTPUT0", size=2)
    + 'parameters { key: "TORCH_COMPILE_OPTIONAL_PARAMETERS" value { string_value: "{\\"disable\\": true}" } }'
    + 'parameters { key: "NUM_THREADS" value { string_value: "1" } }',
    "sourced_script": f'backend: "pytorch" runtime: "model.py" max_batch_size: 8 {TWO}{tensors("output", "OUTPUT__0")}',
    "both_files": "",
    # as a Triton server's tests of sequences have it
    "summing": f'platform: "pytorch_libtorch" max_batch_size: 4 {tensors("input", "INPUT__0")}{tensors("output", "OUTPUT__0")}'
    + 'sequence_batching { control_input { name: "START__1" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } } '
    + 'state { input_name: "STATE__2" output_name: "OUTPUT_STATE__1" data_type: TYPE_FP32 dims: [ 3 ] } }',
}
COUNTED = f'backend: "pytorch" max_batch_size: 8 {tensors("input", "x")}{tensors("output", "OUTPUT__1")}'
REFUSED = {
    "less": (
        f'backend: "pytorch" max_batch_size: 8 {TWO}{tensors("output", "OUTPUT__0")}',
        "takes 3 tensors (ARGS[0][0], ARGS[0][1], KWARGS[less]), the configuration has 2 inputs",
    ),
    "more": (
        f'backend: "pytorch" max_batch_size: 8 {tensors("input", "less", "pair_0", "pair_1")}'
        + tensors("output", "OUTPUT__4"),
        "output 'OUTPUT__4' is none of the file's 4: RESULT[sum]",
    ),
    "counting": (COUNTED, "output 'OUTPUT__1' is no tensor: the module gives int"),
    "library": (
        COUNTED.replace("OUTPUT__1", "OUTPUT__0")
        + 'parameters { key: "MODEL_INIT_LIBRARY" value { string_value: "/lib/x.so" } }',
        "parameter 'MODEL_INIT_LIBRARY': libraries of a model's own are not loaded",
    ),
    "pickle": (SOURCED + tensors("output", "OUTPUT0", size=2), "must hold the weights of Net, torch.save(model.state_dict()"),
    "options": (
        CONFIGS["source"].replace('{\\"disable\\": true}', "[1]"),
        "parameter 'TORCH_COMPILE_OPTIONAL_PARAMETERS' must be an object",
    ),
    "cut": (COUNTED, "it begins like an archive that was cut off"),
}  # fmt: skip


def exported(
    module: torch.nn.Module, *args: object, shapes: object, **kwargs: object
) -> torch.export.ExportedProgram:
    return torch.export.export(module.eval(), args, kwargs, dynamic_shapes=shapes)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    for name, config in (CONFIGS | {name: config for name, (config, _) in REFUSED.items()}).items():
        write_model(repository, name, config or 'backend: "pytorch"')
    # two tensors: what is one when it is exported is one for good
    one, two, rows = torch.ones(2, 3), torch.ones(2, 3), {0: torch.export.Dim("batch", max=16)}
    both = {"a": one, "b": two}
    torch.export.save(
        exported(Keyed(), both, shapes=({"a": rows, "b": rows},)), repository / "keyed/1/model.pt2"
    )
    listed = exported(Listed(), [one, two], shapes=([rows, rows],))
    torch.export.save(listed, repository / "listed/1/model.pt2")
    torch.export.save(exported(Rowed(), one, shapes=(rows,)), repository / "rowed/1/model.pt2")
    shapes = {"pair": (rows, rows), "times": None, "less": rows}
    nested = exported(Nested(), (one, two), 3, less=torch.ones(2, 3), shapes=shapes)
    for name in ("nested", "ways", "less", "more"):
        torch.export.save(nested, repository / name / "1/model.pt2")
    scripted = torch.jit.script(Listed())
    torch.jit.script(Summing()).save(repository / "summing/1/model.pt")
    for name in ("scripted", "sourced_script"):
        scripted.save(repository / name / "1/model.pt")
    torch.jit.script(Counting()).save(repository / "both_files/1/model.pt")
    torch.export.save(listed, repository / "both_files/1/model.pt2")
    (repository / "both_files/config.pbtxt").write_text(
        f'platform: "pytorch_libtorch" {tensors("input", "x")}{tensors("output", "OUTPUT__0")}'
    )
    for name in ("counting", "library", "cut"):
        torch.jit.script(Counting()).save(repository / name / "1/model.pt")
    whole = (repository / "cut/1/model.pt").read_bytes()
    (repository / "cut/1/model.pt").write_bytes(whole[: len(whole) // 2])
    for name in ("source", "pickle", "options"):
        (repository / name / "1/model.py").write_text(SOURCE)
    torch.manual_seed(1)
    torch.save(
        torch.nn.ModuleDict({"linear": torch.nn.Linear(3, 2)}).state_dict(), repository / "source/1/model.pt"
    )
    torch.save(torch.nn.Linear(3, 2), repository / "pickle/1/model.pt")
    flags = ("--exit-on-error=false", "--model-control-mode=explicit")
    with ServerProcess(repository, *flags, env=dict(os.environ, PYTHONWARNINGS="")) as server:
        for folder in sorted(repository.iterdir()):
            load(server, folder.name)
        yield server


A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.full((2, 3), 2, np.float32)


def ask(server: ServerProcess, model: str, **arrays: np.ndarray) -> dict[str, list[list[float]]]:
    """All outputs of a model, over both protocols."""
    answers = []
    for library, url in ((httpclient, server.http), (grpcclient, server.grpc)):
        inputs = []
        for name, array in arrays.items():
            inputs.append(library.InferInput(name, list(array.shape), "FP32"))
            inputs[-1].set_data_from_numpy(array)
        with library.InferenceServerClient(url) as client:
            response = client.infer(model, inputs)
            config = client.get_model_config(model)
            if library is grpcclient:
                names = [row.name for row in config.config.output]
            else:
                names = [row["name"] for row in config["output"]]
            answers.append({name: response.as_numpy(name).tolist() for name in names})
    assert answers[0] == answers[1]
    return answers[0]


SUM, DIFFERENCE = (A + B).tolist(), (A - B).tolist()


def test_dictionaries_and_lists_of_exported_modules(server: ServerProcess) -> None:
    assert ask(server, "keyed", a=A, b=B) == {"sum": SUM, "difference": DIFFERENCE}
    assert ask(server, "listed", tensors_0=A, tensors_1=B) == {"OUTPUT__0": SUM, "OUTPUT__1": DIFFERENCE}


def test_a_result_of_one_value_for_each_row(server: ServerProcess) -> None:
    assert ask(server, "rowed", x=A) == {"OUTPUT__0": A.sum(1, keepdims=True).tolist()}


def test_structures_in_structures(server: ServerProcess) -> None:
    found = ask(server, "nested", pair_0=A, pair_1=B, less=A)
    assert found == {"OUTPUT__0": SUM, "OUTPUT__1": (A * 3).tolist(), "OUTPUT__2": (B - A).tolist()}
    given = {"KWARGS[less]": A, "ARGS[0][1]": B, "ARGS[0][0]": A}
    assert ask(server, "ways", **given) == {"RESULT[more][1]": (B - A).tolist(), "RESULT[sum]": SUM}


def test_lists_of_scripted_modules(server: ServerProcess) -> None:
    assert ask(server, "scripted", INPUT__0=A, INPUT__1=B) == {"OUTPUT__1": DIFFERENCE, "OUTPUT__0": SUM}


def test_a_module_in_source_with_its_weights(server: ServerProcess) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        expected = torch.nn.Linear(3, 2)(torch.from_numpy(A)).numpy()
    np.testing.assert_allclose(ask(server, "source", INPUT0=A)["OUTPUT0"], expected, 1e-5, 1e-6)
    assert ask(server, "sourced_script", INPUT__0=A, INPUT__1=B) == {"OUTPUT__0": SUM}


def test_sequences_have_their_controls_and_states(server: ServerProcess) -> None:
    tensor = grpcclient.InferInput("INPUT__0", [1, 3], "FP32")
    tensor.set_data_from_numpy(A[1:])
    found = []
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for _ in range(2):
            for step in range(3):
                more = {"sequence_id": 5, "sequence_start": step == 0, "sequence_end": step == 2}
                found.append(client.infer("summing", [tensor], **more).as_numpy("OUTPUT__0").tolist())
    assert found == [(A[1:] * times).tolist() for times in (10, 20, 30)] * 2


def test_the_platform_chooses_between_two_files(server: ServerProcess) -> None:
    assert ask(server, "both_files", x=A[0]) == {"OUTPUT__0": (A[0] + 1).tolist()}


def test_what_cannot_be_served_says_why(server: ServerProcess) -> None:
    rows = {row["name"]: row.get("reason", "") for row in json.loads(post(server, "index").body)}
    assert {name for name, reason in rows.items() if reason} == set(REFUSED)
    for name, (_, reason) in REFUSED.items():
        assert reason in rows[name], (name, rows[name])
