"""Files and folders of a model that nobody reads, though somebody has surely meant them to be read."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Iterable
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
SUFFIXES = (".onnx", ".pt", ".pt2", ".plan")  # of models under any name
CONFIG = "config.pbtxt"
CONFIGS = {CONFIG, "config.json"}
MOST_LOOSE = 3  # files of a repository that are told


def hints(model_dir: Path, filename: str = "") -> list[str]:
    """A sentence for each: a folder too high or too low to be a model's, a configuration under another name or in a version
    folder, a model beside the version folders, an ONNX file of another name than `filename`, the configuration's
    default_model_filename, a version that is a file or not just a number. [] for a folder that cannot be read. Other files are a model's own matter: one in Python may read weights wherever they are."""
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
        return [_itself_a_model(model_dir.parent)]
    inside_it = [name for name in names if _looks_like_a_model(model_dir / name)]
    if inside_it and not versions:
        return [
            f"'{model_dir.name}' is itself a folder of models ('{inside_it[0]}'): serve it, and not the folder that it is in"
        ]
    served = {version for version, files in inside.items() if not {*MODELS, filename}.isdisjoint(files)}
    for name in names:
        if name.lower() == CONFIG != name and CONFIG not in names:
            found.append(f"'{name}' is not read: its name must be {CONFIG}, in lower case")
        elif CONFIGS.isdisjoint(names) and _like_a_config(name) and (model_dir / name).is_file():
            found.append(f"'{name}' is not read: its name must be {CONFIG}")
        elif name == CONFIG and (model_dir / name).is_dir():
            found.append(f"'{name}' is a folder: the configuration is a file of that name")
        model = name in MODELS or (name.endswith(".onnx") and not served)
        if model and not any(name in files for files in inside.values()):
            folder = versions[0] if versions else "1"
            found.append(
                f"'{name}' is not read, it lies beside the version folders: move it to '{folder}/{name}'"
            )
    for version, files in inside.items():
        if CONFIG in files and CONFIGS.isdisjoint(names):
            found.append(
                f"'{version}/{CONFIG}' is not read: move it to '{CONFIG}', beside the version folders"
            )
        onnx = [name for name in files if name.endswith(".onnx")]
        if onnx and version not in served:
            found.append(
                f"'{version}/{onnx[0]}' is not read: call it model.onnx, or name it in default_model_filename"
            )
    for name in names:
        if name.isdigit() and (model_dir / name).is_file():
            found.append(f"'{name}' is a file: version {name} is a folder of that name, with the model in it")
        number = name.lstrip("v").lstrip("0")
        if number.isdigit() and name != number and (model_dir / name).is_dir():
            found.append(
                f"'{name}' is no version number and is ignored; version {number} is a folder named {number}"
            )
    return found


def loose(repository: Path) -> list[str]:
    """A sentence for each: a repository that is itself a model's folder or one of its versions, a model's file beside the
    models' folders. [] for a folder that cannot be read. Hints() of a model has what else can be told of its folder."""
    try:
        with os.scandir(repository) as entries:
            there = {entry.name: entry.is_file() for entry in entries}
    except OSError:
        return []
    files = sorted(name for name, is_file in there.items() if is_file)
    if any(name.isdigit() for name in there):
        return []
    models = [name for name in files if name in MODELS or name.endswith(SUFFIXES)]
    here = repository.resolve()
    if CONFIG in files and not any(
        _looks_like_a_model(repository / name) for name, is_file in there.items() if not is_file
    ):
        return [_itself_a_model(here)]
    if models and here.name.isdigit():
        return [_itself_a_model(here.parent)]
    found = []
    for name in models[:MOST_LOOSE]:
        model, dot, kind = name.rpartition(".")
        place = f"{'NAME' if model == 'model' else model}/1/model{dot}{kind}"
        found.append(f"'{name}' is not read, it lies beside the models' folders: move it to '{place}'")
    return found


def no_models(repositories: Iterable[object]) -> str:
    """What is said in place of models where there is none."""
    where = " ".join(map(str, repositories))
    return f"no models: there is no folder of a model in {where}" if where else "no models"


def _itself_a_model(folder: Path) -> str:
    name = folder.resolve().name
    return f"'{name}' is itself a model's folder: serve the folder that it is in, or this one alone with --model-name={name}"


def _like_a_config(name: str) -> bool:
    lower = name.lower()
    return lower.startswith("conf") and bool(difflib.get_close_matches(lower, [CONFIG], 1, 0.8))


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
