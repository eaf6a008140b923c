"""kserve's inference clients over every verb they have: prints the verbs as JSON.

    python -m tests.clients.kserve_verbs HTTP GRPC

A program of its own, because kserve and tritonclient register the same protobuf messages.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig

A, B = np.arange(16, dtype=np.int32).reshape(1, 16), np.ones((1, 16), np.int32)


def request(binary: bool) -> InferRequest:
    inputs = []
    for name, value in (("INPUT0", A), ("INPUT1", B)):
        made = InferInput(name, [1, 16], "INT32")
        made.set_data_from_numpy(value, binary_data=binary)
        inputs.append(made)
    return InferRequest("simple", inputs, request_id="mine")


def check(answer: Any) -> None:
    sums, differences = (output.as_numpy().reshape(1, 16) for output in answer.outputs)
    np.testing.assert_array_equal(sums, A + B)
    np.testing.assert_array_equal(differences, A - B)
    assert answer.id == "mine" and answer.model_name == "simple"


def verbs(client: Any) -> set[str]:
    return {name for name in dir(type(client)) if not name.startswith("_")}


async def rest(address: str) -> set[str]:
    base = f"http://{address}"
    client = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
    # this client reads {"live": true} of the answer, and a Triton server's has no body (docs/protocol/observed.md 2)
    for verb in (client.is_server_live, client.is_server_ready):
        try:
            await verb(base)
        except json.JSONDecodeError:
            pass
        else:
            raise AssertionError("health is answered with JSON now: let this test check it")
    assert await client.is_model_ready(base, "simple")
    for binary in (False, True):
        check(await client.infer(base, request(binary), model_name="simple"))
    try:
        await client.infer(base, request(False), model_name="nothing")
    except Exception as error:
        assert "404" in str(error), error
    else:
        raise AssertionError("an unknown model was executed")
    try:  # `explain` is a verb of KServe's v1 protocol, which this server does not have
        await client.explain(base, "simple", {"instances": []})
    except Exception as error:
        assert "v2" in str(error).lower() or "404" in str(error), error
    else:
        raise AssertionError("explain was answered")
    made = client.close()
    if inspect.isawaitable(made):
        await made
    return verbs(client) - {
        "is_server_live",
        "is_server_ready",
        "is_model_ready",
        "infer",
        "explain",
        "close",
    }


async def grpc(address: str) -> set[str]:
    client = InferenceGRPCClient(address, retries=0)
    assert await client.is_server_live() and await client.is_server_ready()
    assert await client.is_model_ready("simple")
    for binary in (False, True):
        check(await client.infer(request(binary)))
    made = client.close()
    if inspect.isawaitable(made):
        await made
    return verbs(client) - {"is_server_live", "is_server_ready", "is_model_ready", "infer", "close"}


async def main() -> None:
    http_address, grpc_address = sys.argv[1:]
    left = {"rest": sorted(await rest(http_address)), "grpc": sorted(await grpc(grpc_address))}
    print(json.dumps(left))


asyncio.run(main())
