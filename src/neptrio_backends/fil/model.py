"""backend: "fil": serves ensembles of decision trees under the names and parameters of Triton's backend of that name.

Rules:
 1. Names are Triton's (input__0, output__0) where the configuration gives none. A configuration may have others.
 2. A parameter has its effect, or is one that changes no answer and is checked and left at that, or the load fails.
 3. A batch is one prediction, however many requests it has.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

import triton_python_backend_utils as pb_utils
from forest import Forest
from forest_files import find, load
from forest_shap import Shapley

ROWS = 8192  # max_batch_size where a configuration has none: trees take large batches
DTYPES = {"TYPE_FP32": np.float32, "TYPE_FP64": np.float64}
# parameters that decide how Triton's backend computes and not what; their values
WITHOUT_EFFECT = {
    "storage_type": ("AUTO", "DENSE", "SPARSE", "SPARSE8"),
    "algo": ("ALGO_AUTO", "NAIVE", "TREE_REORG", "BATCH_TREE_REORG"),
    "use_experimental_optimizations": ("true", "false"),
    "layout": ("depth_first", "breadth_first", "layered"),
    "chunk_size": int,
    "threads_per_tree": int,
    "blocks_per_sm": int,
    "transfer_threshold": int,
}


USUAL_THRESHOLD = 0.5
SHAPLEY = "treeshap_output"  # the name of the output that has the features' contributions


class Parameters:
    """The parameters of a configuration. Raises ValueError for values that cannot be."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._given = {
            key: str(value.get("string_value", "")) for key, value in config.get("parameters", {}).items()
        }
        self.model_type = self._given.get("model_type", "")
        # the later name is counted where the earlier one is not there, as in Triton's backend
        self.output_class = self._flag("output_class" if self._given.get("output_class") else "is_classifier")
        self.predict_proba = self._flag("predict_proba")
        # the backend's documentation has the one name, its source the other
        self.unknown_fields = self._flag("xgboost_allow_unknown_field") or self._flag(
            "xgboost_allow_unknown_fields"
        )
        self.threads = max(self._number("nthread", int) or self._number("cpu_nthread", int) or 0, 0)
        self.threshold = self._number("threshold", float)
        for key, allowed in WITHOUT_EFFECT.items():
            if isinstance(allowed, tuple):
                self._choice(key, allowed)
            else:
                self._number(key, int)

    def _choice(self, key: str, allowed: tuple[str, ...]) -> str:
        value = self._given.get(key, "")
        if value and value not in allowed:
            raise ValueError(f"parameter '{key}' must be one of {', '.join(allowed)}, got '{value}'")
        return value

    def _flag(self, key: str) -> bool:
        return self._choice(key, ("true", "false")) == "true"

    def _number(self, key: str, kind: type) -> Any:
        value = self._given.get(key, "")
        try:
            return kind(value) if value else None
        except ValueError:
            raise ValueError(f"parameter '{key}' must be a number, got '{value}'") from None


def read(config: dict[str, Any], folder: str) -> tuple[Forest, Parameters]:
    """The ensemble of a version, and what is asked of it. Raises ValueError."""
    parameters = Parameters(config)
    path, kind = find(folder, parameters.model_type, config.get("default_model_filename", ""))
    forest = Forest(load(path, kind, parameters.unknown_fields), parameters.threads)
    for key in ("output_class", "predict_proba"):
        if getattr(parameters, key) and not forest.classifies:
            raise ValueError(f"parameter '{key}' is for classifiers, and {path} is {forest.kind}")
    # configurations that are made from one pattern have the default for every kind of model
    told = parameters.threshold not in (None, USUAL_THRESHOLD)
    if told and not (parameters.output_class and forest.single):
        raise ValueError(
            "parameter 'threshold' needs a binary classifier and the parameter 'output_class' 'true'"
        )
    return forest, parameters


def width(forest: Forest, parameters: Parameters) -> int:
    """The values of a row's answer. Of two probabilities the second one is enough, as in Triton's backend."""
    if parameters.output_class and not parameters.predict_proba:
        return forest.targets
    return forest.targets * forest.classes


