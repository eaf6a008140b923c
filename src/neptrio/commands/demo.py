"""Serves example models with everything switched on, to try the server out: `neptrio demo`. Every flag of `neptrio` can
follow; --model-repository=DIR serves your models instead of the examples.

    identity_*   every datatype, back as it came
    simple       the sum and the difference of two tensors, a CUDA kernel (where there is a C++ compiler or a GPU)
    upper_case   text in upper case, mean: the mean of a row, both in Python

Unless flags say otherwise it listens on loopback addresses, so that there is the console; models can be loaded and
unloaded (mode explicit, all are loaded); there is a small response cache; requests can ask to be traced.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import neptrio
from neptrio.serving import serve, settings_of

HELP = "serve a few example models"
SERVES = True
PACKAGE = Path(neptrio.__file__).parent
# in an installed package setup.py has put them beside the modules
REPOSITORIES = (PACKAGE / "demo_repository", PACKAGE.parents[1] / "examples" / "model_repository")
MODELS = ("identity_*", "mean", "simple", "upper_case")
# what is switched on, unless a flag says otherwise
EVERYTHING: dict[str, Any] = {
    "http_address": "127.0.0.1",
    "grpc_address": "127.0.0.1",
    "model_control_mode": "explicit",
    "load_model": ("*",),
    "cache_config": (f"local,size={16 << 20}",),
    "allow_forced_trace": True,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `neptrio demo`."""
    parser.usage = "neptrio demo [flags of neptrio]"


def run(options: argparse.Namespace) -> int:
    """Serves until a signal; 1 when the examples are not installed, 2 for wrong flags."""
    named = {flag.partition("=")[0] for flag in options.flags}
    before = dict(EVERYTHING)
    if named & {"--load-model", "--model-control-mode"}:
        del before["load_model"]  # it would be added to theirs
    if named & {"--model-repository", "--model-store"}:
        return serve(*settings_of(options.flags, before), first_steps=True)
    source = next((folder for folder in REPOSITORIES if folder.is_dir()), None)
    if source is None:
        print("error: the example models are not installed", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="neptrio-demo-") as name:
        for pattern in MODELS:
            for model in source.glob(pattern):
                if model.name != "simple" or _kernels_can_be_built():
                    shutil.copytree(model, Path(name) / model.name)
        before["model_repository"] = (Path(name),)
        return serve(*settings_of(options.flags, before), first_steps=True)


def _kernels_can_be_built() -> bool:
    from neptrio.backends.kernel.host_compiler import compiler
    from neptrio.errors import TritonError

    try:
        compiler()
    except TritonError as error:
        print(f"the model 'simple' is left out: {error}", file=sys.stderr)
        return False
    return True
