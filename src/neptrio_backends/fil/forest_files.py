"""Finds and reads files of tree ensembles: XGBoost, LightGBM, treelite's checkpoints, scikit-learn through skops.

Rules:
 1. Reading a file runs no code of its: pickles are refused, and skops builds what belongs to scikit-learn's trees only.
 2. Which format a file has is said by `model_type`, else by its name. The names are those of a Triton server.
 3. What treelite says of a broken file ends up in a ValueError that names the file.
"""

from __future__ import annotations

import os
from typing import Any

import treelite

# model_type -> the name of its file
NAMES = {
    "xgboost_ubj": "xgboost.ubj",
    "xgboost_json": "xgboost.json",
    "xgboost": "xgboost.model",
    "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl",
    "skops": "model.skops",
}
# the end of a file's name -> model_type
SUFFIXES = {
    ".ubj": "xgboost_ubj",
    ".json": "xgboost_json",
    ".model": "xgboost",
    ".txt": "lightgbm",
    ".tl": "treelite_checkpoint",
    ".skops": "skops",
}
PICKLES = (".pkl", ".pickle", ".joblib", ".cloudpickle")
# What files of skops may hold beside its own list, which has the estimators. Whole names of classes, never beginnings: skops
# calls what a file names with what the file says, and a module's own methods are reached by names that begin like its classes'.
TRUSTED = frozenset(
    {"sklearn.tree._tree.Tree", "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor"}
)


def pickled(path: str) -> str:
    """Why a pickle is not read, and what to do instead."""
    return (
        f"{path} is a pickle, and reading one runs whatever code is in it. Where the model was trained, write a file "
        "that holds only trees: model.save_model('xgboost.ubj') for XGBoost, model.booster_.save_model('model.txt') for "
        "LightGBM, treelite.sklearn.import_model(model).serialize('checkpoint.tl') or skops.io.dump(model, "
        "'model.skops') for scikit-learn"
    )


def find(folder: str, model_type: str = "", filename: str = "") -> tuple[str, str]:
    """(path, model_type) of a version's file. Raises ValueError."""
    if model_type and model_type not in NAMES:
        raise ValueError(f"parameter 'model_type' must be one of {', '.join(NAMES)}, got '{model_type}'")
    if filename:
        kind = model_type or SUFFIXES.get(os.path.splitext(filename)[1], "")
        if not kind and not filename.endswith(PICKLES):
            raise ValueError(f"the format of '{filename}' is not known: set the parameter 'model_type'")
        return os.path.join(folder, filename), kind
    if model_type:
        return os.path.join(folder, NAMES[model_type]), model_type
    there = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    known = [name for name in there if os.path.splitext(name)[1] in (*SUFFIXES, *PICKLES)]
    usual = [name for name in known if name in NAMES.values()] or known
    if len(usual) != 1:
        found = f"there are {', '.join(usual)}" if usual else "there is none"
        raise ValueError(
            f"{folder} must hold one file of trees ({', '.join(NAMES.values())}), {found}; the parameter 'model_type' or "
            "the field default_model_filename chooses one"
        )
    return os.path.join(folder, usual[0]), SUFFIXES.get(os.path.splitext(usual[0])[1], "")


def load(path: str, kind: str, unknown_fields: bool = False) -> treelite.Model:
    """The ensemble in a file. Raises ValueError."""
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path}")
    with open(path, "rb") as file:
        start = file.read(2)
    if path.endswith(PICKLES) or (start[:1] == b"\x80" and 2 <= start[-1] <= 5):
        raise ValueError(pickled(path))
    if kind == "skops":
        return _skops(path)
    try:
        if kind == "lightgbm":
            return treelite.frontend.load_lightgbm_model(path)
        if kind == "treelite_checkpoint":
            return treelite.Model.deserialize(path)
        if kind == "xgboost" and start[:1] != b"{":  # later releases write UBJSON under that name, too
            return treelite.frontend.load_xgboost_model_legacy_binary(path)
        choice = {"xgboost_json": "json", "xgboost_ubj": "ubjson"}.get(kind, "inspect")
        return treelite.frontend.load_xgboost_model(
            path, format_choice=choice, allow_unknown_field=unknown_fields
        )
    except treelite.TreeliteError as error:
        hint = ""
        if "is not recognized" in str(error) or (kind.startswith("xgboost") and not unknown_fields):
            hint = " (the parameter xgboost_allow_unknown_field 'true' ignores fields that are not known)"
        raise ValueError(f"{path} cannot be read as {kind}{hint}: {error}") from None


def _skops(path: str) -> Any:
    try:
        import skops.io
    except ImportError as error:
        raise ValueError(
            f"{path} needs skops and scikit-learn: pip install 'skops<1' scikit-learn ({error})"
        ) from None
    try:
        unknown = skops.io.get_untrusted_types(file=path)
        strange = [name for name in unknown if name not in TRUSTED]
        if strange:
            raise ValueError(
                f"{path} holds what is no part of scikit-learn's trees and is not built: {', '.join(strange)}"
            )
        estimator = skops.io.load(path, trusted=unknown)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{path} cannot be read as skops: {type(error).__name__}: {error}") from None
    try:
        return treelite.sklearn.import_model(estimator)
    except Exception as error:
        raise ValueError(f"{path}: {type(estimator).__name__} cannot be served: {error}") from None
