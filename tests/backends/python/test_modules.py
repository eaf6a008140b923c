"""What lies beside a model's file is found by everything that looks for modules, as on a Triton server."""

from __future__ import annotations

import json
import os
import pickle
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.backends.python.models import config, isolated
from tests.support.server import ServerProcess

# evaluates its parameter "code", after which `x` is the answer
EVALUATES = """
import importlib, importlib.resources, json, logging, logging.config, multiprocessing, os, pickle, pkgutil, pydoc, sys
import numpy as np
import helper_beside
from . import helper_beside as relative

class Own:
    pass

def own_double(n):
    return 2 * n + helper_beside.ZERO

SEEN = []

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for r in requests:
            names = dict(globals(), self=self)
            exec(json.loads(r.parameters())["code"], names)
            text = np.array([json.dumps(names["x"])], np.object_)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text)]))
        return answers
"""
HELPER = """
import logging
ZERO = 0

class Weights:
    def __eq__(self, other):
        return type(other) is Weights

class Handler(logging.Handler):
    said = []
    def emit(self, record):
        self.said.append(record.getMessage())

def double(n):
    return 2 * n
"""
FILES = {
    "1/helper_beside.py": HELPER,
    "shared_beside.py": "VALUE = 'of the model'",
    "1/package_beside/__init__.py": "",
    "1/package_beside/part.py": "VALUE = 'a part'",
    "1/package_beside/data.txt": "some data",
    # names that others have, too: Python's own must stay, installed ones give way
    "1/queue.py": "raise RuntimeError('not the library')",
    "1/tritonclient.py": "VALUE = 'beside'",
    "1/weights.pickle": b"chelper_beside\nWeights\n(tR.",  # protocol 0: the class, called
}
HOMES = ("process", "environment")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repository")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    environment = folder / "environment" / "env"
    venv.create(environment, with_pip=False, symlinks=True)
    site = environment / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    (site / "numpy.pth").write_text(str(Path(np.__file__).parent.parent) + "\n")
    text = config(outputs="OUT:TYPE_STRING:1")
    isolated(folder, "process", EVALUATES, text, files=FILES)
    isolated(folder, "environment", EVALUATES, text, way=str(environment), files=FILES)
    with ServerProcess(folder, "--follow-external-links=true") as process:
        yield process


def found(server: ServerProcess, home: str, code: str) -> Any:
    """What `x` is in the model after `code`."""
    with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
        tensor = httpclient.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.ones(1, np.float32))
        return json.loads(client.infer(home, [tensor], parameters={"code": code}).as_numpy("OUT")[0])


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("x = importlib.import_module('helper_beside') is helper_beside", True),
        ("x = importlib.import_module('shared_beside').VALUE", "of the model"),
        ("x = importlib.import_module('package_beside.part').VALUE", "a part"),
        ("x = __import__('package_beside.part').part.VALUE", "a part"),
        ("x = pydoc.locate('helper_beside.Weights') is helper_beside.Weights", True),
        ("x = importlib.resources.files('package_beside').joinpath('data.txt').read_text()", "some data"),
        ("x = pkgutil.get_data('package_beside', 'data.txt').decode()", "some data"),
        (
            "x = [n for _, n, _ in pkgutil.iter_modules() if n.endswith('_beside')]",
            ["helper_beside", "package_beside", "shared_beside"],
        ),
        (
            "import package_beside; x = [n for _, n, _ in pkgutil.walk_packages(package_beside.__path__)]",
            ["part"],
        ),
        (
            "x = pickle.load(open(os.path.dirname(__file__) + '/weights.pickle', 'rb')) == helper_beside.Weights()",
            True,
        ),
        ("x = isinstance(pickle.loads(pickle.dumps(Own())), Own)", True),
        (
            "logging.config.dictConfig({'version': 1, 'disable_existing_loggers': False, 'handlers': {'h': {'class': "
            "'helper_beside.Handler'}}, 'loggers': {'here': {'handlers': ['h'], 'level': 'INFO'}}})\n"
            "logging.getLogger('here').info('heard')\nx = helper_beside.Handler.said[-1]",
            "heard",
        ),
        ("x = [__name__, __package__, relative.__name__]", ["1.model", "1", "1.helper_beside"]),
        ("x = sys.modules[__name__].TritonPythonModel is type(self)", True),
        ("x = sys.argv", [""]),
        ("import queue; x = hasattr(queue, 'SimpleQueue')", True),
        ("x = importlib.import_module('tritonclient').VALUE", "beside"),
    ],
)
def test_what_lies_beside_a_model_is_found(server: ServerProcess, home: str, code: str, value: Any) -> None:
    assert found(server, home, code) == value


@pytest.mark.parametrize("home", HOMES)
def test_the_two_folders_are_on_the_path(server: ServerProcess, folder: Path, home: str) -> None:
    path = found(server, home, "x = sys.path")
    place = path.index(str(folder / home / "1"))
    assert path[place + 1] == str(folder / home)
    assert place > path.index(os.path.dirname(os.__file__)), "Python's own modules come first"


@pytest.mark.slow
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_pools_find_the_models_modules(server: ServerProcess, home: str, method: str) -> None:
    code = (
        f"with multiprocessing.get_context('{method}').Pool(1) as pool:\n"
        "    x = pool.map(helper_beside.double, [1, 2]) + pool.map(own_double, [3])"
    )
    assert found(server, home, code) == [2, 4, 6]


def test_what_a_model_pickles_loads_elsewhere(
    server: ServerProcess, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = found(server, "process", "x = pickle.dumps(helper_beside.Weights()).hex()")
    monkeypatch.syspath_prepend(str(folder / "process" / "1"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    try:
        weights = pickle.loads(bytes.fromhex(data))
    finally:
        module = sys.modules.pop("helper_beside", None)
    assert module is not None and type(weights) is module.Weights
