"""Makes a model folder of a model's file: `neptrio import churn.ubj`.

The folder has the file under the name that its backend looks for, a configuration with what was found in it, and a request
to try. The model is loaded and asked once before the folder is put into the repository.

Known are ONNX, PyTorch (.pt2, and .pt with --input for each of its tensors, which it does not tell), OpenVINO, trees of XGBoost, LightGBM, treelite and
skops, Python models, and folders of Hugging Face models. Another folder is taken with all that is in it, if it holds one such file. Exit status: 0 when it answered, 1 when it loaded and did not answer, 2 when nothing was made.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neptrio import flags
from neptrio.addresses import model_in_path

if TYPE_CHECKING:
    from neptrio.importing.folder import Imported

HELP = "make a model folder of a model's file"
SHOWN = 60  # characters of an output's values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `neptrio import`."""
    parser.add_argument("source", type=Path, help="the model's file, or a folder that holds it")
    parser.add_argument(
        "--repository",
        type=flags.local_repository,
        default=Path("models"),
        help="where it goes (default: models)",
    )
    parser.add_argument("--backend", default="", help="openvino: for an ONNX file, instead of onnxruntime")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME:TYPE:SHAPE",
        help="an input of a PyTorch file that does not tell it, such as x:FP32:-1,4; -1 first is a batch",
    )
    parser.add_argument("--name", default="", help="the model's name (default: the file's)")


def run(options: argparse.Namespace) -> int:
    """Makes the folder and tells what was found."""
    from neptrio.errors import TritonError
    from neptrio.importing import folder, stated

    try:
        name = flags.model_name(options.name) if options.name else ""
        inputs = [stated.parse(text) for text in options.input]
        made = folder.make(options.source, options.repository, name, options.backend, inputs)
    except (TritonError, OSError, ValueError, argparse.ArgumentTypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{made.folder}: {made.kind.words}, served by backend '{made.kind.backend}'")
    batched = made.config.get("max_batch_size", 0) > 0
    for kind in ("input", "output"):
        for tensor in made.config[kind]:
            shape = [-1] * batched + [int(size) for size in tensor["dims"]]
            print(f"  {kind:<7} {tensor['name']}  {tensor['data_type'].removeprefix('TYPE_')} {shape}")
    if made.problem:
        print(f"it loads, and the test request (zeros) was refused: {made.problem.strip()}")
    else:
        print("a test request (zeros) was answered:")
        for key, values in made.answer.items():
            print(f"  {key} = {_short(values)}")
    for line in made.unknown:
        print(f"not known: {line}")
    print(f"serve it:  {shlex.join(['neptrio', f'--model-repository={options.repository}'])}")
    if model_in_path(made.folder.name) != made.folder.name:
        print("ask it:    over gRPC, since a path of HTTP cannot carry the name")
    elif made.request:
        print(f"ask it:    {_curl(made)}")
    elif made.config["input"]:
        print("ask it:    with a client that sends binary tensors, since JSON carries no FP16 and no BF16")
    return int(bool(made.problem))


def _curl(made: Imported) -> str:
    """The command that sends the test request, for a shell."""
    how, route = (["-N"], "generate_stream") if made.streams else ([], "infer")
    place = f"localhost:8000/v2/models/{made.folder.name}/{route}"
    return shlex.join(["curl", *how, "-d", f"@{made.folder / made.request}", place])


def _short(values: Any) -> str:
    text = " ".join(str(values.tolist()).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... {list(values.shape)}"
