"""Modules whose class is in a file model.py beside their weights: what a Triton server serves with runtime "model.py".

Rules:
 1. The class is the first of the file's own, in alphabetical order, that is a torch.nn.Module, made without arguments.
 2. Weights are a state dictionary in the .pt file of the same name, read as data alone: no code of a pickle runs. Without
    that file the module has the weights that its class gives it.
 3. It is compiled where the parameter asks for it, and not otherwise: compiling takes a C++ compiler, and minutes.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
from typing import Any

import torch

from torch_files import Loaded, code
from torch_names import Argument

COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"


def find(folder: str, filename: str = "") -> str:
    """The path of a version's source, "" where there is none."""
    name = filename or "model.py"
    path = os.path.join(folder, name)
    return path if name.endswith(".py") and os.path.isfile(path) else ""


def compiling(text: str) -> dict[str, Any] | None:
    """What to give to torch.compile(), None to leave it. Raises ValueError."""
    if not text:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"parameter '{COMPILE}' is no JSON: {error}") from None
    if not isinstance(found, dict) or "model" in found:
        raise ValueError(
            f"parameter '{COMPILE}' must be an object with arguments of torch.compile, 'model' aside"
        )
    return None if found.get("disable") else found


def load(path: str, device: str, options: dict[str, Any] | None) -> Loaded:
    """The module of a class and its weights. Raises ValueError."""
    made = _class(path)
    try:
        module = made()
    except TypeError as error:
        raise ValueError(f"{path}: {made.__name__}() must be made without arguments: {error}") from error
    weights = f"{path[:-3]}.pt"
    if os.path.isfile(weights):
        try:
            module.load_state_dict(torch.load(weights, map_location=device, weights_only=True))
        except Exception as error:  # of pickle, zip archives and modules
            raise ValueError(
                f"{weights} must hold the weights of {made.__name__}, torch.save(model.state_dict(), 'model.pt'): "
                f"{type(error).__name__}: {error}"
            ) from error
    module = module.to(device).eval()
    known = list(inspect.signature(module.forward).parameters.values())
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    arguments = [Argument(one.name, "", one.default is one.empty) for one in known if one.kind in plain]
    if len(arguments) < len(known):  # *args and the like: nobody knows how many
        arguments = []
    call = module if options is None else torch.compile(module, **options)
    return Loaded(call, *code(arguments), takes=", ".join(one.name for one in arguments))


def _class(path: str) -> Any:
    name = "neptrio_model_source"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    source = importlib.util.module_from_spec(spec)
    sys.modules[name] = source  # as import does it: dataclasses and pickle look there
    sys.path.insert(0, os.path.dirname(path))  # for modules beside it
    spec.loader.exec_module(source)
    for key in sorted(vars(source)):
        found = vars(source)[key]
        if isinstance(found, type) and issubclass(found, torch.nn.Module) and found.__module__ == name:
            return found
    raise ValueError(f"{path} has no class that is a torch.nn.Module")
