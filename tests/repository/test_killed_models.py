"""Requests for a model on demand whose process was killed wait until it is started again."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tritonclient import http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.python.test_while_restarting import stopped
from tests.repository.test_on_demand import ENSEMBLE, document, http_infer, on_demand, own_infer
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.slow_models import CONFIG, MODEL, latch, loads, parameter
from tests.support.statistics import stats
from tests.support.waiting import until

pytestmark = pytest.mark.slow

OWN_PROCESS = CONFIG.replace(parameter("isolation", "none"), "")

TOLD = (
    '        with open(os.path.join(folder, "pid"), "w") as out:\n            out.write(str(os.getpid()))\n'
)
AT = '        with open(os.path.join(folder, "loads"'


def kill(folder: Path) -> None:
    """Ends the process of the model, which has told where it is."""
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)


def test_requests_wait_for_a_process_that_was_killed(tmp_path: Path) -> None:
    assert OWN_PROCESS != CONFIG
    folder = write_model(tmp_path, "m", OWN_PROCESS, {"1/model.py": MODEL.replace(AT, TOLD + AT)})
    write_model(tmp_path, "whole", ENSEMBLE.replace('"step"', '"m"'))
    with (
        ServerProcess(
            tmp_path, "--model-control-mode=on-demand", failures="has ended|was killed|killed"
        ) as server,
        httpclient.InferenceServerClient(server.http) as http,
        ThreadPoolExecutor(3) as pool,
    ):
        assert http_infer(http, "m") == http_infer(http, "whole", "IN") == [0, 1, 2]
        with latch(folder) as held:
            kill(folder)
            until(lambda: loads(folder) == 2)  # it is being started again
            answers = [
                pool.submit(own_infer, server, "m"),
                pool.submit(own_infer, server, "m", model_version="1"),
                pool.submit(own_infer, server, "whole", name="IN"),  # an ensemble, of which it is a step
            ]
            until(lambda: stats(server, "m")["live"]["accepted"] == 3)
            assert http.is_model_ready("m"), "it will be served"
            assert document(server, "/v2/models/m/ready?loaded=true")[0] == 400
            held.open()
            assert [answer.result(60) for answer in answers] == [[0, 1, 2]] * 3


RESHAPED = OWN_PROCESS.replace("dims: [ -1 ]", "dims: [ -1 ] reshape { shape: [ 1, -1 ] }")
IN_ORDER = "dynamic_batching { preserve_ordering: true }"
CACHED = "response_cache { enable: true }"


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (OWN_PROCESS, ()),
        (OWN_PROCESS + IN_ORDER, ()),
        (RESHAPED + IN_ORDER, ("--trace-config=level=TIMESTAMPS", "--trace-config=rate=1")),
        (OWN_PROCESS + CACHED, ("--cache-config=local,size=100000,coalesce=true",)),
    ],
    ids=["plain", "in order", "reshaped and traced", "followers"],
)
def test_requests_that_came_during_a_restart_that_fails_wait_for_the_next(
    tmp_path: Path, config: str, flags: tuple[str, ...]
) -> None:
    """They were accepted, and nothing has begun them. They are counted once."""
    folder = write_model(tmp_path, "m", config, {"1/model.py": MODEL.replace(AT, TOLD + AT)})
    write_model(tmp_path, "whole", ENSEMBLE.replace('"step"', '"m"'))
    with (
        ServerProcess(
            tmp_path, "--model-control-mode=on-demand", *flags, failures="killed|are broken"
        ) as server,
        httpclient.InferenceServerClient(server.http) as http,
        ThreadPoolExecutor(5) as pool,
    ):
        http.load_model("whole")
        with latch(folder) as held:
            kill(folder)
            until(lambda: loads(folder) == 2)  # it is being started again
            answers = [
                pool.submit(own_infer, server, "m"),
                pool.submit(own_infer, server, "m", request_id="1"),
                pool.submit(own_infer, server, "m", model_version="1"),
                pool.submit(own_infer, server, "whole", name="IN"),
            ]
            hasty = pool.submit(own_infer, server, "m", timeout=1000)
            until(lambda: stats(server, "m")["live"]["accepted"] == 5)
            (folder / "broken").touch()
            held.open()
        with pytest.raises(InferenceServerException, match="Request timeout expired"):
            hasty.result(60)
        until(lambda: on_demand(server, "m")["waiting"] == 4)
        assert not any(answer.done() for answer in answers)
        (folder / "broken").unlink()
        assert [answer.result(60) for answer in answers] == [[0, 1, 2]] * 4
        found = stats(server, "m")
        counts = {name: row["count"] for name, row in found["inference_stats"].items()}
        assert (counts["success"], counts["fail"], found["live"]["accepted"]) == (4, 0, 0)
        followers = 3 if CACHED in config else 0
        assert (counts["cache_hit"], counts["cache_miss"]) == (followers, int(followers > 0))
        assert found["execution_count"] == 4 - followers
        demand = on_demand(server, "m")
        assert (demand["waiting"], demand["misses"], demand["loads"]) == (0, 0, 1)
        if flags and "trace" in flags[0]:

            def traced() -> list[str]:
                rows = document(server, "/v2/trace/recent")[1]
                return sorted(row["model_name"] for row in rows if "model_name" in row)

            until(lambda: len(traced()) >= 6)
            assert traced() == ["m"] * 5 + ["whole"]


def test_requests_that_were_sent_to_a_process_and_not_begun_wait_for_the_next(tmp_path: Path) -> None:
    """The one that it was executing fails."""
    stops = MODEL.replace(AT, TOLD + AT).replace(
        "    def execute(self, requests):\n",
        """    def execute(self, requests):
        if requests[0].request_id() == "stop":
            os.kill(os.getpid(), 19)
