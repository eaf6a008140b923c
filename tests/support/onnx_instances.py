"""Instances of the onnxruntime backend without a server: makes them and gives them batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from neptrio.backends.identity_batch import run_inline
from neptrio.backends.onnx.backend import OnnxBackend
from neptrio.backends.onnx.instance import OnnxInstance
from neptrio.config import model_config as model_config
from neptrio.errors import TritonError
from neptrio.execution.backend import LoadContext
from neptrio.execution.batch import Batch
from neptrio.request.infer_request import InferRequest, ModelCore, RequestedOutput
from neptrio.request.numpy_tensor import from_numpy, to_numpy
from neptrio.settings import Settings


def context(folder: Path, content: bytes, config: str = "max_batch_size: 8", api: str = "") -> LoadContext:
    """The LoadContext of a model; `api` is its parameter `session_api`."""
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "1" / "model.onnx").write_bytes(content)
    parsed = model_config.parse_text(config, "config.pbtxt")
    if api:
        parsed.parameters["session_api"].string_value = api
    return LoadContext("m", 1, folder, folder / "1", parsed, Settings(), None)


def instance(folder: Path, content: bytes, config: str = "max_batch_size: 8", api: str = "") -> OnnxInstance:
    """An initialized instance."""
    made = context(folder, content, config, api)
    OnnxBackend.auto_complete(made)
    backend = OnnxBackend(made).create_instance("m_0_0", "CPU", 0)
    assert isinstance(backend, OnnxInstance)
    backend.initialize()
    return backend


def request(outputs: list[str] | None = None, **arrays: np.ndarray) -> InferRequest:
    """A request with these inputs."""
    made = InferRequest()
    made.inputs = [from_numpy(name, array) for name, array in arrays.items()]
    made.outputs = None if outputs is None else [RequestedOutput(name) for name in outputs]
    made.batch_size = next(iter(arrays.values())).shape[0]
    return made


def run(backend: OnnxInstance, *requests: InferRequest) -> Any:
    """Executes a batch of these requests; returns it as it is before deliver()."""
    core = ModelCore("m", "1")
    core.max_batch_size = 8 if backend._batching else 0
    batch: Any = backend.prepare(Batch(core, list(requests)))
    if backend.native:
        run_inline(batch)
        batch.conclude()
    else:
        try:
            backend.execute(batch)
        except TritonError as error:
            batch.error = error
    return batch


def execute(backend: OnnxInstance, *requests: InferRequest) -> list[dict[str, np.ndarray] | None]:
    """The outputs of each request, None for one that failed. Raises the batch's error."""
    batch = run(backend, *requests)
    if batch.error is not None:
        raise batch.error
    return [None if r.error else {t.name: to_numpy(t) for t in r.outputs} for r in batch.responses]
