"""Trees through the server: as Triton's users write their folders, and what they are told where that is not possible."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.backends.fil import ensembles
from tests.backends.fil.ensembles import THREE, TWO, WHOLE
from tests.support.control import post
from tests.support.repository import write_model
from tests.support.server import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# as the documentation of Triton's backend has it
AS_FOR_TRITON = """
backend: "fil"
max_batch_size: 32768
input [ { name: "input__0" data_type: TYPE_FP32 dims: [ 8 ] } ]
output [ { name: "output__0" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_AUTO } ]
parameters [
  { key: "model_type" value: { string_value: "lightgbm" } },
  { key: "output_class" value: { string_value: "true" } },
  { key: "storage_type" value: { string_value: "AUTO" } },
  { key: "use_experimental_optimizations" value: { string_value: "true" } }
]
dynamic_batching { }
"""


def ask(client: httpclient.InferenceServerClient, model: str, rows: np.ndarray) -> np.ndarray:
    """The model's only output."""
    tensor = httpclient.InferInput("input__0", list(rows.shape), "FP32")
    tensor.set_data_from_numpy(rows)
    return client.infer(model, [tensor]).as_numpy("output__0")


def test_folders_are_served_and_what_cannot_be_says_why(tmp_path: Path) -> None:
    for name in ("bare", "classes", "pickled", "wide"):
        write_model(tmp_path, name, 'backend: "fil"')
    bare = ensembles.xgboost("binary:logistic", TWO, rows=WHOLE)(tmp_path / "bare/1")
    three = ensembles.lightgbm("multiclass", THREE, WHOLE, num_class=3)(tmp_path / "classes/1")
    (tmp_path / "classes/config.pbtxt").write_text(AS_FOR_TRITON)
    (tmp_path / "pickled/1/model.pkl").write_bytes(pickle.dumps([1]))
    ensembles.xgboost("binary:logistic", TWO, rows=WHOLE)(tmp_path / "wide/1")
    (tmp_path / "wide/config.pbtxt").write_text(
        AS_FOR_TRITON.replace("8", "9").replace("lightgbm", "xgboost_ubj")
    )
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            np.testing.assert_allclose(ask(client, "bare", WHOLE)[:, 0], bare.expected, 1e-6, 1e-6)
            np.testing.assert_allclose(ask(client, "bare", WHOLE[3:4])[:, 0], bare.expected[3:4], 1e-6, 1e-6)
            assert (ask(client, "classes", WHOLE)[:, 0] == three.expected.argmax(1)).all()
            config = client.get_model_config("bare")
            assert config["input"][0]["dims"] == [8]
            assert config["default_model_filename"] == "" and "dynamic_batching" in config
            assert client.get_model_metadata("bare")["platform"] == "fil"
        rows = {row["name"]: row.get("reason", "") for row in json.loads(post(server, "index").body)}
    assert "model.pkl is a pickle, and reading one runs whatever code is in it" in rows["pickled"]
    assert "input 'input__0' has 9 features in the configuration and 8 in the file" in rows["wide"]
    assert rows["bare"] == rows["classes"] == ""
