"""`neptrio demo`: the example models, without anything to prepare."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from tests.support.server import ServerProcess

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "model_repository"


def test_the_example_models_are_served(tmp_path: Path) -> None:
    with (
        ServerProcess(None, f"--trace-dir={tmp_path}", command=("demo",)) as server,
        http_client.InferenceServerClient(server.http) as client,
    ):
        names = {row["name"] for row in client.get_model_repository_index()}
        assert {"identity_fp32", "mean", "upper_case"} <= names
        assert ("simple" in names) == any(shutil.which(name) for name in ("c++", "g++", "clang++"))
        text = http_client.InferInput("TEXT", [1, 1], "BYTES")
        text.set_data_from_numpy(np.array([["hello"]], object))
        assert client.infer("upper_case", [text]).as_numpy("UPPER").tolist() == [[b"HELLO"]]
        # everything is on: models come and go, there is a cache, traces are made for whoever asks, pages can be opened
        client.unload_model("mean")
        client.load_model("mean")
        text.set_data_from_numpy(np.array([["traced"]], object))
        client.infer("upper_case", [text], parameters={"neptrio_trace": True})
        recent = json.load(urllib.request.urlopen(f"http://{server.http}/v2/trace/recent"))
        assert [trace["model_name"] for trace in recent] == ["upper_case"]
        metrics = urllib.request.urlopen(f"http://{server.metrics}/metrics").read().decode()
        assert "nv_cache_util" in metrics
        for name in ("console", "docs"):
            url = re.search(rf"^{name} +on (\S+)$", server.log(), re.M)
            assert url is not None
            assert urllib.request.urlopen(url[1]).status == 200
        # and the text ends with what can be typed
        lines = server.log().splitlines()
        request = lines[lines.index("a first request:") + 1]
        done = subprocess.run(request, shell=True, capture_output=True, text=True, timeout=60)
        assert json.loads(done.stdout)["outputs"][0]["data"] == ["HELLO"]
        end = lines.index("serving")
        assert lines[end - 1] == "Ctrl-C stops the server"


@pytest.mark.slow
def test_flags_override_what_is_switched_on(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    shutil.copytree(EXAMPLES / "identity_fp32", repository / "own")
    config = repository / "own" / "config.pbtxt"
    config.write_text(config.read_text().replace("identity_fp32", "own"))
    flags = ("--model-control-mode=none", "--allow-console=false", "--allow-forced-trace=false",
             f"--trace-dir={tmp_path / 'traces'}")  # fmt: skip
    with (
        ServerProcess(repository, *flags, command=("demo",)) as server,
        http_client.InferenceServerClient(server.http) as client,
    ):
        assert [row["name"] for row in client.get_model_repository_index()] == ["own"]
        with pytest.raises(InferenceServerException, match="explicit"):
            client.unload_model("own")
        assert "console  on" not in server.log()


def test_make_run_serves_the_example_repository_like_that() -> None:
    # these tests may run below a make, whose children say which folder they are in
    make = ["make", "--no-print-directory", "-n", "-o", ".venv/bin/python", "-o", ".venv/.built"]
    make += ["run", "ARGS=--http-port 9000"]
    done = subprocess.run(make, cwd=EXAMPLES.parents[1], capture_output=True, text=True, timeout=60)
    last = done.stdout.splitlines()[-1]
    assert last.endswith("neptrio demo --model-repository examples/model_repository --http-port 9000")


def test_a_wrong_flag_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "neptrio", "demo", "--nonsense"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--nonsense" in done.stderr
