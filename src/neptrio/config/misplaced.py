"""Files and folders of a model that nobody reads, though somebody has surely meant them to be read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

POINTER = b"version https://git-lfs"  # how a file begins that stands for one of Git LFS
POINTER_SIZE = 1024  # and is shorter than
SEEN = 1000  # files of a version that are looked at

MODELS = (
    "model.onnx",
    "model.py",
    "model.pt",
    "model.pt2",
    "model.plan",
    "model.xml",
    "model.savedmodel",
    "model.safetensors",
)


def hints(model_dir: Path, filename: str = "") -> list[str]:
    """A sentence for each: a folder too high or too low to be a model's, a configuration in other letters, a model beside the
    version folders, an ONNX file of another name than `filename`, the configuration's default_model_filename, a version folder
    that is not just a number. [] for a folder that cannot be read. Other files are a model's own matter: one in Python may read weights wherever they are."""
    found = []
    try:
        names = sorted(entry.name for entry in model_dir.iterdir())
        versions = [name for name in names if name.isdigit() and (model_dir / name).is_dir()]
        inside = {
            version: sorted(entry.name for entry in (model_dir / version).iterdir()) for version in versions
        }
    except OSError:
        return []
    models = [name for name in names if name in MODELS or name.endswith(".onnx")]
    if models and not versions and model_dir.name.isdigit():
        around = model_dir.parent.resolve().name
        return [
            f"'{around}' is itself a model's folder: serve the folder that it is in, or this one alone with "
            f"--model-name={around}"
        ]
    inside_it = [name for name in names if _looks_like_a_model(model_dir / name)]
    if inside_it and not versions:
        return [
            f"'{model_dir.name}' is itself a folder of models ('{inside_it[0]}'): serve it, and not the folder that it is in"
        ]
    served = {version for version, files in inside.items() if not {*MODELS, filename}.isdisjoint(files)}
    for name in names:
        if name.lower() == "config.pbtxt" != name and "config.pbtxt" not in names:
            found.append(f"'{name}' is not read: its name must be config.pbtxt, in lower case")
        model = name in MODELS or (name.endswith(".onnx") and not served)
        if model and not any(name in files for files in inside.values()):
            folder = versions[0] if versions else "1"
            found.append(
                f"'{name}' is not read, it lies beside the version folders: move it to '{folder}/{name}'"
            )
    for version, files in inside.items():
        onnx = [name for name in files if name.endswith(".onnx")]
        if onnx and version not in served:
            found.append(
                f"'{version}/{onnx[0]}' is not read: call it model.onnx, or name it in default_model_filename"
            )
    for name in names:
        number = name.lstrip("v").lstrip("0")
        if number.isdigit() and name != number and (model_dir / name).is_dir():
            found.append(
                f"'{name}' is no version number and is ignored; version {number} is a folder named {number}"
            )
    return found


def pointers(version_dir: Path) -> str:
    """A sentence for a version's folder where a file of Git LFS has not been fetched, "" where there is none. Reads files."""
    seen = 0
    for folder, _, names in os.walk(version_dir):
        for name in sorted(names):
            path = Path(folder) / name
            seen += 1
            try:
                state = path.stat()
                if not stat.S_ISREG(state.st_mode) or state.st_size >= POINTER_SIZE:
                    continue  # opening a named pipe would wait for its writer
                with path.open("rb") as file:
                    found = file.read(len(POINTER)) == POINTER
            except OSError:
                continue
            if found:
                inside = path.relative_to(version_dir.parent)
                return f"{inside} is a Git LFS pointer and not the file: run `git lfs pull` where the repository was cloned"
        if seen > SEEN:
            break
    return ""


def _looks_like_a_model(folder: Path) -> bool:
    return (folder / "config.pbtxt").is_file() or (folder / "1").is_dir()


def hinted(text: str, model_dir: Path) -> str:
    """An error's text with the hints for that folder."""
    return "; ".join([text, *hints(model_dir)])
