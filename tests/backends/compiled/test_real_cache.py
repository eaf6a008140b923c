"""NVIDIA's libtritoncache_local.so, as it was built for tritonserver. Where no tritonserver is installed
(benchmarks/tritonserver.py), nothing is run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as http

from benchmarks.tritonserver import environment, home
from tests.support.metrics import scrape, value
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(home() is None, reason="there is no tritonserver")]


def test_it_keeps_answers_and_drops_the_oldest(tmp_path: Path) -> None:
    site = home()
    assert site is not None
    caches = site / "pytriton" / "tritonserver" / "caches"
    write_model(
        tmp_path, "cached", identity_config(dims="-1", pairs=1, extra="response_cache { enable: true }")
    )
    size, each = 1 << 20, 300_000  # room for three
    setting = f"--cache-config=local,compiled=true,size={size},timeout_ms=30000,restart_ms=30000"
    with ServerProcess(tmp_path, f"--cache-directory={caches}", setting, env=environment(site)) as server:
        with http.InferenceServerClient(server.http) as client:

            def stats() -> tuple[int, int]:
                found = client.get_inference_statistics("cached")["model_stats"][0]["inference_stats"]
                return int(found["cache_hit"]["count"]), int(found["cache_miss"]["count"])

            def asked(number: int) -> bool:
                """Whether the answer, which must be right, came out of the cache."""
                hits, misses = stats()
                given = np.full((1, each // 4), number, np.int32)
                tensor = http.InferInput("INPUT0", list(given.shape), "INT32")
                tensor.set_data_from_numpy(given)
                np.testing.assert_array_equal(client.infer("cached", [tensor]).as_numpy("OUTPUT0"), given)
                after = stats()
                assert sum(after) == hits + misses + 1
                return after[0] > hits

            def gauge(name: str, wanted: float) -> None:
                until(lambda: value(scrape(server), f"nv_cache_{name}") == wanted, server.log)

            for number in range(3):
                assert not asked(number)
                gauge("num_entries", number + 1)
            assert [asked(number) for number in (1, 2, 0)] == [True] * 3
            assert not asked(3)
            gauge("num_evictions", 1)
            gauge("num_entries", 3)
            assert [asked(number) for number in (2, 0, 3)] == [True] * 3
            assert not asked(1), "it was used longest ago"
            assert 0.8 < value(scrape(server), "nv_cache_util") <= 1
            hits, misses = stats()
            text = scrape(server)
            assert (
                (value(text, "nv_cache_num_hits"), value(text, "nv_cache_num_misses"))
                == (hits, misses)
                == (6, 5)
            )
