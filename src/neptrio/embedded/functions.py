"""Functions and classes as models: their configuration, and where a model's instance finds its function.

A function becomes a folder of a model repository like any other: a config.pbtxt made from its signature, and a
model.py of two lines that looks the function up (embedded.function_model). So loading, batching, sequences,
statistics and everything else is what every Python model gets.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from google.protobuf import text_format

from neptrio import datatypes
from neptrio.embedded.signature import Signature, Tensors, TensorSpec, read
from neptrio.embedded.spelled_out import spelled_out

MODEL_PY = """\
from neptrio.embedded.function_model import model_class

TritonPythonModel = model_class({key!r}, {app!r}, {name!r})
"""
NAME = re.compile(r"[^/\\\0]+")
_functions: dict[str, FunctionModel] = {}  # key -> the function of a running server in this process
_numbers = itertools.count(1)


class FunctionOptions(TypedDict, total=False):
    """Keyword arguments of what makes a function or class a model, all of them optional.

    `name`: the model's name, by default the function's.
    `inputs`, `outputs`: what annotations do not say: name -> TensorSpec, (datatype, shape), or datatype.
    `max_batch_size`: above 0 arrays have a batch dimension, and the function gets whole batches: the inputs of several
    requests, joined. It returns as many rows as it got.
    `batching`: fields of dynamic_batching (preferred_batch_size, max_queue_delay_microseconds, ...); False: one call
    for each request.
    `instances`: how many calls may run at the same time. A class is instantiated once for each.
    `config`: more fields of the model's configuration (as JSON), which come before everything else.
    """

    name: str
    inputs: Tensors | None
    outputs: Tensors | None
    max_batch_size: int
    batching: bool | Mapping[str, Any]
    instances: int
    config: Mapping[str, Any] | None


class FunctionModel:
    """A function or class that is a model. Its arguments are FunctionOptions."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str = "",
        inputs: Tensors | None = None,
        outputs: Tensors | None = None,
        max_batch_size: int = 0,
        batching: bool | Mapping[str, Any] = True,
        instances: int = 1,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(function):
            raise TypeError(f"expected a function or a class, got {function!r}")
        self.function = function
        self.name = name or getattr(function, "__name__", "")
        if not NAME.fullmatch(self.name) or self.name in (".", ".."):
            raise ValueError(f"'{self.name}' cannot be the name of a model; say name=")
        self.signature: Signature = read(function, inputs, outputs, self.name)
        self.app = (
            ""  # how a process of the model's own finds the server (server_of); "": it runs in this process
        )
        self.batched = bool(max_batch_size) and batching is not False and not self.signature.decoupled
        self._max_batch_size = max_batch_size
        self._batching = batching
        self._instances = instances
        self._config = config or {}
        self._key = ""
        tensors = (*self.signature.inputs, *self.signature.outputs)
        if max_batch_size and any(spec.scalar for spec in tensors):
            raise TypeError(
                f"model '{self.name}': str, bytes, int, float and bool stand for one element; with max_batch_size "
                "inputs and outputs are arrays"
            )
        if self.batched and self.signature.context:
            raise TypeError(f"model '{self.name}': a batch has no Context of one request; use batching=False")

    def config(self) -> dict[str, Any]:
        """The model's configuration as JSON."""
        sequences = self._config.get("sequence_batching", {})
        # controls and implicit states are tensors of the function, and not of its clients
        by_server = {control.get("name") for control in sequences.get("control_input", ())}
        for state in sequences.get("state", ()):
            by_server |= {state.get("input_name"), state.get("output_name")}
        made: dict[str, Any] = {
            "name": self.name,
            "backend": "python",
            "max_batch_size": self._max_batch_size,
            "input": [_tensor(spec) for spec in self.signature.inputs if spec.name not in by_server],
            "output": [_tensor(spec) for spec in self.signature.outputs if spec.name not in by_server],
            "instance_group": [{"kind": "KIND_CPU", "count": self._instances}],
        }
        if self.signature.decoupled:
            made["model_transaction_policy"] = {"decoupled": True}
        if self.batched and not {"sequence_batching", "dynamic_batching"} & set(self._config):
            made["dynamic_batching"] = dict(self._batching) if isinstance(self._batching, Mapping) else {}
        made.update(self._config)
        # what imports the program again sees what the program saw, whatever other models here are given
        where = ("ENVIRONMENT", "*") if self.app else ("isolation", "none")
        made["parameters"] = {where[0]: {"string_value": where[1]}, **made.get("parameters", {})}
        return made

    def write(self, repository: Path) -> None:
        """Makes the model's folder, and registers the function for its instances.

        Raises InvalidArgument for a configuration that is none.
        """
        from neptrio.config import model_config  # not needed in a model's process

        message = model_config.parse_json(json.dumps(self.config()), f"config= of model '{self.name}'")
        self.forget()
        self._key = f"{next(_numbers)}-{self.name}"
        _functions[self._key] = self
        folder = repository / self.name
        (folder / "1").mkdir(parents=True, exist_ok=True)
        (folder / "config.pbtxt").write_text(text_format.MessageToString(message))
        (folder / "1" / "model.py").write_text(MODEL_PY.format(key=self._key, app=self.app, name=self.name))

    def forget(self) -> None:
        """The server has ended, or has another function of this name."""
        _functions.pop(self._key, None)

    def remove(self, repository: Path) -> None:
        """Removes what write() has made."""
        self.forget()
        shutil.rmtree(repository / self.name, ignore_errors=True)


_defaults = inspect.getfullargspec(FunctionModel.__init__).kwonlydefaults
takes_function_options = spelled_out(FunctionOptions, _defaults or {})


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": spec.name,
        "data_type": datatypes.CONFIG_NAME[spec.number],
        "dims": list(spec.shape),
    }
    if spec.optional:
        made["optional"] = True
    return made


def find(key: str, app: str, name: str) -> FunctionModel:
    """The function of a model's instance: registered in this process, or in the module that `app` names.

    Raises LookupError.
    """
    found = _functions.get(key)
    if found is not None:
        return found
    if app:
        found = server_of(app).functions.get(name)
        if found is not None:
            return found
    raise LookupError(f"the function of model '{name}' is not in this process")


def absolute(app: str) -> str:
    """`MODULE:SERVER` or `FILE.py:SERVER` in the form FOLDER:MODULE:SERVER that means the same in every process.

    Raises ValueError.
    """
    target, _, attribute = app.rpartition(":")
    if not target or not attribute:
        raise ValueError(f"expected MODULE:SERVER or FILE.py:SERVER, got '{app}'")
    path = Path(target)
    if path.suffix == ".py":
        return f"{path.resolve().parent}:{path.stem}:{attribute}"
    return f"{Path.cwd()}:{target}:{attribute}"


def server_of(app: str) -> Any:
    """The Server that FOLDER:MODULE:SERVER names. Raises ValueError, or what importing the module raises."""
    place, _, attribute = app.rpartition(":")
    folder, _, module = place.rpartition(":")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        made = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of what the program itself imports
        raise ValueError(
            f"there is no module '{error.name}', which would be {error.name}.py in {folder}"
        ) from None
    if inspect.isclass(made) or not isinstance(getattr(made, "functions", None), Mapping):
        raise ValueError(f"'{attribute}' of module '{module}' is no neptrio.Server")
    return made
