"""A repository that cannot be looked at for a while: the server stays, and what serves goes on serving."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tritonclient.http as httpclient

from tests.repository.test_on_demand import document, http_infer
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.slow

# looking at such a link fails for root, too, and with an error that says neither yes nor no
UNREADABLE = "x" * 300


@pytest.mark.parametrize(
    ("mode", "looks"),
    [("poll", "polling the model repository"), ("on-demand", "listing the model repository")],
)
def test_what_serves_goes_on_while_the_repository_cannot_be_read(
    tmp_path: Path, mode: str, looks: str
) -> None:
    real, link, new = tmp_path / "real", tmp_path / "models", tmp_path / "new"
    config = identity_config(dims="-1", max_batch_size=0, pairs=1)
    write_model(real, "m", config)
    link.symlink_to(real)

    def lead(target: Path | str) -> None:
        new.symlink_to(target)
        os.replace(new, link)

    flags = (f"--model-control-mode={mode}", "--repository-poll-secs=1")
    with (
        ServerProcess(link, *flags, failures="failed to open model repository") as server,
        httpclient.InferenceServerClient(server.http) as http,
    ):
        assert http_infer(http, "m") == [0, 1, 2]
        lead(UNREADABLE)
        # a look is over before the next one has failed
        server.until_logged(f"{looks} failed: failed to open model repository '{link}': [Errno 36]", 2)
        assert http_infer(http, "m") == [0, 1, 2]
        status, answer = document(server, "/v2/repository/index", "POST")
        assert status == 400 and "[Errno 36]" in answer["error"]
        write_model(real, "later", config)
        lead(real)
        until(lambda: document(server, "/v2/models/later/ready")[0] == 200)
        assert http_infer(http, "m") == http_infer(http, "later") == [0, 1, 2]
        assert "unloading: m" not in server.log()
