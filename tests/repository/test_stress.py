"""500 random operations on related and unrelated models while clients infer, and polling by the clock."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio.repository.version_states import OUTDATED
from tests.client.test_ensembles import ENSEMBLE
from tests.repository.test_swap import EXPLICIT, Storm, touch
from tests.support.control import CONFIG, infer, rows, settled
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.slow

OPERATIONS = int(os.environ.get("NEPTRIO_STRESS_OPERATIONS", "500"))
THREADS = 4
MODELS = ("first", "second", "ens", "alone")
AWAY = ("has no available versions", "is not at ready state", "Server exiting")


def operate(server: ServerProcess, repository: Path, seed: int, count: int, errors: list[str]) -> None:
    chance = random.Random(seed)
    with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
        for number in range(count):
            name = chance.choice(MODELS)
            what = chance.choice(
                ("load", "load", "touch", "unload", "dependents", "config", "broken", "index")
            )
            try:
                if what == "touch":
                    touch(repository / name, seed * count + number + 1)
                if what in ("load", "touch"):
                    client.load_model(name)
                elif what == "unload":
                    client.unload_model(name)
                elif what == "dependents":
                    client.unload_model(name, unload_dependents=True)
                elif what == "config" and name != "ens":
                    instances = [{"count": chance.randrange(1, 4), "kind": "KIND_CPU"}]
                    client.load_model(name, config=json.dumps({**CONFIG, "instance_group": instances}))
                elif what == "broken":
                    client.load_model(name, config=json.dumps({"backend": "nosuch"}))
                else:
                    client.get_model_repository_index()
            except InferenceServerException as error:
                errors.append(str(error))


def test_random_operations_under_load(tmp_path: Path) -> None:
    for name in ("first", "second", "alone"):
        write_model(tmp_path, name, identity_config(extra="dynamic_batching { }" if name == "alone" else ""))
    write_model(tmp_path, "ens", ENSEMBLE)
    with ServerProcess(tmp_path, *EXPLICIT) as server:
        inputs = ("INPUT0", "INPUT1")
        storm = Storm(
            server, 8, [("alone", inputs), ("ens", ("A", "B")), ("first", inputs), ("second", inputs)]
        )
        errors: list[str] = []
        threads = [
            threading.Thread(target=operate, args=(server, tmp_path, seed, OPERATIONS // THREADS, errors))
            for seed in range(THREADS)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(300)
                assert not thread.is_alive(), server.log()
        finally:
            storm.stop()
        assert storm.answers > 0
        assert [text for text in storm.failures if not any(away in text for away in AWAY)] == []
        known = (
            OUTDATED,
            "not available or ambiguous",
            "unable to find backend",
            "keep changing",
            "failed to poll",
        )
        assert [text for text in errors if not any(k in text for k in known)] == []
        with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
            for name in MODELS:
                touch(tmp_path / name, 10**6)
                client.load_model(name)
            for name in MODELS:
                assert settled(client, name)[0][1] == "READY"
                infer(client, name, ("A", "B") if name == "ens" else inputs)
            assert client.is_server_ready()
        assert server.stop() == 0
        assert "Traceback" not in server.log()


def test_polling_by_the_clock(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config())
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with ServerProcess(tmp_path, *flags) as server:
        with httpclient.InferenceServerClient(server.http) as client:

            def state(name: str) -> Any:
                return [(version, shown) for version, shown, _ in rows(client, name)]

            infer(client)
            write_model(tmp_path, "new", identity_config())
            until(lambda: state("new") == [("1", "READY")], "a new model is loaded")
            (tmp_path / "m" / "config.pbtxt").write_text(identity_config(max_batch_size=2))
            until(lambda: client.get_model_config("m")["max_batch_size"] == 2, "a changed one too")
            (tmp_path / "m" / "config.pbtxt").write_text("oops")
            until(lambda: "config.pbtxt:1" in server.log(), "a broken one is told")
            infer(client)
            shutil.rmtree(tmp_path / "new")
            until(lambda: state("new") == [] and not client.is_model_ready("new"), "one that is gone, too")
            assert state("m") == [("1", "READY")]
