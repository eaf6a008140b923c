"""Trained ensembles of every library, each with what that library itself predicts: the trees' tests compare with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROWS = 300


def _data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(7)
    whole = random.normal(size=(ROWS, 8)).astype(np.float32)
    holed = whole.copy()
    holed[random.random(whole.shape) < 0.1] = np.nan
    whole[:, 3] = holed[:, 3] = random.integers(0, 6, ROWS)  # a category
    return whole, holed


WHOLE, HOLED = _data()  # without and with missing values
TWO = (WHOLE[:, 0] + WHOLE[:, 1] * WHOLE[:, 2] > 0).astype(int)
THREE = np.abs(WHOLE[:, :3]).argmax(1)


@dataclass
class Made:
    """A file, the rows to ask for, and the library's own answer."""

    path: Path
    rows: np.ndarray
    expected: np.ndarray
    tolerance: float


Maker = Callable[[Path], Made]


def xgboost(objective: str, labels: Any, suffix: str = "ubj", rows: np.ndarray = HOLED, **more: Any) -> Maker:
    """A booster of XGBoost, trained on rows with missing values unless others are given."""

    def make(folder: Path) -> Made:
        library = pytest.importorskip("xgboost")
        categorical = more.pop("feature_types", None)
        data = library.DMatrix(rows, feature_types=categorical, enable_categorical=categorical is not None)
        if objective == "survival:aft":
            data.set_float_info("label_lower_bound", labels)
            data.set_float_info("label_upper_bound", labels)
        else:
            data.set_label(labels)
        booster = library.train({"objective": objective, "max_depth": 4, "nthread": 1, **more}, data, 12)
        path = folder / f"xgboost.{suffix}"
        booster.save_model(path)
        return Made(path, rows, booster.predict(data), 4e-6)

    return make


def lightgbm(objective: str, labels: Any, rows: np.ndarray = HOLED, **more: Any) -> Maker:
    """A booster of LightGBM."""

    def make(folder: Path) -> Made:
        library = pytest.importorskip("lightgbm")
        groups = [30] * 10 if "rank" in objective else None
        categories = more.pop("categorical_feature", "auto")
        data = library.Dataset(rows, labels, group=groups, categorical_feature=categories)
        booster = library.train(
            {"objective": objective, "verbose": -1, "num_leaves": 8, "num_threads": 1, **more}, data, 12
        )
        path = folder / "model.txt"
        booster.save_model(path)
        return Made(path, rows, booster.predict(rows), 1e-7)

    return make


def sklearn(
    name: str, labels: Any, rows: np.ndarray = WHOLE, way: str = "checkpoint.tl", **more: Any
) -> Maker:
    """An ensemble of scikit-learn, as a checkpoint of treelite or a file of skops."""

    def make(folder: Path) -> Made:
        from sklearn import ensemble

        sizes = {"max_iter": 10} if name.startswith("Hist") else {"n_estimators": 10}
        found = getattr(ensemble, name)(**sizes, random_state=0, **more)
        found.fit(rows, labels)
        path = folder / way
        if way.endswith(".tl"):
            import treelite

            treelite.sklearn.import_model(found).serialize(path)
        else:
            import skops.io

            skops.io.dump(found, path)
        if name == "IsolationForest":
            expected = -found.score_samples(rows)
        elif not hasattr(found, "predict_proba"):
            expected = found.predict(rows)
        else:
            expected = found.predict_proba(rows)
            if isinstance(expected, list):  # several targets: as many columns as the largest has classes
                widest = max(part.shape[1] for part in expected)
                expected = np.stack([np.pad(p, ((0, 0), (0, widest - p.shape[1]))) for p in expected], axis=1)
            elif "Boosting" in name and expected.shape[1] == 2:
                expected = expected[:, 1]
        return Made(path, rows, np.asarray(expected), 1e-7)

    return make