class TritonPythonModel:
    """An instance of a model."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Fills in inputs, outputs and batching from the file."""
        stated = config.as_dict()
        forest, parameters = read(stated, config.version_directory)
        if not stated.get("max_batch_size"):
            config.set_max_batch_size(ROWS)
        if "sequence_batching" not in stated:
            config.set_dynamic_batching()
        if not stated.get("input"):
            config.add_input({"name": "input__0", "data_type": "TYPE_FP32", "dims": [forest.features]})
        if not stated.get("output"):
            dims = [width(forest, parameters)]
            config.add_output({"name": "output__0", "data_type": "TYPE_FP32", "dims": dims})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Reads the file and compares it with the configuration."""
        config = json.loads(args["model_config"])
        folder = os.path.join(args["model_repository"], args["model_version"])
        self.forest, self.parameters = read(config, folder)
        self._batched = config.get("max_batch_size", 0) > 0
        outputs = [output for output in config["output"] if output["name"] != SHAPLEY]
        if len(config["input"]) != 1 or len(outputs) != 1:
            raise ValueError(
                f"the configuration must have one input, the rows, and one output, beside '{SHAPLEY}' if that is wanted"
            )
        (tensor,), (output,) = config["input"], outputs
        self._input, self._output = tensor["name"], output["name"]
        for row in (tensor, *config["output"]):
            if row["data_type"] not in DTYPES:
                raise ValueError(f"'{row['name']}' must be TYPE_FP32 or TYPE_FP64, it is {row['data_type']}")
        self._dtype = DTYPES[output["data_type"]]
        features = int(tensor["dims"][-1])
        if features not in (-1, self.forest.features):
            raise ValueError(
                f"input '{self._input}' has {features} features in the configuration and {self.forest.features} in the file"
            )
        self._dims = self._sizes(output)
        given = int(np.prod(self._dims))
        found = width(self.forest, self.parameters)
        self._both = self.parameters.predict_proba and self.forest.single and given == 2 * found
        if given not in (-1, found) and not self._both:
            raise ValueError(
                f"output '{self._output}' has {given} values for each row in the configuration; the file, "
                f"{self.forest.kind}, gives {found}"
            )

        self._explaining: tuple[Shapley, list[int], Any] | None = None
        for row in config["output"]:
            if row["name"] == SHAPLEY:
                self._explaining = self._explained(row)

    def _sizes(self, row: dict[str, Any]) -> list[int]:
        """The dims of an answer to one row."""
        return [int(size) for size in row["dims"]][0 if self._batched else 1 :]

    def _explained(self, row: dict[str, Any]) -> tuple[Shapley, list[int], Any]:
        """What tells the features' contributions, and the dims and datatype of that."""
        forest, sizes = self.forest, self._sizes(row)
        found = forest.targets * forest.classes * (forest.features + 1)
        if -1 not in sizes and int(np.prod(sizes)) != found:
            raise ValueError(
                f"output '{SHAPLEY}' has {int(np.prod(sizes))} values for each row in the configuration; the file gives {found}: "
                "one for each feature and one more, for each class"
            )
        return Shapley(forest.model, forest.targets, forest.classes), sizes, DTYPES[row["data_type"]]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers a batch."""
        arrays: list[np.ndarray] = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, self._input)
            assert tensor is not None  # the server has refused a request without it
            arrays.append(tensor.as_numpy())
        rows = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        if rows.shape[-1] != self.forest.features:
            text = (
                f"input '{self._input}' has {rows.shape[-1]} features, the model has {self.forest.features}"
            )
            error = pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG)
            return [pb_utils.InferenceResponse(error=error) for _ in requests]
        rows = rows.reshape(-1, self.forest.features)
        found = {self._output: self._answers(rows)}
        if self._explaining is not None and any(
            SHAPLEY in request.requested_output_names() for request in requests
        ):
            shapley, sizes, dtype = self._explaining
            found[SHAPLEY] = shapley.values(rows).reshape(len(rows), *sizes).astype(dtype, copy=False)
        if len(requests) == 1:
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor(name, whole) for name, whole in found.items()])
            ]
        responses, start = [], 0
        for array in arrays:
            end = start + len(array)
            parts = [pb_utils.Tensor(name, whole[start:end]) for name, whole in found.items()]
            responses.append(pb_utils.InferenceResponse(parts))
            start = end
        return responses

    def _answers(self, rows: np.ndarray) -> np.ndarray:
        parameters = self.parameters
        if parameters.predict_proba:
            found = self.forest.probabilities(rows) if self._both else self.forest.values(rows)
        elif parameters.output_class:
            found = self.forest.winners(rows, parameters.threshold)
        else:
            found = self.forest.values(rows)
        return found.reshape(len(rows), *self._dims).astype(self._dtype, copy=False)
