"""Tells what kind of model a file holds, by its name and its first bytes. Nothing of it is run.

Rules:
 1. A file is renamed to the name that its backend looks for, so that no configuration has to name it.
 2. What cannot be served is refused with what to do instead.
 3. A folder holds one model's file, and whatever lies beside that is taken along. One of a Hugging Face model is known by its
    config.json and weights; the same weights in other formats are left.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from neptrio.backends import elsewhere
from neptrio.backends.onnx import signature
from neptrio.errors import InvalidArgument, NotFound

PICKLES = (".pkl", ".pickle", ".joblib", ".cloudpickle")
PICKLE = (
    "is a pickle, and reading one runs whatever code is in it. Write another file where the model was trained: "
    "model.save_model('xgboost.ubj') for XGBoost, model.booster_.save_model('model.txt') for LightGBM, "
    "skops.io.dump(model, 'model.skops') for scikit-learn; docs/trees.md has more"
)
# weights of a Hugging Face model, and what its folder may hold beside them for other libraries
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
OTHER_WEIGHTS = (
    "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.gguf", "*.tflite", "onnx", "openvino", "coreml",
    ".git", ".cache",
)  # fmt: skip
# a picture of one black pixel, as BMP: of all formats the one that a text can hold
PIXEL = struct.pack("<2sIIIIiiHHIIiiII", b"BM", 58, 0, 54, 40, 1, 1, 1, 24, 0, 4, 0, 0, 0, 0) + bytes(4)
# the end of a name -> the backend whose models such files are, where they cannot be served here
ELSEWHERE = {".plan": "tensorrt", ".engine": "tensorrt", ".savedmodel": "tensorflow", ".dali": "dali"}


@dataclass(frozen=True)
class Kind:
    """What a file is."""

    backend: str
    name: str  # its name in a version's folder
    words: str  # what to call it
    beside: tuple[Path, ...] = field(default=())  # files that belong to it
    others: tuple[str, ...] = ()  # backends that serve it as well
    left: tuple[str, ...] = ()  # patterns of what is not taken along of a folder
    sample: bytes = b"text"  # what a test request gives for a text

    def served_by(self, backend: str) -> Kind:
        """The same for another backend. Raises InvalidArgument when that does not serve it."""
        if backend in ("", self.backend):
            return self
        if backend not in self.others:
            known = " or ".join((self.backend, *self.others))
            raise InvalidArgument(f"{self.words} is served by {known}, not by '{backend}'")
        return replace(self, backend=backend)


def recognise(path: Path) -> Kind:
    """What a file holds. Raises InvalidArgument."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from None
    suffix = path.suffix.lower()
    if suffix in ELSEWHERE:
        raise InvalidArgument(f"{path}: {elsewhere.way(ELSEWHERE[suffix])}")
    if suffix in PICKLES or (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and len(head) > 1):
        raise InvalidArgument(f"{path} {PICKLE}")
    if suffix == ".onnx":
        names = signature.read(path).external
        leading_out = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
        if leading_out:
            raise InvalidArgument(f"{path} wants weights from '{leading_out[0]}', outside its folder")
        external = tuple(path.parent / name for name in names)
        return Kind("onnxruntime", "model.onnx", "an ONNX model", external, ("openvino",))
    if suffix == ".py" and b"TritonPythonModel" in path.read_bytes():
        return Kind("python", "model.py", "a Python model")
    if suffix == ".xml" and b"<net" in head:
        return Kind("openvino", "model.xml", "a network of OpenVINO", (path.with_suffix(".bin"),))
    if suffix in (".pt", ".pt2"):
        return Kind("pytorch", f"model{suffix}", "a module of PyTorch")
    kind = _trees(suffix, head)
    if kind is None:
        raise InvalidArgument(
            f"{path} is no model that is known here: ONNX (.onnx), PyTorch (.pt2, .pt), OpenVINO (.xml), XGBoost (.ubj, "
            ".json), LightGBM (.txt), treelite (.tl), skops (.skops), Python with a TritonPythonModel (.py), or the "
            "folder of a Hugging Face model"
        )
    return kind


def _trees(suffix: str, head: bytes) -> Kind | None:
    if head.startswith(b"tree\n"):
        return Kind("fil", "model.txt", "LightGBM's trees")
    if suffix == ".tl":
        return Kind("fil", "checkpoint.tl", "a checkpoint of treelite")
    if suffix == ".skops":
        return Kind("fil", "model.skops", "scikit-learn's trees")
    # JSON and UBJSON begin alike; the first key of an object follows
    if head[:1] == b"{" and b"learner" in head:
        name = "xgboost.json" if head[1:].lstrip()[:1] == b'"' else "xgboost.ubj"
        return Kind("fil", name, "XGBoost's trees")
    if suffix in (".model", ".xgb", ".bst") and head[:4] == b"binf":
        return Kind("fil", "xgboost.model", "XGBoost's trees")
    return None


def inside(folder: Path) -> tuple[Path, Kind]:
    """The model's file in a folder, and what it is. Raises InvalidArgument."""
    names = sorted(path for path in folder.iterdir() if path.is_file())
    if (folder / "saved_model.pb").exists():
        raise InvalidArgument(f"{folder}: {elsewhere.way('tensorflow')}")
    if (folder / "config.json").is_file() and any((folder / name).is_file() for name in WEIGHTS):
        return folder / "config.json", _hugging_face(folder)
    found: list[tuple[Path, Kind]] = []
    refused: list[str] = []
    for path in names:
        try:
            found.append((path, recognise(path)))
        except InvalidArgument as error:
            if path.suffix.lower() in (*PICKLES, *ELSEWHERE):
                refused.append(str(error))
    if len(found) == 1:
        return found[0]
    if found:
        several = ", ".join(path.name for path, _ in found)
        raise InvalidArgument(f"{folder} holds several models: {several}; name the file that is meant")
    raise InvalidArgument(
        refused[0] if refused else f"{folder} holds no model's file that is known here; name a file"
    )


def _hugging_face(folder: Path) -> Kind:
    safe = any((folder / name).is_file() for name in WEIGHTS[:2])
    sample = Kind.sample
    if (folder / "preprocessor_config.json").is_file():
        sample = PIXEL
    else:
        mask = _object(folder / "tokenizer_config.json").get("mask_token")
        if isinstance(mask, dict):
            mask = mask.get("content")
        if str(_object(folder / "config.json").get("architectures")).endswith("ForMaskedLM']") and mask:
            sample = f"text {mask}".encode()
    left = OTHER_WEIGHTS if safe else ()
    return Kind("transformers", "config.json", "a Hugging Face model", left=left, sample=sample)


def _object(path: Path) -> dict[str, Any]:
    """A JSON object, empty where the file has none: the backend says what is wrong with it."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