""",
    )
    folder = write_model(tmp_path, "m", OWN_PROCESS, {"1/model.py": stops})
    with (
        ServerProcess(tmp_path, "--model-control-mode=on-demand", failures="killed|are broken") as server,
        ThreadPoolExecutor(3) as pool,
    ):
        assert own_infer(server, "m") == [0, 1, 2]
        first = pool.submit(own_infer, server, "m", request_id="stop")
        until(lambda: stopped(int((folder / "pid").read_text())))
        others = [pool.submit(own_infer, server, "m") for _ in range(2)]
        until(lambda: stats(server, "m")["live"]["accepted"] == 3)
        (folder / "broken").touch()
        kill(folder)
        with pytest.raises(InferenceServerException, match="was killed by signal 9"):
            first.result(60)
        until(lambda: on_demand(server, "m")["waiting"] == 2)
        (folder / "broken").unlink()
        assert [answer.result(60) for answer in others] == [[0, 1, 2]] * 2
        counts = stats(server, "m")["inference_stats"]
        assert (counts["success"]["count"], counts["fail"]["count"]) == (3, 1)


def test_requests_wait_until_a_process_that_does_not_start_does(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m", OWN_PROCESS, {"1/model.py": MODEL.replace(AT, TOLD + AT)})
    with (
        ServerProcess(tmp_path, "--model-control-mode=on-demand", failures="killed|are broken") as server,
        httpclient.InferenceServerClient(server.http) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        assert http_infer(http, "m") == [0, 1, 2]
        for unloads in (False, True):
            (folder / "broken").touch()
            failed = server.log().count("restart of m_0 failed")
            kill(folder)
            server.until_logged("restart of m_0 failed", failed + 1)
            answer = pool.submit(own_infer, server, "m")
            until(lambda: on_demand(server, "m")["waiting"] == 1)
            (folder / "broken").unlink()
            if unloads:
                http.unload_model("m")  # who waits has it loaded again
            assert answer.result(60) == [0, 1, 2]
        assert on_demand(server, "m")["loads"] == 2


def test_each_version_is_waited_for_by_itself(tmp_path: Path) -> None:
    """Requests for an older version go on when that is ready again, whatever becomes of the latest."""
    by_version = MODEL.replace(AT, TOLD + AT).replace(
        'os.path.join(args["model_repository"])',
        'os.path.join(args["model_repository"], args["model_version"])',
    )
    files = {f"{version}/model.py": by_version for version in (1, 2)}
    folder = write_model(tmp_path, "m", OWN_PROCESS + "version_policy { all { } }", files)
    write_model(tmp_path, "whole", ENSEMBLE.replace('"step" model_version: -1', '"m" model_version: 1'))
    with (
        ServerProcess(tmp_path, "--model-control-mode=on-demand", failures="killed|are broken") as server,
        httpclient.InferenceServerClient(server.http) as http,
        ThreadPoolExecutor(4) as pool,
    ):
        assert http_infer(http, "whole", "IN") == http_infer(http, "m") == [0, 1, 2]
        for version in ("1", "2"):
            (folder / version / "broken").touch()
            failed = server.log().count("restart of m_0 failed")
            kill(folder / version)
            server.until_logged("restart of m_0 failed", failed + 1)
        first = [
            pool.submit(own_infer, server, "m", model_version="1"),
            pool.submit(own_infer, server, "whole", name="IN"),
        ]
        second = [
            pool.submit(own_infer, server, "m", model_version="2"),
            pool.submit(own_infer, server, "m"),
        ]
        until(lambda: on_demand(server, "m")["waiting"] == 4)
        (folder / "1" / "broken").unlink()
        assert [answer.result(60) for answer in first] == [[0, 1, 2]] * 2
        assert on_demand(server, "m")["waiting"] == 2 and not any(answer.done() for answer in second)
        (folder / "2" / "broken").unlink()
        assert [answer.result(60) for answer in second] == [[0, 1, 2]] * 2


def test_a_load_whose_process_was_killed_is_tried_again_once(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m", OWN_PROCESS, {"1/model.py": MODEL.replace(AT, TOLD + AT)})
    with (
        ServerProcess(
            tmp_path, "--model-control-mode=on-demand", failures="was killed by signal 9"
        ) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        with latch(folder):
            answer = pool.submit(own_infer, server, "m")
            until(lambda: loads(folder) == 1)
            kill(folder)
            until(lambda: loads(folder) == 2)
        assert answer.result(60) == [0, 1, 2]
        with httpclient.InferenceServerClient(server.http) as http:
            http.unload_model("m")
        (folder / "latch").unlink()
        with latch(folder):
            answer = pool.submit(own_infer, server, "m")
            for count in (3, 4):
                until(lambda count=count: loads(folder) == count)
                kill(folder)
            with pytest.raises(InferenceServerException, match=r"was killed by signal 9 \(SIGKILL\)"):
                answer.result(60)
        assert loads(folder) == 4
