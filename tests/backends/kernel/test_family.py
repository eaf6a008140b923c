"""Every kernel of the family on the host, through a real server, against numpy in float64."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

from tests.backends.kernel.family import FAMILY, Arrays, Case
from tests.support.server import ServerProcess

BATCHING = "instance_group { kind: KIND_CPU } dynamic_batching { max_queue_delay_microseconds: 2000 }"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("family")
    for case in FAMILY:
        case.write(repository, " " + BATCHING)
    with ServerProcess(repository) as process:
        yield process


def infer(client: grpcclient.InferenceServerClient, model: str, arrays: Arrays) -> Arrays:
    inputs = []
    for name, array in arrays.items():
        tensor = grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    result = client.infer(model, inputs)
    return {o.name: result.as_numpy(o.name) for o in result.get_response().outputs}


def check(case: Case, arrays: Arrays, got: Arrays) -> None:
    expected = case.reference(arrays)
    assert set(got) == set(expected)
    for name, values in expected.items():
        assert got[name].shape == values.shape
        np.testing.assert_allclose(
            got[name].astype(np.float64), values.astype(np.float64), rtol=case.rtol, atol=case.atol
        )


@pytest.mark.parametrize("case", FAMILY, ids=lambda c: c.name)
def test_against_numpy(server: ServerProcess, case: Case) -> None:
    rng = np.random.default_rng(7)
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for batch in (1, 3):
            if case.name == "votes" and batch > 1:
                continue
            arrays = case.make(rng, batch)
            check(case, arrays, infer(client, case.name, arrays))


@pytest.mark.parametrize("case", [c for c in FAMILY if c.name != "votes"], ids=lambda c: c.name)
def test_requests_batched_together_get_their_own_rows(server: ServerProcess, case: Case) -> None:
    rng = np.random.default_rng(11)
    sent = [case.make(rng, 1 + i % 3) for i in range(6)]
    if case.name in ("elementwise", "layernorm"):  # rows of parameters are shared by a whole batch
        for arrays in sent[1:]:
            for name in ("B", "SCALE", "SHIFT"):
                if name in arrays:
                    arrays[name] = np.repeat(sent[0][name][:1], len(arrays["X"]), axis=0)
    with grpcclient.InferenceServerClient(server.grpc) as client, ThreadPoolExecutor(6) as pool:
        for arrays, got in zip(sent, pool.map(lambda a: infer(client, case.name, a), sent), strict=True):
            check(case, arrays, got)
