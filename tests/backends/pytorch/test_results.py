"""Where results of modules lie that are sent. `make test-backends` runs this, where PyTorch is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from neptrio_backends import pytorch
from triton_python_backend_utils import _host

torch = pytest.importorskip("torch", reason="make test-backends")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Turned(torch.nn.Module):
    """Results in another order than they are sent in, and in that order."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.transpose(1, 2) * 2, x + 1


class Sending(_host.Host):
    """Knows the memory that is sent from."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        self.made.append(np.empty(shape, dtype))
        return self.made[-1]


def test_what_must_be_copied_is_copied_to_where_it_is_sent_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(pytorch.__file__).parent))
    from neptrio_backends.pytorch import model as backend

    (tmp_path / "1").mkdir()
    torch.jit.script(Turned()).save(tmp_path / "1/model.pt")
    row = {"data_type": "TYPE_FP32", "dims": [-1, -1]}
    config = {"max_batch_size": 8, "input": [{"name": "x", **row}]}
    config["output"] = [{"name": name, **row} for name in ("turned", "more")]
    args = {"model_config": json.dumps(config), "model_repository": str(tmp_path), "model_version": "1"}
    model = backend.TritonPythonModel()
    model.initialize({**args, "model_instance_kind": "CPU", "model_instance_device_id": "0"})
    rows = np.random.default_rng(1).normal(size=(3, 40, 50)).astype(np.float32)

    def answered(*parts: np.ndarray) -> list[Any]:
        requests = [
            pb_utils.InferenceRequest(
                model_name="m", inputs=[pb_utils.Tensor("x", part)], requested_output_names=["turned", "more"]
            )
            for part in parts
        ]
        host = Sending()
        token = _host.enter(host)
        try:
            return [host.made, *model.execute(requests)]
        finally:
            _host.leave(token)

    made, one, two = answered(rows[:1], rows[1:])
    assert [array.shape for array in made] == [(1, 50, 40), (2, 50, 40)]
    for response, part, array in zip((one, two), (rows[:1], rows[1:]), made, strict=True):
        turned, more = (tensor.as_numpy() for tensor in response.output_tensors())
        assert np.shares_memory(turned, array)
        np.testing.assert_array_equal(turned, part.transpose(0, 2, 1) * 2)
        np.testing.assert_array_equal(more, part + 1)
