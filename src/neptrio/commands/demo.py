"""Serves a few example models, to try a client on: `neptrio demo`. Every flag of `neptrio` can follow.

    identity_*   every datatype, back as it came
    simple       the sum and the difference of two tensors, a CUDA kernel (where there is a C++ compiler or a GPU)
    upper_case   text in upper case, mean: the mean of a row, both in Python

It listens on loopback addresses, unless --http-address and --grpc-address say otherwise.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import neptrio
from neptrio.serving import serve, settings_of

HELP = "serve a few example models"
SERVES = True
PACKAGE = Path(neptrio.__file__).parent
# in an installed package setup.py has put them beside the modules
REPOSITORIES = (PACKAGE / "demo_repository", PACKAGE.parents[1] / "examples" / "model_repository")
MODELS = ("identity_*", "mean", "simple", "upper_case")
FIRST_REQUEST = """\
a first request:
  curl -s {} -d '{{"inputs": [{{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["hello"]}}]}}'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `neptrio demo`."""
    parser.usage = "neptrio demo [flags of neptrio]"


def run(options: argparse.Namespace) -> int:
    """Serves until a signal; 1 when the examples are not installed, 2 for wrong flags."""
    source = next((folder for folder in REPOSITORIES if folder.is_dir()), None)
    if source is None:
        print("error: the example models are not installed", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="neptrio-demo-") as name:
        for pattern in MODELS:
            for model in source.glob(pattern):
                if model.name != "simple" or _kernels_can_be_built():
                    shutil.copytree(model, Path(name) / model.name)
        before = {
            "model_repository": (Path(name),),
            "http_address": "127.0.0.1",
            "grpc_address": "127.0.0.1",
        }
        settings, warnings = settings_of(options.flags, before)
        if settings.allow_http:
            url = f"http://{settings.http_address}:{settings.http_port}/v2/models/upper_case/infer"
            print(FIRST_REQUEST.format(url), file=sys.stderr)
        return serve(settings, warnings)


def _kernels_can_be_built() -> bool:
    from neptrio.backends.kernel.host import compiler
    from neptrio.errors import TritonError

    try:
        compiler()
    except TritonError as error:
        print(f"the model 'simple' is left out: {error}", file=sys.stderr)
        return False
    return True
