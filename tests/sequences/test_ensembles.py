"""Sequences through an ensemble: it answers as the sequence model of its step does alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.sequences.models import sequence_config
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers

IO = (
    'max_batch_size: 4 input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ] '
    'output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ] '
)
STEP = (
    '{{ model_name: "{}" model_version: -1 input_map {{ key: "INPUT" value: "{}" }} '
    'output_map {{ key: "OUTPUT" value: "{}" }} }}'
)
START, END = {"sequence_start": True}, {"sequence_end": True}
# (value, batch, what the client says of its sequence), in this order; sequences end before the next run
REQUESTS: list[tuple[int, int, dict[str, Any]]] = [
    (1, 1, {"sequence_id": 7, **START}),
    (2, 1, {"sequence_id": 7}),
    (10, 1, {"sequence_id": 8, **START, **END}),
    (3, 1, {"sequence_id": 7, **END}),
    (4, 1, {"sequence_id": 7}),  # it has ended
    (4, 1, {"sequence_id": 7, **END}),
    (4, 1, {}),  # no sequence at all
    (4, 1, START),
    (4, 2, {"sequence_id": 7, **START}),  # two requests in one
    (5, 1, {"sequence_id": 7, **START}),
    (6, 1, {"sequence_id": 7, **START}),  # begins anew
    (7, 1, {"sequence_id": 7, **END}),
    (8, 1, {"sequence_id": "seven", **START}),  # the model's CORRID is a number
]
ANSWERS = [1, 3, 10, 6, "START flag", "START flag", "correlation ID", "correlation ID", "batch-size 1", 5, 6, 13,
           "data-type"]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    write_model(repository, "direct", sequence_config("direct { }", 4))
    write_model(repository, "oldest", sequence_config("oldest { max_candidate_sequences: 4 }", 4))
    write_model(repository, "same", f'backend: "identity" {IO}')
    for model in ("direct", "oldest"):
        for name, steps in (
            (f"only_{model}", [STEP.format(model, "INPUT", "OUTPUT")]),
            (f"last_{model}", [STEP.format("same", "INPUT", "m"), STEP.format(model, "m", "OUTPUT")]),
            (f"first_{model}", [STEP.format(model, "INPUT", "m"), STEP.format("same", "m", "OUTPUT")]),
        ):
            text = f'platform: "ensemble" {IO} ensemble_scheduling {{ step [ {", ".join(steps)} ] }}'
            write_model(repository, name, text, {})
    with ServerProcess(repository) as process:
        yield process


def tensor(protocol: Any, value: int, batch: int) -> list[Any]:
    made = protocol.InferInput("INPUT", [batch, 1], "INT32")
    made.set_data_from_numpy(np.full((batch, 1), value, np.int32))
    return [made]


def unary(server: ServerProcess, model: str, protocol: Any) -> list[Any]:
    """For each of REQUESTS the sum, or the error's text and status."""
    address = server.http if protocol is httpclient else server.grpc
    outcomes: list[Any] = []
    with protocol.InferenceServerClient(address) as client:
        for value, batch, sequence in REQUESTS:
            try:
                result = client.infer(model, tensor(protocol, value, batch), **sequence)
            except InferenceServerException as error:
                outcomes.append((error.message(), error.status()))
            else:
                outcomes.append(int(result.as_numpy("OUTPUT")[0, 0]))
    return outcomes


def streamed(server: ServerProcess, model: str) -> list[Any]:
    """The same over one gRPC stream."""
    outcomes: list[Any] = []
    with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client) as answers:
        for value, batch, sequence in REQUESTS:
            client.async_stream_infer(model, tensor(grpcclient, value, batch), **sequence)
            got = answers.next()
            error = isinstance(got, InferenceServerException)
            outcomes.append((got.message(), None) if error else int(got.as_numpy("OUTPUT")[0, 0]))
    return outcomes


@pytest.mark.parametrize("form", ["http", "grpc", "stream"])
@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_an_ensemble_answers_as_its_sequence_model_alone(
    server: ServerProcess, model: str, form: str
) -> None:
    def run(name: str) -> list[Any]:
        if form == "stream":
            return streamed(server, name)
        return unary(server, name, httpclient if form == "http" else grpcclient)

    alone = run(model)
    for outcome, answer in zip(alone, ANSWERS, strict=True):
        assert outcome == answer if isinstance(answer, int) else answer in outcome[0], alone
    for place in ("only", "last", "first"):
        name = f"{place}_{model}"
        assert run(name) == [
            (f"in ensemble '{name}', {outcome[0]}", outcome[1]) if isinstance(outcome, tuple) else outcome
            for outcome in alone
        ]
