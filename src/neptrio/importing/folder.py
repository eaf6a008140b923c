"""Makes a model folder of a model's file, and shows that it serves.

The problem: between "I have a file" and a right answer stand a layout, a configuration and a first request, and whoever
writes them for the first time gets one of them wrong. The choice: the folder is made, a server loads it, as it will be
loaded later, and is asked something; what the backend found in the file is written into the configuration.

Rules:
 1. Nothing stands in the repository before the model has loaded: it is made in a folder beside, whose place it then takes.
 2. A folder that is there already is not touched.
 3. What had to be guessed is told: sizes that the file leaves open, and what the values of the test request mean.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format, text_format

from neptrio import datatypes
from neptrio.config import model_config
from neptrio.embedded.server import Server
from neptrio.errors import InvalidArgument, TritonError
from neptrio.importing import formats, stated
from neptrio.importing.stated import Stated

# what is written of a completed configuration; the rest are defaults
KEPT = ("backend", "platform", "max_batch_size", "input", "output", "parameters")
REQUEST = "request.json"


@dataclass
class Imported:
    """What came of it."""

    folder: Path
    kind: formats.Kind
    config: dict[str, Any] = field(default_factory=dict)
    answer: dict[str, Any] = field(default_factory=dict)  # the outputs of the test request
    request: str = ""  # the file with the test request
    streams: bool = False  # it gives several answers to a request
    problem: str = ""  # why it was not answered
    unknown: list[str] = field(default_factory=list)


def name_of(path: Path) -> str:
    """A model's name for a file."""
    return (
        re.sub(r"[^A-Za-z0-9_.-]+", "_", path.stem if path.is_file() else path.name).strip("._-") or "model"
    )


def make(
    source: Path, repository: Path, name: str = "", backend: str = "", inputs: Sequence[Stated] = ()
) -> Imported:
    """Makes the model's folder in the repository. Raises TritonError, and then nothing is there.

    `inputs` are those of a file that does not tell them.
    """
    file, kind = formats.inside(source) if source.is_dir() else (source, formats.recognise(source))
    kind = kind.served_by(backend)
    if inputs and kind.backend != "pytorch":
        raise InvalidArgument(f"{kind.words} tells its inputs itself: leave --input out")
    name = name or name_of(source)
    target = repository / name
    if target.exists():
        raise InvalidArgument(f"{target} is there already: remove it, or give another --name")
    repository.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".import-", dir=repository) as scratch:
        folder = Path(scratch) / name
        _copy(source, file, kind, folder / "1")
        made = Imported(target, kind)
        ways = [True, False] if stated.batches(list(inputs)) else [False]
        try:
            for batched in ways:
                text = f'backend: "{kind.backend}"\n{stated.text(list(inputs), batched)}'
                (folder / "config.pbtxt").write_text(text)
                try:
                    _try(made, Path(scratch), name, folder)
                    break
                except TritonError:
                    if batched == ways[-1]:
                        raise
        except TritonError as error:  # in words of what the user has, not of the copy
            text = (
                str(error).replace(str(folder / "1" / kind.name), str(file)).replace(str(folder), str(target))
            )
            raise InvalidArgument(text.strip().rstrip(";")) from None
        (folder / "config.pbtxt").write_text(_written(made.config, source))
        folder.rename(target)
    return made


def _copy(source: Path, file: Path, kind: formats.Kind, version: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, version, ignore=shutil.ignore_patterns(*kind.left))
        (version / file.relative_to(source)).rename(version / kind.name)
        if file.suffix == ".xml" and (version / f"{file.stem}.bin").exists():
            (version / f"{file.stem}.bin").rename(version / "model.bin")
        return
    version.mkdir(parents=True)
    shutil.copyfile(file, version / kind.name)
    for beside in kind.beside:
        if not beside.is_file():
            raise InvalidArgument(f"{file} needs {beside}, which is not there")
        place = version / beside.relative_to(file.parent)
        if file.suffix == ".xml":
            place = version / f"{Path(kind.name).stem}{beside.suffix}"  # weights have the network's name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(beside, place)


def _try(made: Imported, repository: Path, name: str, folder: Path) -> None:
    """Loads the model, notes its configuration and asks it something."""
    with Server(repository, model_control_mode="explicit").running() as server:
        server.load(name)
        model = server.model(name)
        made.config = model.config()
        inputs = dict(_inputs(made))
        written = _as_json(made.config, inputs)
        if written:
            made.request = REQUEST
            made.streams = _decoupled(made.config)
            # a route that carries several answers takes values by their names
            whole = {row["name"]: row["data"] for row in written} if made.streams else {"inputs": written}
            (folder / REQUEST).write_text(json.dumps(whole) + "\n")
        try:
            if _decoupled(made.config):
                response = next(iter(model.stream(inputs)))
            else:
                response = model.infer(inputs)
            made.answer = {key: response[key] for key in response}
        except TritonError as error:
            made.problem = str(error)


def _decoupled(config: dict[str, Any]) -> bool:
    return bool(config.get("model_transaction_policy", {}).get("decoupled"))


def _inputs(made: Imported) -> Iterator[tuple[str, np.ndarray]]:
    batched = made.config.get("max_batch_size", 0) > 0
    inputs = made.config["input"]
    # one that takes a text or its tokens has them all optional: the first is what people have
    for tensor in [row for row in inputs if not row.get("optional")] or inputs[:1]:
        dims = [int(size) for size in tensor["dims"]]
        if -1 in dims:
            made.unknown.append(f"input {tensor['name']} has dims {dims}: 1 was taken for each -1")
        shape = [1] * batched + [1 if size < 0 else size for size in dims]
        dtype = datatypes.NUMPY[datatypes.FROM_CONFIG_NAME[tensor["data_type"]]]
        array = np.zeros(shape, dtype)
        if dtype.hasobject:
            array.fill(made.kind.sample)  # np.full() takes zeros at the end away
        yield tensor["name"], array
    if not batched and not _decoupled(made.config):
        made.unknown.append(
            "whether requests may be joined: the first dimension is none that every input and output share, so it does "
            "not batch (max_batch_size 0)"
        )


def _as_json(config: dict[str, Any], inputs: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """The inputs of a request in JSON; none where one has a datatype that JSON requests cannot have."""
    found = []
    for tensor in config["input"]:
        if tensor["name"] not in inputs:
            continue
        number, array = datatypes.FROM_CONFIG_NAME[tensor["data_type"]], inputs[tensor["name"]]
        if number in (datatypes.FP16, datatypes.BF16):
            return []
        data = [value.decode() if isinstance(value, bytes) else value for value in array.ravel().tolist()]
        name, shape = datatypes.NAME[number], list(array.shape)
        found.append({"name": tensor["name"], "datatype": name, "shape": shape, "data": data})
    return found


def _written(config: dict[str, Any], source: Path) -> str:
    """config.pbtxt with what was found."""
    kept = {
        key: config[key]
        for key in KEPT
        if config.get(key) not in (None, "", [], {}) or key == "dynamic_batching"
    }
    if "dynamic_batching" not in config:
        kept.pop("dynamic_batching", None)
    else:
        kept["dynamic_batching"] = {}
    if _decoupled(config):
        kept["model_transaction_policy"] = {"decoupled": True}
    message = json_format.ParseDict(kept, model_config.new_config(), ignore_unknown_fields=True)
    text = text_format.MessageToString(message)
    return f"# found in {source.name} by `neptrio import`: what you change here counts\n{text}"
