"""The library that hosts the app of REST is imported while the server already serves; that may fail, and be tried again."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.support.http import Http1
from tests.support.server import ServerProcess

# fails as an import does without descriptors, until the file beside it is there
HYPERCORN = """
import pathlib, sys
here = pathlib.Path(__file__).parent.parent
if not (here / "ready").exists():
    raise OSError(24, "Too many open files")
sys.path.remove(str(here))
del sys.modules["hypercorn"]
import hypercorn
"""


def test_an_import_that_fails_is_answered_and_tried_again(tmp_path: Path) -> None:
    (tmp_path / "hypercorn").mkdir()
    (tmp_path / "hypercorn/__init__.py").write_text(HYPERCORN)
    (tmp_path / "models").mkdir()
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with ServerProcess(tmp_path / "models", env=env) as server:
        server.until_logged("hypercorn could not be imported")
        with Http1(server.http) as client:
            reply = client.request("GET", "/v2")
            assert reply.status == 500
            assert json.loads(reply.body) == {"error": "internal error: hypercorn could not be imported"}
            (tmp_path / "ready").touch()
            assert json.loads(client.request("GET", "/v2").body)["name"] == "triton"
