"""Parameters of trees' models: what they do, and what is said where they cannot."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from neptrio_backends import fil
from neptrio_backends.fil import forest_files
from tests.backends.fil import ensembles
from tests.backends.fil.ensembles import THREE, TWO, WHOLE, Made, Maker

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend's model.py, with the modules beside it where it looks for them."""
    monkeypatch.syspath_prepend(str(Path(fil.__file__).parent))
    from neptrio_backends.fil import model

    return model


def serve(module: Any, made: Made, config: dict[str, Any] | None = None, **parameters: str) -> Any:
    """An instance of a model whose version folder holds the file, with the configuration that it completes."""
    config = {"name": "m", **(config or {})}
    config["parameters"] = {key: {"string_value": value} for key, value in parameters.items()}
    folder = made.path.parent
    completed = module.TritonPythonModel.auto_complete_config(pb_utils.ModelConfig(config, str(folder)))
    model = module.TritonPythonModel()
    model.config = completed.as_dict()
    args = {"model_config": json.dumps(model.config), "model_repository": str(folder.parent)}
    model.initialize({**args, "model_version": folder.name})
    return model


def answers(model: Any, *parts: np.ndarray) -> list[np.ndarray]:
    """The outputs of a batch of requests."""
    requests = [
        pb_utils.InferenceRequest(inputs=[pb_utils.Tensor(model.config["input"][0]["name"], rows)])
        for rows in parts
    ]
    return [response.output_tensors()[0].as_numpy() for response in model.execute(requests)]


def made(tmp_path: Path, maker: Maker) -> Made:
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    return maker(folder)


BINARY = ensembles.xgboost("binary:logistic", TWO, rows=WHOLE)
CLASSES = ensembles.xgboost("multi:softprob", THREE, rows=WHOLE, num_class=3)


def test_a_binary_classifier(module: Any, tmp_path: Path) -> None:
    found = made(tmp_path, BINARY)
    plain = serve(module, found)
    assert plain.config["input"][0] | plain.config["output"][0] == {
        "name": "output__0", "data_type": "TYPE_FP32", "dims": [1]
    }  # fmt: skip
    assert plain.config["input"][0]["dims"] == [8] and plain.config["max_batch_size"] == 8192
    (values,) = answers(plain, found.rows)
    assert values.shape == (300, 1) and values.dtype == np.float32
    np.testing.assert_allclose(values[:, 0], found.expected, 1e-6, 1e-6)
    (classes,) = answers(serve(module, found, output_class="true"), found.rows)
    assert (classes[:, 0] == (found.expected > 0.5)).all() and 0 < classes.sum() < 300
    assert (
        answers(serve(module, found, is_classifier="true"), found.rows)[0] == classes
    ).all()  # since 25.09
    (classes,) = answers(serve(module, found, output_class="true", threshold="0.8"), found.rows)
    assert (classes[:, 0] == (found.expected > 0.8)).all() and 0 < classes.sum() < 300
    (one,) = answers(serve(module, found, output_class="true", predict_proba="true"), found.rows)
    assert (one == values).all()
    config = {"output": [{"name": "both", "data_type": "TYPE_FP64", "dims": [2]}]}
    (both,) = answers(serve(module, found, config, predict_proba="true"), found.rows)
    assert both.dtype == np.float64
    np.testing.assert_allclose(both, np.stack([1 - values[:, 0], values[:, 0]], 1), 1e-6)


def test_margins_are_divided_at_zero(module: Any, tmp_path: Path) -> None:
    found = made(tmp_path, ensembles.xgboost("binary:logitraw", TWO, rows=WHOLE))
    (classes,) = answers(serve(module, found, output_class="true"), found.rows)
    assert (classes[:, 0] == (found.expected > 0)).all()


def test_a_classifier_of_three(module: Any, tmp_path: Path) -> None:
    found = made(tmp_path, CLASSES)
    (classes,) = answers(serve(module, found, output_class="true"), found.rows)
    assert classes.shape == (300, 1) and (classes[:, 0] == found.expected.argmax(1)).all()
    (probabilities,) = answers(serve(module, found, output_class="true", predict_proba="true"), found.rows)
    np.testing.assert_allclose(probabilities, found.expected, 1e-5)


def test_several_targets_have_a_class_each(module: Any, tmp_path: Path) -> None:
    found = made(tmp_path, ensembles.EVERY["skl-forest-two-targets"])
    (classes,) = answers(serve(module, found, output_class="true"), found.rows)
    assert (classes == found.expected.argmax(2)).all() and classes.shape == (300, 2)


