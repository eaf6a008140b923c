"""Trains trees on a data set that scikit-learn brings, makes a model folder of them with one command, and asks the server.

pip install 'treelite<5' scikit-learn
python examples/trees.py [FOLDER]        writes FOLDER/tumors.tl and FOLDER/models (default: here)
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import treelite
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split

import neptrio


def main(folder: Path) -> float:
    """The share of tumors that the server classifies as the trained model does, of those that it has not seen."""
    rows, labels = load_breast_cancer(return_X_y=True)
    seen, unseen, known, truth = train_test_split(rows.astype(np.float32), labels, random_state=0)
    forest = RandomForestClassifier(100, random_state=0).fit(seen, known)

    folder.mkdir(parents=True, exist_ok=True)
    # where the model was trained: a file that holds only trees, and no code
    treelite.sklearn.import_model(forest).serialize(folder / "tumors.tl")
    # where it is served: a folder with a configuration and a request to try
    command = [
        sys.executable,
        "-m",
        "neptrio",
        "import",
        folder / "tumors.tl",
        "--repository",
        folder / "models",
    ]
    subprocess.run(command, check=True)

    with neptrio.Server(folder / "models").running() as server:
        probabilities = server.model("tumors").infer({"input__0": unseen})["output__0"]
    classes = probabilities.argmax(axis=1)
    print(f"{(classes == truth).mean():.1%} of {len(truth)} tumors are classified rightly")
    return float((classes == forest.predict(unseen)).mean())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
