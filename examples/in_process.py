"""A program of the in-process Triton API: serves the example repository and asks it, without any port.

    python examples/in_process.py [REPOSITORY]

With `import tritonserver` in place of the first import it is a program for Triton.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy

import neptrio.compat.tritonserver as tritonserver


def main(repository: Path) -> None:
    server = tritonserver.Server(
        model_repository=str(repository),
        model_control_mode=tritonserver.ModelControlMode.EXPLICIT,
    ).start(wait_until_ready=True)
    print(f"{server.metadata()['name']} knows {len(server.models())} models")

    simple = server.load("identity_bytes")
    request = simple.create_request(request_id="first")
    request.inputs["INPUT0"] = [["hello"], ["wörld"]]
    for response in simple.infer(request):
        print(response.request_id, response.outputs["OUTPUT0"].to_string_array().tolist())

    numbers = server.load("identity_fp32")
    asyncio.run(ask(numbers))
    server.stop()


async def ask(model: tritonserver.Model) -> None:
    """Three requests at once."""
    arrays = [numpy.full((1, 4), i, numpy.float32) for i in range(3)]
    iterators = [model.async_infer(inputs={"INPUT0": array}) for array in arrays]
    for iterator in iterators:
        async for response in iterator:
            print(numpy.from_dlpack(response.outputs["OUTPUT0"]).tolist())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "model_repository"))