def test_a_batch_is_answered_part_by_part(module: Any, tmp_path: Path) -> None:
    found = made(tmp_path, BINARY)
    parts = answers(serve(module, found), found.rows[:1], found.rows[1:5], found.rows[5:])
    assert [len(part) for part in parts] == [1, 4, 295]
    np.testing.assert_allclose(np.concatenate(parts)[:, 0], found.expected, 1e-6, 1e-6)


def test_a_model_without_batches_and_names_of_its_own(module: Any, tmp_path: Path) -> None:
    found = made(tmp_path, BINARY)
    model = serve(module, found)
    model.config |= {
        "max_batch_size": 0,
        "input": [{"name": "X", "data_type": "TYPE_FP64", "dims": [-1, 8]}],
        "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [-1, 1]}],
    }
    args = {"model_config": json.dumps(model.config), "model_repository": str(tmp_path / "m")}
    model.initialize({**args, "model_version": "1"})
    (values,) = answers(model, found.rows.astype(np.float64))
    np.testing.assert_allclose(values[:, 0], found.expected, 1e-6, 1e-6)


def test_rows_of_another_width_are_refused(module: Any, tmp_path: Path) -> None:
    found = made(tmp_path, BINARY)
    model = serve(module, found, {"input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [-1]}]})
    request = pb_utils.InferenceRequest(inputs=[pb_utils.Tensor("X", found.rows[:, :5].copy())])
    (response,) = model.execute([request])
    assert response.error().message() == "input 'X' has 5 features, the model has 8"


REFUSED: list[tuple[Maker, dict[str, Any], dict[str, str], str]] = [
    (BINARY, {}, {"output_class": "yes"}, "'output_class' must be one of true, false, got 'yes'"),
    (BINARY, {}, {"storage_type": "TINY"}, "'storage_type' must be one of AUTO, DENSE, SPARSE, SPARSE8, got 'TINY'"),
    (BINARY, {}, {"threads_per_tree": "many"}, "'threads_per_tree' must be a number, got 'many'"),
    (BINARY, {}, {"threshold": "0.3"}, "'threshold' needs a binary classifier and the parameter 'output_class'"),
    (CLASSES, {}, {"threshold": "0.3", "output_class": "true"}, "'threshold' needs a binary classifier"),
    (BINARY, {}, {"model_type": "catboost"}, "'model_type' must be one of xgboost_ubj, "),
    (BINARY, {}, {"model_type": "lightgbm"}, "there is no file .*model.txt"),
    (BINARY, {"default_model_filename": "xgboost.bin"}, {}, "the format of 'xgboost.bin' is not known"),
    (ensembles.EVERY["xgb-gamma"], {}, {"output_class": "true"}, "is for classifiers, and .* is a regressor"),
    (ensembles.EVERY["skl-isolation"], {}, {"predict_proba": "true"}, "is for classifiers, and .* is an isolation"),
    (BINARY, {"input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [5]}]}, {}, "has 5 features in the .* and 8 in"),
    (BINARY, {"input": [{"name": "X", "data_type": "TYPE_INT32", "dims": [8]}]}, {}, "must be TYPE_FP32 or TYPE_FP64"),
    (BINARY, {"output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [3]}]}, {}, "has 3 values .* gives 1"),
    (BINARY, {}, {"layout": "sideways"}, "'layout' must be one of depth_first, breadth_first, layered, got 'sideways'"),
    (ensembles.EVERY["xgb-gamma"], {}, {"is_classifier": "true"}, "'output_class' is for classifiers, and .* is a regressor"),
    (
        BINARY, {"input": [{"name": n, "data_type": "TYPE_FP32", "dims": [4]} for n in "ab"]}, {},
        "must have one input, the rows, and one output",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("maker", "config", "parameters", "reason"), REFUSED)
def test_what_cannot_be_is_refused(
    module: Any, tmp_path: Path, maker: Maker, config: dict[str, Any], parameters: dict[str, str], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        serve(module, made(tmp_path, maker), config, **parameters)


def test_parameters_of_the_computation_change_nothing(module: Any, tmp_path: Path) -> None:
    found = made(tmp_path, BINARY)
    given = {key: "1" if kind is int else kind[0] for key, kind in module.WITHOUT_EFFECT.items()}
    (values,) = answers(serve(module, found, **given, cpu_nthread="2"), found.rows)
    np.testing.assert_allclose(values[:, 0], found.expected, 1e-6, 1e-6)


class Poison:
    """What reading its pickle would tell by a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", ["model.pkl", "model.joblib", "model.txt", "xgboost.model", "checkpoint.tl"])
def test_pickles_are_not_read(tmp_path: Path, name: str) -> None:
    trap = tmp_path / "read"
    (tmp_path / name).write_bytes(pickle.dumps(Poison(trap)))
    with pytest.raises(ValueError, match=r"is a pickle, and .* model.save_model\('xgboost.ubj'\)"):
        forest_files.load(*forest_files.find(str(tmp_path)))
    assert not trap.exists()


def skops_file(path: Path, calls: list[tuple[str, str, list[Any]]], members: dict[str, str]) -> None:
    """A file by whose reading skops makes these calls (module, name, arguments)."""
    import skops
    from skops.io._protocol import PROTOCOL

    def node(kind: str, loader: str, **more: Any) -> dict[str, Any]:
        return {"__class__": kind, "__module__": "builtins", "__loader__": loader, **more}

    def value(of: Any) -> dict[str, Any]:
        if isinstance(of, list):
            return node("list", "ListNode", content=[value(each) for each in of])
        return node("str", "JsonNode", content=json.dumps(of), is_json=True)

    made = [
        {
            "__class__": name,
            "__module__": module,
            "__loader__": "LossNode",
            "__reduce__": {"args": node("tuple", "TupleNode", content=[value(each) for each in arguments])},
            "content": node("dict", "JsonNode", content="{}", is_json=True),
        }
        for module, name, arguments in calls
    ]
    schema = node("tuple", "TupleNode", content=made, protocol=PROTOCOL, _skops_version=skops.__version__)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("schema.json", json.dumps(schema))
        for name, text in members.items():
            archive.writestr(name, text)


def test_skops_calls_nothing_that_a_file_names(tmp_path: Path) -> None:
    """A module's own methods have names that begin like those of scikit-learn's classes."""
    file, trap = tmp_path / "model.skops", tmp_path / "trap"
    calls = [
        ("sklearn.ensemble", "__setattr__", ["__path__", [str(file)]]),
        ("sklearn.ensemble.evil", "run", []),
    ]
    evil = f"open({str(trap)!r}, 'w')\ndef run(): pass\n"
    skops_file(file, calls, {"evil.py": evil})
    with pytest.raises(ValueError, match=r"is not built: .*sklearn\.ensemble\.(evil|__setattr__)"):
        forest_files.load(*forest_files.find(str(tmp_path)))
    assert not trap.exists()


def test_skops_builds_nothing_but_trees(tmp_path: Path) -> None:
    import skops.io

    from tests.backends.fil.foreign import Foreign

    skops.io.dump(Foreign(), tmp_path / "model.skops")
    with pytest.raises(ValueError, match=r"no part of scikit-learn's trees and is not built: .*Foreign"):
        forest_files.load(*forest_files.find(str(tmp_path)))
    from sklearn.linear_model import LinearRegression

    skops.io.dump(LinearRegression().fit(WHOLE[:, :2], WHOLE[:, 2]), tmp_path / "model.skops")
    with pytest.raises(ValueError, match="LinearRegression cannot be served"):
        forest_files.load(*forest_files.find(str(tmp_path)))


@pytest.mark.parametrize("name", [*forest_files.NAMES.values()])
def test_files_that_are_broken_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not a forest")
    with pytest.raises(ValueError, match=f"{name} cannot be read as"):
        forest_files.load(*forest_files.find(str(tmp_path)))


def test_a_folder_with_none_or_several_files_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold one file of trees .*, there is none"):
        forest_files.find(str(tmp_path))
    for name in ("model.txt", "xgboost.ubj", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"there are model.txt, xgboost.ubj; the parameter 'model_type'"):
        forest_files.find(str(tmp_path))
    assert forest_files.find(str(tmp_path), "lightgbm") == (str(tmp_path / "model.txt"), "lightgbm")
    assert forest_files.find(str(tmp_path), "", "own.json")[1] == "xgboost_json"


def test_fields_that_are_not_known_are_ignored_on_request(module: Any, tmp_path: Path) -> None:
    found = made(tmp_path, ensembles.EVERY["xgb-logistic-json"])
    document = json.loads(found.path.read_text())
    document["learner"]["of_the_future"] = 1
    found.path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="xgboost_allow_unknown_field 'true' ignores"):
        serve(module, found)
    (values,) = answers(serve(module, found, xgboost_allow_unknown_field="true"), found.rows)
    np.testing.assert_allclose(values[:, 0], found.expected, 1e-6, 1e-6)