CATEGORIES = ["q", "q", "q", "c", "q", "q", "q", "q"]
EVERY: dict[str, Maker] = {
    "xgb-logistic": xgboost("binary:logistic", TWO),
    "xgb-logistic-json": xgboost("binary:logistic", TWO, "json"),
    "xgb-logitraw": xgboost("binary:logitraw", TWO),
    "xgb-hinge": xgboost("binary:hinge", TWO),
    "xgb-softprob": xgboost("multi:softprob", THREE, num_class=3),
    "xgb-squarederror": xgboost("reg:squarederror", WHOLE[:, 0]),
    "xgb-absoluteerror": xgboost("reg:absoluteerror", WHOLE[:, 0]),
    "xgb-squaredlogerror": xgboost("reg:squaredlogerror", THREE),
    "xgb-pseudohuber": xgboost("reg:pseudohubererror", WHOLE[:, 0]),
    "xgb-regression-logistic": xgboost("reg:logistic", TWO),
    "xgb-gamma": xgboost("reg:gamma", THREE + 1),
    "xgb-tweedie": xgboost("reg:tweedie", THREE),
    "xgb-poisson": xgboost("count:poisson", THREE),
    "xgb-quantiles": xgboost("reg:quantileerror", WHOLE[:, 0], quantile_alpha=[0.1, 0.9]),
    "xgb-aft": xgboost("survival:aft", THREE + 1.0),
    "xgb-pairwise": xgboost("rank:pairwise", TWO),
    "xgb-dart": xgboost("binary:logistic", TWO, booster="dart", rate_drop=0.3),
    "xgb-forest": xgboost("binary:logistic", TWO, num_parallel_tree=3, subsample=0.8),
    "xgb-categories": xgboost("binary:logistic", TWO, rows=WHOLE, feature_types=CATEGORIES, max_cat_to_onehot=1),
    "xgb-vectors": xgboost("reg:squarederror", WHOLE[:, :2], multi_strategy="multi_output_tree", tree_method="hist"),
    "xgb-two-outputs": xgboost("reg:squarederror", WHOLE[:, :2]),
    **{
        f"lgb-{objective}": lightgbm(objective, labels)
        for objective, labels in {
            "binary": TWO, "cross_entropy": TWO, "cross_entropy_lambda": TWO, "lambdarank": TWO, "rank_xendcg": TWO,
            "regression": WHOLE[:, 0], "regression_l1": WHOLE[:, 0], "huber": WHOLE[:, 0], "fair": WHOLE[:, 0],
            "quantile": WHOLE[:, 0], "mape": THREE + 1, "poisson": THREE, "gamma": THREE + 1, "tweedie": THREE,
        }.items()
    },
    "lgb-multiclass": lightgbm("multiclass", THREE, num_class=3),
    "lgb-multiclassova": lightgbm("multiclassova", THREE, num_class=3),
    "lgb-categories": lightgbm("binary", TWO, WHOLE, categorical_feature=[3]),
    "lgb-forest": lightgbm("binary", TWO, boosting="rf", bagging_freq=1, bagging_fraction=0.7),
    "skl-forest": sklearn("RandomForestClassifier", TWO),
    "skl-forest-three": sklearn("RandomForestClassifier", THREE),
    "skl-forest-two-targets": sklearn("RandomForestClassifier", np.stack([TWO, THREE], 1)),
    "skl-regression": sklearn("RandomForestRegressor", WHOLE[:, 0]),
    "skl-regression-two": sklearn("RandomForestRegressor", WHOLE[:, :2]),
    "skl-extra": sklearn("ExtraTreesClassifier", THREE),
    "skl-extra-regression": sklearn("ExtraTreesRegressor", WHOLE[:, 0]),
    "skl-boosting": sklearn("GradientBoostingClassifier", TWO),
    "skl-boosting-three": sklearn("GradientBoostingClassifier", THREE),
    "skl-boosting-regression": sklearn("GradientBoostingRegressor", WHOLE[:, 0]),
    "skl-hist": sklearn("HistGradientBoostingClassifier", TWO, HOLED),
    "skl-hist-three": sklearn("HistGradientBoostingClassifier", THREE, HOLED),
    "skl-hist-regression": sklearn("HistGradientBoostingRegressor", WHOLE[:, 0], HOLED),
    "skl-isolation": sklearn("IsolationForest", None),
    "skops-forest": sklearn("RandomForestClassifier", THREE, way="model.skops"),
    "skops-boosting": sklearn("GradientBoostingClassifier", TWO, way="model.skops"),
    "skops-hist": sklearn("HistGradientBoostingRegressor", WHOLE[:, 0], HOLED, way="model.skops"),
}  # fmt: skip
