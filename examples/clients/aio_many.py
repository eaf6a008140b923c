"""Requests at the same time with tritonclient.grpc.aio: the model `identity_fp32`."""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import tritonclient.grpc.aio as grpcclient

url = sys.argv[1] if len(sys.argv) > 1 else "localhost:8001"


async def one(client: grpcclient.InferenceServerClient, i: int) -> float:
    values = np.full((1, 4), i, np.float32)
    tensor = grpcclient.InferInput("INPUT0", list(values.shape), "FP32")
    tensor.set_data_from_numpy(values)
    result = await client.infer("identity_fp32", [tensor])
    return float(result.as_numpy("OUTPUT0")[0, 0])


async def main() -> None:
    async with grpcclient.InferenceServerClient(url) as client:
        print(*await asyncio.gather(*(one(client, i) for i in range(10))))


asyncio.run(main())
