"""What features have contributed to an answer: as the libraries say it, and as the definition has it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import treelite

from neptrio_backends.fil import forest_files, forest_shap
from neptrio_backends.fil.forest import Forest
from neptrio_backends.fil.forest_shap import Shapley
from tests.backends.fil.ensembles import EVERY, TWO, WHOLE, Made, sklearn
from tests.backends.fil.test_parameters import BINARY, CLASSES, made, module, serve

__all__ = ["module"]  # the fixture
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def explained(found: Made) -> tuple[Any, np.ndarray]:
    """(the ensemble, the contributions to its answers)."""
    model = forest_files.load(*forest_files.find(str(found.path.parent)))
    forest = Forest(model)
    return model, Shapley(model, forest.targets, forest.classes).values(found.rows)


XGBOOST = [
    "xgb-logistic",
    "xgb-softprob",
    "xgb-quantiles",
    "xgb-gamma",
    "xgb-dart",
    "xgb-forest",
    "xgb-two-outputs",
]
LIGHTGBM = ["lgb-binary", "lgb-multiclass", "lgb-categories", "lgb-cross_entropy_lambda"]
OTHERS = [
    "xgb-categories",
    "xgb-vectors",
    "lgb-forest",
    "skl-forest-two-targets",
    "skl-regression-two",
    "skl-boosting-three",
]
OTHERS += ["skl-hist-three", "skl-isolation", "skl-extra-regression"]


@pytest.mark.parametrize("name", [*XGBOOST, *LIGHTGBM, *OTHERS])
def test_contributions_are_the_librarys_and_add_up(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forest_shap, "PIECE", 1 << 15)  # rows in several pieces
    found = EVERY[name](tmp_path)
    model, values = explained(found)
    rows = np.ascontiguousarray(found.rows, model.input_type)
    margins = treelite.gtil.predict(model, rows, pred_margin=True).reshape(len(rows), -1)
    np.testing.assert_allclose(values.sum(2), margins, 4e-6, 4e-6)
    if name in XGBOOST:
        import xgboost

        told = xgboost.Booster(model_file=found.path).predict(xgboost.DMatrix(found.rows), pred_contribs=True)
        np.testing.assert_allclose(values, told.reshape(values.shape), 4e-6, 4e-6)
    elif name in LIGHTGBM:
        import lightgbm

        told = np.asarray(lightgbm.Booster(model_file=found.path).predict(found.rows, pred_contrib=True))
        np.testing.assert_allclose(values, told.reshape(values.shape), 1e-9, 1e-9)


def test_contributions_are_what_the_definition_says(tmp_path: Path) -> None:
    """All coalitions of three features, for a forest whose trees ask for one feature several times."""
    from sklearn.ensemble import RandomForestClassifier

    rows = WHOLE[:, :3]
    maker = sklearn("RandomForestClassifier", TWO, rows, max_depth=5)
    found = maker(tmp_path)
    forest = RandomForestClassifier(n_estimators=10, random_state=0, max_depth=5).fit(rows, TWO)

    def mean(tree: Any, row: np.ndarray, known: tuple[int, ...], node: int = 0) -> Any:
        left, right = int(tree.children_left[node]), int(tree.children_right[node])
        if left < 0:
            return tree.value[node][0] / tree.value[node][0].sum()
        if tree.feature[node] in known:
            goes = row[tree.feature[node]] <= tree.threshold[node]
            return mean(tree, row, known, left if goes else right)
        share = tree.weighted_n_node_samples[left] / tree.weighted_n_node_samples[node]
        return share * mean(tree, row, known, left) + (1 - share) * mean(tree, row, known, right)

    _, values = explained(found)
    for i in (0, 17):
        game = {
            known: np.mean([mean(one.tree_, rows[i], known) for one in forest.estimators_], 0)
            for size in range(4)
            for known in itertools.combinations(range(3), size)
        }
        np.testing.assert_allclose(values[i, :, 3], game[()], 1e-9)
        for feature in range(3):
            others = [known for known in game if feature not in known]
            value = sum(
                (game[tuple(sorted((*known, feature)))] - game[known])
                * math.factorial(len(known))
                * math.factorial(2 - len(known))
                / math.factorial(3)
                for known in others
            )
            np.testing.assert_allclose(values[i, :, feature], value, 1e-7, 1e-12)


def output(dims: list[int]) -> dict[str, Any]:
    rows = [("output__0", [-1]), ("treeshap_output", dims)]
    return {"output": [{"name": name, "data_type": "TYPE_FP32", "dims": sizes} for name, sizes in rows]}


def answered(model: Any, wanted: list[str], *parts: np.ndarray) -> list[dict[str, np.ndarray]]:
    import triton_python_backend_utils as pb_utils

    requests = [
        pb_utils.InferenceRequest(inputs=[pb_utils.Tensor("input__0", rows)], requested_output_names=wanted)
        for rows in parts
    ]
    responses = model.execute(requests)
    return [{tensor.name(): tensor.as_numpy() for tensor in one.output_tensors()} for one in responses]


def test_a_second_output_has_the_contributions(module: Any, tmp_path: Path) -> None:
    found = made(tmp_path, BINARY)
    model = serve(module, found, output([9]), is_classifier="true")
    both = ["output__0", "treeshap_output"]
    first, second = answered(model, both, found.rows[:2], found.rows[2:5])
    _, values = explained(found)
    for answer, rows in ((first, slice(0, 2)), (second, slice(2, 5))):
        assert answer["treeshap_output"].dtype == np.float32
        np.testing.assert_allclose(answer["treeshap_output"], values[rows, 0], 1e-6, 1e-6)
        assert answer["output__0"].tolist() == (found.expected[rows, None] > 0.5).tolist()
    # who does not ask for it does not pay for it
    assert [sorted(one) for one in answered(model, ["output__0"], found.rows[:1])] == [["output__0"]]


def test_contributions_to_each_class(module: Any, tmp_path: Path) -> None:
    found = made(tmp_path, CLASSES)
    model = serve(module, found, output([3, 9]))
    (answer,) = answered(model, ["treeshap_output"], found.rows)
    assert answer["treeshap_output"].shape == (300, 3, 9)
    raw = answer["treeshap_output"].sum(2)
    expected = np.exp(raw) / np.exp(raw).sum(1, keepdims=True)
    np.testing.assert_allclose(expected, found.expected, 1e-5, 1e-6)


def test_what_cannot_be_explained_is_refused(module: Any, tmp_path: Path) -> None:
    found = made(tmp_path, BINARY)
    with pytest.raises(
        ValueError, match=r"'treeshap_output' has 1 values .* the file gives 9: one for each feature"
    ):
        serve(module, found, output([1]))
    builder = treelite.model_builder.ModelBuilder(
        threshold_type="float32",
        leaf_output_type="float32",
        metadata=treelite.model_builder.Metadata(2, "kRegressor", False, 1, [1], (1, 1)),
        tree_annotation=treelite.model_builder.TreeAnnotation(1, [0], [0]),
        postprocessor=treelite.model_builder.PostProcessorFunc("identity"),
        base_scores=[0.0],
    )
    builder.start_tree()
    builder.start_node(0)
    builder.leaf(1.0)
    builder.end_node()
    builder.end_tree()
    with pytest.raises(ValueError, match="need to know how many rows each node has seen"):
        Shapley(builder.commit(), 1, 1)
