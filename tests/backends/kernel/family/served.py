"""What holds for every member of the family that a server serves, on the host as on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

from tests.backends.kernel.family import FAMILY, Arrays, Case
from tests.support.server import ServerProcess

BATCHED = [case for case in FAMILY if case.name != "votes"]


def infer(client: grpcclient.InferenceServerClient, model: str, arrays: Arrays) -> Arrays:
    """The outputs for these inputs."""
    inputs = []
    for name, array in arrays.items():
        tensor = grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    result = client.infer(model, inputs)
    return {o.name: result.as_numpy(o.name) for o in result.get_response().outputs}


def check(case: Case, arrays: Arrays, got: Arrays) -> None:
    """The outputs are those of the reference."""
    expected = case.reference(arrays)
    assert set(got) == set(expected)
    for name, values in expected.items():
        assert got[name].shape == values.shape
        np.testing.assert_allclose(
            got[name].astype(np.float64), values.astype(np.float64), rtol=case.rtol, atol=case.atol
        )


def check_alone(server: ServerProcess, case: Case) -> None:
    """Requests one after the other, of several batch sizes."""
    rng = np.random.default_rng(7)
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for batch in (1, 3) if case in BATCHED else (1,):
            arrays = case.make(rng, batch)
            check(case, arrays, infer(client, case.name, arrays))


def check_together(server: ServerProcess, case: Case) -> None:
    """Requests at once, which the batcher brings together: each gets its own rows."""
    rng = np.random.default_rng(11)
    sent = [case.make(rng, 1 + i % 3) for i in range(6)]
    if case.name in ("elementwise", "layernorm"):  # rows of parameters are shared by a whole batch
        for arrays in sent[1:]:
            for name in {"B", "SCALE", "SHIFT"} & set(arrays):
                arrays[name] = np.repeat(sent[0][name][:1], len(arrays["X"]), axis=0)
    with grpcclient.InferenceServerClient(server.grpc) as client, ThreadPoolExecutor(6) as pool:
        for arrays, got in zip(sent, pool.map(lambda a: infer(client, case.name, a), sent), strict=True):
            check(case, arrays, got)
