"""Requests and configurations made by hand, for unit tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from neptrio.config import defaults
from neptrio.config import model_config as model_config
from neptrio.request.infer_request import InferRequest
from neptrio.request.numpy_tensor import from_numpy


def request_of(**arrays: np.ndarray) -> InferRequest:
    """A request with these inputs; its batch size is the first array's first dimension."""
    request = InferRequest()
    request.inputs = [from_numpy(name, array) for name, array in arrays.items()]
    first = next(iter(arrays.values()))
    request.batch_size = first.shape[0]
    return request


def config_of(text: str, name: str = "model") -> Any:
    """A ModelConfig from its text form, with defaults."""
    config = model_config.parse_text(text, "test")
    config.name = name
    defaults.fill(config, None)
    return config
