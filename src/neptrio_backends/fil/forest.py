"""What a file of trees holds, and its predictions.

The problem: treelite's predictor needs some microseconds for a row, and its Python wrapper tens to ask for shapes that do not
change. The choice: its C interface is called here, with all that is known beforehand.

Rules:
 1. Rows are FP32 or FP64, contiguous, and have exactly the features that the model knows: the predictor strides by them.
    A missing value is NaN.
 2. A few rows are predicted on the calling thread. Waking other threads takes longer than they save, and tens of
    milliseconds where other processes use the cores.
 3. A class is found as the libraries find it: the larger value of several, the first of equals; of one probability,
    whether it is above the threshold.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import treelite
from treelite.core import _LIB, _check_call
from treelite.gtil.gtil import GTILConfig

BINARY, REGRESSOR, CLASSES, RANKER, ISOLATION = range(5)  # treelite's task types
KINDS = ("a binary classifier", "a regressor", "a classifier", "a ranker", "an isolation forest")
# rows times trees from which several threads are worth waking
PARALLEL = 20_000


class Forest:
    """One ensemble."""

    def __init__(self, model: treelite.Model, threads: int = 0) -> None:
        header = model.get_header_accessor()
        self.model = model
        self.task = int(header.get_field("task_type")[0])
        self.postprocessor = str(header.get_field("postprocessor"))
        self.targets = int(header.get_field("num_target")[0])
        self.classes = int(max(header.get_field("num_class")))
        self.features = model.num_feature
        self.trees = model.num_tree
        self._taken, self._given = np.dtype(model.input_type), np.dtype(model.output_type)
        self._type = ctypes.c_char_p(model.input_type.encode())
        threads = threads or int(os.environ.get("OMP_NUM_THREADS", "0") or 0) or len(os.sched_getaffinity(0))
        self._alone = GTILConfig(nthread=1, predict_type="default")
        self._together = GTILConfig(nthread=threads, predict_type="default") if threads > 1 else self._alone

    @property
    def kind(self) -> str:
        """What it is, for messages."""
        return KINDS[self.task]

    @property
    def classifies(self) -> bool:
        """Whether it is a classifier. XGBoost's logistic regression is one, too, for who wants a class of it."""
        return self.task in (BINARY, CLASSES) or self.postprocessor in ("sigmoid", "hinge")

    @property
    def single(self) -> bool:
        """Whether a classifier has one value: the probability of its second class."""
        return self.classes == 1

    def values(self, rows: np.ndarray) -> np.ndarray:
        """What the library's own predict gives: (rows, targets, classes)."""
        if rows.shape[1] != self.features:
            raise ValueError(f"rows have {rows.shape[1]} features, the model has {self.features}")
        config = self._alone if len(rows) * self.trees < PARALLEL else self._together
        rows = np.ascontiguousarray(rows, self._taken)
        found = np.zeros((len(rows), self.targets, self.classes), self._given)
        _check_call(
            _LIB.TreeliteGTILPredict(
                self.model.handle,
                ctypes.c_void_p(rows.__array_interface__["data"][0]),
                self._type,
                ctypes.c_uint64(len(rows)),
                ctypes.c_void_p(found.__array_interface__["data"][0]),
                config.handle,
            )
        )
        return found

    def probabilities(self, rows: np.ndarray) -> np.ndarray:
        """The probability of each class, of both of a binary classifier: (rows, targets, classes)."""
        found = self.values(rows)
        return np.concatenate([1 - found, found], axis=2) if self.single else found

    def winners(self, rows: np.ndarray, threshold: float | None = None) -> np.ndarray:
        """The numbers of the classes: (rows, targets)."""
        found = self.values(rows)
        if not self.single:
            return found.argmax(axis=2)
        if threshold is None:
            threshold = 0.0 if self.postprocessor == "identity" else 0.5  # margins, and probabilities
        above: Any = found[:, :, 0] > threshold
        return above
