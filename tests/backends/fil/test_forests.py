"""Every kind of ensemble predicts what the library that made it predicts, within its precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from neptrio_backends.fil import forest_files
from neptrio_backends.fil.forest import Forest
from tests.backends.fil.ensembles import EVERY

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.filterwarnings("ignore")  # the libraries' own, of the training
def test_the_answer_is_the_librarys(name: str, tmp_path: Path) -> None:
    made = EVERY[name](tmp_path)
    path, kind = forest_files.find(str(tmp_path))
    assert path == str(made.path)
    forest = Forest(forest_files.load(path, kind), threads=2)
    assert forest.features == made.rows.shape[1]
    found = forest.values(made.rows)
    assert found.shape == (len(made.rows), forest.targets, forest.classes)
    np.testing.assert_allclose(
        found.reshape(len(found), -1), made.expected.reshape(len(found), -1), made.tolerance, made.tolerance
    )
    # rows alone take another way than many
    for i in (0, len(made.rows) - 1):
        assert (forest.values(made.rows[i : i + 1]) == found[i]).all()
