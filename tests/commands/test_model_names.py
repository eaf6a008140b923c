"""Commands that ask a server for a model whose name has signs: the server matches it as it is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from neptrio import commands
from tests.sequences.models import sequence_config
from tests.support.repository import write_model
from tests.support.server import ServerProcess

NAME = "a:b+c@d(%41)&=[e]"
TENSOR = {"name": "IN", "dtype": "INT32", "data": "1", "shape": "1,1"}
TRACE = [
    {"id": 1, "model_name": NAME, "model_version": 1, "timestamps": [{"name": "REQUEST_END", "ns": 9}]},
    {"id": 1, "activity": "TENSOR_QUEUE_INPUT", "tensor": TENSOR},
    {"id": 1, "activity": "TENSOR_BACKEND_OUTPUT", "tensor": {**TENSOR, "name": "OUT"}},
]
IDENTITY = """
backend: "identity" max_batch_size: 8
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("named")
    write_model(folder, NAME, IDENTITY)
    write_model(folder, f"{NAME}s", sequence_config("direct { }", 4))
    with ServerProcess(folder) as process:
        yield process


@pytest.mark.parametrize(
    "command",
    [
        ["explain", NAME, "--url"],
        ["sequences", f"{NAME}s", "--url"],
        ["top", "--once", "--interval=0.001", "--model", NAME],
        ["trace", "replay", "FILE", "--url"],
        ["explain", NAME, "--plot=PAGE", "--seconds=0.01", "--concurrency=1", "--batch-sizes=1", "--url"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_signs_in_the_name_of_a_model(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    (tmp_path / "t").write_text(json.dumps(TRACE))
    places = {"FILE": str(tmp_path / "t"), "--plot=PAGE": f"--plot={tmp_path / 'page.html'}"}
    arguments = [places.get(word, word) for word in command]
    assert commands.run(arguments[0], [*arguments[1:], server.http]) == 0, capsys.readouterr().err
