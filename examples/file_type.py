"""Prints the types of files, asked of the model `file_type` on a running server.

    python examples/file_type.py [--url HOST:PORT] FILE...

The model looks at the first and last bytes of a file's content: 1024 from the beginning after
leading white space, 1024 from the end before trailing white space, each byte one number, 256
where there is nothing. Its answer is a score for each of some 200 types; files that are too short
for it and scores that are too low are shown as plain text or as unknown.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.http as httpclient

FOLDER = Path(__file__).resolve().parent / "model_repository" / "file_type"
BATCH = 16  # files in one request, within the model's max_batch_size


def ends_of(path: Path, block: int) -> tuple[bytes, bytes]:
    """The first and the last `block` bytes of a file (all of it, twice, when it is shorter)."""
    with path.open("rb") as file:
        first = file.read(block)
        size = file.seek(0, 2)
        file.seek(max(0, size - block))
        return first, file.read(block)


def features(first: bytes, last: bytes, about: dict[str, Any]) -> np.ndarray | None:
    """The model's input for a file, INT32[2048], or None when there is too little in it."""
    head = first.lstrip()[: about["beginning"]]
    tail = last.rstrip()[-about["end"] :]
    if len(head) < about["least_bytes"]:
        return None
    row = np.full(about["beginning"] + about["end"], about["padding"], dtype=np.int32)
    row[: len(head)] = np.frombuffer(head, np.uint8)
    if tail:
        row[-len(tail) :] = np.frombuffer(tail, np.uint8)
    return row


def of_few_bytes(content: bytes) -> str:
    """The type of a file that is too short for the model."""
    if not content:
        return "empty"
    try:
        content.decode()
    except UnicodeDecodeError:
        return "unknown"
    return "txt"


def shown(label: str, score: float, about: dict[str, Any]) -> str:
    """The type to show for the model's best label."""
    name = about["shown_as"].get(label, label)
    if score >= about["thresholds"].get(label, about["threshold"]):
        return str(name)
    return "txt" if about["types"][name]["is_text"] else "unknown"


def ask(client: Any, rows: list[np.ndarray], labels: list[str]) -> list[tuple[str, float]]:
    """The best label and its score for each row, in one request."""
    batch = np.stack(rows)
    tensor = httpclient.InferInput("bytes", list(batch.shape), "INT32")
    tensor.set_data_from_numpy(batch)
    scores = client.infer("file_type", [tensor]).as_numpy("target_label")
    return [(labels[best], float(row[best])) for row, best in zip(scores, scores.argmax(axis=1), strict=True)]


def types_of(client: Any, paths: list[Path]) -> list[tuple[str, float]]:
    """(type, score) of every file, in order."""
    about = json.loads((FOLDER / "file_types.json").read_text())
    labels = (FOLDER / "labels.txt").read_text().splitlines()
    results: list[tuple[str, float]] = []
    waiting: list[tuple[int, np.ndarray]] = []
    for i, path in enumerate(paths):
        first, last = ends_of(path, about["block"])
        row = features(first, last, about)
        results.append((of_few_bytes(first), 1.0))
        if row is not None:
            waiting.append((i, row))
    for at in range(0, len(waiting), BATCH):
        part = waiting[at : at + BATCH]
        for (i, _), (label, score) in zip(part, ask(client, [row for _, row in part], labels), strict=True):
            results[i] = (shown(label, score, about), score)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="Prints the types of files.")
    parser.add_argument("--url", default="localhost:8000", help="the server's HTTP address")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    options = parser.parse_args()
    kinds = json.loads((FOLDER / "file_types.json").read_text())["types"]
    with httpclient.InferenceServerClient(options.url) as client:
        try:
            types = types_of(client, options.files)
        except OSError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        for path, (name, score) in zip(options.files, types, strict=True):
            description = kinds.get(name, {}).get("description", name)
            print(f"{path}: {name} ({description}), {score:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
