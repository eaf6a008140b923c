"""Prepares examples/model_repository: makes the files that are not kept in git.

The file-type model comes out of the PyPI package `magika`, the speech detection model out of
`silero-vad`, which `make` installs without their dependencies (pyproject.toml, extra `examples`); the
packages themselves are never imported.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent / "model_repository"


def prepare_file_type(repository: Path = REPOSITORY) -> None:
    """The steps of file_type: file_type_scores/1/model.onnx with labels.txt, file_type_ends/ends.json and
    file_type_label/file_types.json. Raises FileNotFoundError without the package."""
    found = importlib.util.find_spec("magika")
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError(
            "the package 'magika' is not installed (its ONNX model is the example 'file_type'): run 'make build', or "
            "'pip install --no-deps' the version that pyproject.toml names in the extra 'examples'"
        )
    package = Path(next(iter(found.submodule_search_locations)))
    source = sorted(package.glob("models/*/model.onnx"))[-1]
    target = repository / "file_type_scores" / "1" / "model.onnx"
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() or target.stat().st_size != source.stat().st_size:
        shutil.copyfile(source, target)
    settings = json.loads((source.parent / "config.min.json").read_text())
    kinds = json.loads((package / "config" / "content_types_kb.min.json").read_text())
    labels = settings["target_labels_space"]
    (repository / "file_type_scores" / "labels.txt").write_text("\n".join(labels) + "\n")
    ends = {
        "beginning": settings["beg_size"],
        "end": settings["end_size"],
        "block": settings["block_size"],
        "padding": settings["padding_token"],
        "least_bytes": settings["min_file_size_for_dl"],
    }
    (repository / "file_type_ends" / "ends.json").write_text(json.dumps(ends, indent=1) + "\n")
    types = {
        "labels": labels,
        "threshold": settings["medium_confidence_threshold"],
        "thresholds": settings["thresholds"],
        "shown_as": settings["overwrite_map"],
        "types": {
            name: {"description": kind["description"], "is_text": kind["is_text"]}
            for name, kind in kinds.items()
            if name in labels or name in ("txt", "unknown", "empty")
        },
    }
    (repository / "file_type_label" / "file_types.json").write_text(json.dumps(types, indent=1) + "\n")


def prepare_speech_detection(repository: Path = REPOSITORY) -> None:
    """speech_detection: model.onnx, the one for 16 kHz. Raises FileNotFoundError without the package."""
    found = importlib.util.find_spec("silero_vad")
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError(
            "the package 'silero-vad' is not installed (its ONNX model is the example 'speech_detection'): run 'make "
            "build', or 'pip install --no-deps' the version that pyproject.toml names in the extra 'examples'"
        )
    source = Path(next(iter(found.submodule_search_locations))) / "data" / "silero_vad_openvino_16k.onnx"
    target = repository / "speech_detection" / "1" / "model.onnx"
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() or target.stat().st_size != source.stat().st_size:
        shutil.copyfile(source, target)


def main() -> int:
    try:
        prepare_file_type()
        prepare_speech_detection()
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
