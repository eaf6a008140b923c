"""Prints the types of files, asked of the ensemble `file_type` on a running server.

    python examples/file_type.py [--url HOST:PORT] FILE...

Raw bytes go in, a label comes out: the ensemble's first step prepares the content, the second
scores it, the third names the best score. Only the ends of a content count, so of a large file no
more than those are sent.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.http as httpclient

BATCH = 16  # files in one request, within the model's max_batch_size
END = 65536  # bytes sent from each end of a larger file; the model looks at far fewer


def content_of(path: Path) -> bytes:
    """The content of a file, without the middle of a large one."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        if size <= 2 * END:
            return file.read()
        first = file.read(END)
        file.seek(size - END)
        return first + file.read(END)


def types_of(client: Any, paths: list[Path]) -> list[tuple[str, str, float]]:
    """(type, its description, score) of every file, in order."""
    results: list[tuple[str, str, float]] = []
    for at in range(0, len(paths), BATCH):
        contents = np.array([[content_of(path)] for path in paths[at : at + BATCH]], dtype=object)
        tensor = httpclient.InferInput("CONTENT", list(contents.shape), "BYTES")
        tensor.set_data_from_numpy(contents)
        answer = client.infer("file_type", [tensor])
        columns = [answer.as_numpy(name).reshape(-1) for name in ("LABEL", "DESCRIPTION", "SCORE")]
        results += [
            (label.decode(), word.decode(), float(score)) for label, word, score in zip(*columns, strict=True)
        ]
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="Prints the types of files.")
    parser.add_argument("--url", default="localhost:8000", help="the server's HTTP address")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    options = parser.parse_args()
    with httpclient.InferenceServerClient(options.url) as client:
        try:
            types = types_of(client, options.files)
        except OSError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        for path, (name, description, score) in zip(options.files, types, strict=True):
            print(f"{path}: {name} ({description}), {score:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
