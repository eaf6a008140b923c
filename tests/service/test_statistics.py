"""The statistics extension of a real server: fields, errors, and the rules of what counts where."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException

from neptrio.observe.histogram import RELATIVE_ERROR, Histogram
from tests.support.metrics import scrape, value
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

STAGES = ("queue", "compute_input", "compute_infer", "compute_output")
SLOW = 'parameters { key: "execute_delay_ms" value { string_value: "%d" } }'
ZERO = {"count": 0, "ns": 0}


def tensors(module: Any, batch: int = 1, content: int = 0) -> list[Any]:
    made = []
    for i in range(2):
        tensor = module.InferInput(f"INPUT{i}", [batch, 16], "INT32")
        tensor.set_data_from_numpy(np.full((batch, 16), content, np.int32))
        made.append(tensor)
    return made


def get(server: ServerProcess, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(server.http, timeout=60)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def stats(server: ServerProcess, model: str, query: str = "") -> dict[str, Any]:
    status, document = get(server, f"/v2/models/{model}/stats{query}")
    assert status == 200
    found: dict[str, Any] = document["model_stats"][0]
    return found


def infer(server: ServerProcess, model: str, batch: int = 1, **options: Any) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        client.infer(model, tensors(httpclient, batch), **options)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    every = "version_policy { all {} }"
    write_model(repository, "versions", identity_config(extra=every), versions=(10, 2, 1))
    for name in ("untouched", "plain", "rejecting"):
        write_model(repository, name, identity_config())
    batching = "dynamic_batching { max_queue_delay_microseconds: 300 }"
    write_model(repository, "storm_default", identity_config(extra=SLOW % 1 + "instance_group { count: 2 }"))
    write_model(repository, "storm_inline", identity_config())
    write_model(repository, "storm_dynamic", identity_config(extra=SLOW % 2 + batching))
    cached = "response_cache { enable: true } dynamic_batching {}"
    write_model(repository, "storm_cached", identity_config(extra=SLOW % 1 + cached))
    steps = []
    for model, source, target in (
        ("storm_default", "INPUT", "MIDDLE"),
        ("storm_dynamic", "MIDDLE", "OUTPUT"),
    ):
        maps = [
            f'{kind}_map {{ key: "{key}{i}" value: "{value}{i}" }}'
            for i in range(2)
            for kind, key, value in (("input", "INPUT", source), ("output", "OUTPUT", target))
        ]
        steps.append(f'{{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}')
    ensemble = identity_config(extra=f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}")
    write_model(repository, "storm_ensemble", ensemble.replace('backend: "identity"', 'platform: "ensemble"'))
    with ServerProcess(repository, "--cache-config=local,size=10000000") as process:
        yield process


def test_every_field_in_its_order(server: ServerProcess) -> None:
    got = stats(server, "untouched")
    memory = got.pop("memory_usage")
    assert list(got.items()) == [
        ("name", "untouched"),
        ("version", "1"),
        ("last_inference", 0),
        ("inference_count", 0),
        ("execution_count", 0),
        (
            "inference_stats",
            {k: ZERO for k in ("success", "fail", *STAGES, "cache_hit", "cache_miss")},
        ),
        ("response_stats", {}),
        ("batch_stats", []),
    ]
    assert list(got["inference_stats"]) == ["success", "fail", *STAGES, "cache_hit", "cache_miss"]
    for usage in memory:
        assert list(usage) == ["type", "id", "byte_size"] and usage["byte_size"] > 0


def test_models_sorted_and_versions_by_number(server: ServerProcess) -> None:
    rows = [(m["name"], m["version"]) for m in get(server, "/v2/models/stats")[1]["model_stats"]]
    assert rows == sorted(rows, key=lambda row: (row[0], int(row[1])))
    assert [v for name, v in rows if name == "versions"] == ["1", "2", "10"]
    only = get(server, "/v2/models/versions/versions/2/stats")[1]["model_stats"]
    assert [m["version"] for m in only] == ["2"]


def test_errors(server: ServerProcess) -> None:
    unknown = "requested model 'nope' is not available"
    version = "requested model version is not available for model 'versions'"
    assert get(server, "/v2/models/nope/stats") == (400, {"error": unknown})
    assert get(server, "/v2/models/versions/versions/3/stats") == (400, {"error": version})
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for arguments, text in ((("nope",), unknown), (("versions", "3"), version)):
            with pytest.raises(InferenceServerException) as info:
                client.get_inference_statistics(*arguments)
            assert (info.value.status(), info.value.message()) == ("StatusCode.INVALID_ARGUMENT", text)
        assert len(client.get_inference_statistics("", "3").model_stats) == len(
            get(server, "/v2/models/stats")[1]["model_stats"]
        )


def test_a_request_counts_in_every_stage_and_last_inference_is_its_time(server: ServerProcess) -> None:
    before = time.time_ns() // 1_000_000
    infer(server, "plain", batch=3)
    infer(server, "plain")
    got = stats(server, "plain")
    assert before <= got["last_inference"] <= time.time_ns() // 1_000_000
    assert (got["inference_count"], got["execution_count"]) == (4, 2)
    inference = got["inference_stats"]
    assert {k: v["count"] for k, v in inference.items()} == {
        "success": 2, **dict.fromkeys(STAGES, 2), "fail": 0, "cache_hit": 0, "cache_miss": 0,
    }  # fmt: skip
    assert [b["batch_size"] for b in got["batch_stats"]] == [1, 3]
    for b in got["batch_stats"]:
        assert list(b) == ["batch_size", "compute_input", "compute_infer", "compute_output"]
        assert all(b[k]["count"] == 1 for k in STAGES[1:])
    assert inference["success"]["ns"] >= sum(inference[k]["ns"] for k in STAGES) > 0


def test_grpc_says_the_same(server: ServerProcess) -> None:
    infer(server, "plain", batch=2)
    with grpcclient.InferenceServerClient(server.grpc) as client:
        message = client.get_inference_statistics("plain").model_stats[0]
    plain = stats(server, "plain")
    for name in ("success", "fail", *STAGES, "cache_hit", "cache_miss"):
        assert message.inference_stats.HasField(name)
    got = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)

    def numbers(node: Any) -> Any:
        if isinstance(node, dict):
            return {k: numbers(v) for k, v in node.items()}
        if isinstance(node, list):
            return [numbers(v) for v in node]
        return int(node) if isinstance(node, str) and node.isdigit() else node

    plain["version"] = int(plain["version"])
    assert numbers(got) == plain


def test_refused_at_the_door_changes_nothing(server: ServerProcess) -> None:
    infer(server, "rejecting")
    before = stats(server, "rejecting")
    with pytest.raises(InferenceServerException, match="batch"):
        infer(server, "rejecting", batch=9)
    with pytest.raises(InferenceServerException, match="NOPE"):
        infer(server, "rejecting", outputs=[httpclient.InferRequestedOutput("NOPE")])
    assert stats(server, "rejecting") == before


def check(got: dict[str, Any]) -> None:
    """What must hold in every snapshot, whatever is going on."""
    inference = got["inference_stats"]
    counts = {k: v["count"] for k, v in inference.items()}
    assert counts["queue"] == counts["success"]
    for stage in STAGES[1:]:
        assert counts[stage] == counts["success"] - counts["cache_hit"]
    # request = queue + compute input + compute infer + compute output + rest, and rest is never negative
    assert inference["success"]["ns"] >= sum(inference[k]["ns"] for k in STAGES)
    executed = sum(b["compute_infer"]["count"] for b in got["batch_stats"])
    assert executed == got["execution_count"]
    assert (
        sum(b["batch_size"] * b["compute_infer"]["count"] for b in got["batch_stats"])
        == got["inference_count"]
    )
    for stage, key in (("request", "success"), *((s, s) for s in STAGES)):
        assert got["percentiles"][stage]["count"] == counts[key]
    held = got["live"]
    assert held["accepted"] == held["queued"] + held["prepared"] + held["executing"]
    made = got["accounts"]
    assert made["accepted"] == made["answered"] + made["failed"] + made["cancelled"] + held["accepted"]
    assert (held["inflight_bytes"] > 0) == (held["accepted"] > 0)
    if got["name"] != "storm_ensemble":  # nobody closes its batches
        assert sum(b["count"] for b in got["batches"].values()) == got["execution_count"]
        assert sum(b["size_sum"] for b in got["batches"].values()) == got["inference_count"]
        assert got["steps"] == []
    elif not held["accepted"] and not made["failed"] + made["cancelled"]:
        assert [step["model_name"] for step in got["steps"]] == ["storm_default", "storm_dynamic"]
        assert [step["count"] for step in got["steps"]] == [counts["success"]] * 2, "its own requests alone"
        assert sum(step["sum_ns"] for step in got["steps"]) <= inference["success"]["ns"], (
            "one after the other"
        )


def check_cache_metrics(text: str, got: dict[str, Any]) -> None:
    labels = {"model": "storm_cached", "version": "1"}
    hit, miss = got["inference_stats"]["cache_hit"], got["inference_stats"]["cache_miss"]
    assert value(text, "nv_cache_num_hits_per_model", **labels) == hit["count"]
    assert value(text, "nv_cache_num_misses_per_model", **labels) == miss["count"]
    for name, duration in (("hit", hit), ("miss", miss)):
        us = value(text, f"nv_cache_{name}_duration_per_model", **labels)
        assert duration["ns"] // 1000 - duration["count"] <= us <= duration["ns"] // 1000
    assert value(text, "nv_cache_num_hits") == hit["count"]
    assert value(text, "nv_cache_num_lookups") == value(text, "nv_cache_num_hits") + value(
        text, "nv_cache_num_misses"
    )
    assert value(text, "nv_cache_num_misses") == miss["count"], (
        "also where an equal request had stored its answer"
    )
    assert 0 < value(text, "nv_cache_num_entries") <= miss["count"]
    assert 0 < value(text, "nv_cache_util") < 1
    assert 'nv_cache_num_hits_per_model{model="storm_default"' not in text


def storm(server: ServerProcess, model: str, requests: int = 40) -> None:
    """Random load from six clients over both protocols, with a reader that checks every snapshot."""
    sent = [0, 0]
    lock = threading.Lock()

    def load(seed: int) -> None:
        chance = random.Random(seed)
        own = [0, 0]
        with (
            httpclient.InferenceServerClient(server.http) as rest,
            grpcclient.InferenceServerClient(server.grpc) as grpc,
        ):
            for _ in range(requests):
                batch = chance.randint(1, 8)
                content = chance.randint(0, 9)
                if chance.random() < 0.5:
                    rest.infer(model, tensors(httpclient, batch, content))
                else:
                    grpc.infer(model, tensors(grpcclient, batch, content))
                own[0] += 1
                own[1] += batch
        with lock:
            sent[0] += own[0]
            sent[1] += own[1]

    threads = [threading.Thread(target=load, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    polls, seen = 0, 0
    while any(thread.is_alive() for thread in threads):
        got = stats(server, model, "?percentiles=50&live=true")
        check(got)
        assert got["inference_stats"]["success"]["count"] >= seen
        seen = got["inference_stats"]["success"]["count"]
        polls += 1
    assert polls > 1
    got = stats(server, model, "?percentiles=50&live=true&histograms=true")
    check(got)
    hits = got["inference_stats"]["cache_hit"]["count"]
    assert got["inference_stats"]["success"]["count"] == sent[0]
    if model == "storm_cached":
        assert 0 < hits < sent[0] and 0 < got["inference_count"] < sent[1]
        check_cache_metrics(scrape(server), got)
    else:
        assert hits == 0 and got["inference_count"] == sent[1]
    assert got["live"]["accepted"] == got["live"]["inflight_bytes"] == 0
    for stage in STAGES:
        histogram = Histogram.from_buckets(got["histograms"][stage])
        assert histogram.count == got["inference_stats"][stage]["count"]
        assert got["inference_stats"][stage]["ns"] <= histogram.sum
        assert histogram.sum <= got["inference_stats"][stage]["ns"] * (1 + 2 * RELATIVE_ERROR) + sent[0]


@pytest.mark.parametrize(
    "model", ["storm_default", "storm_inline", "storm_dynamic", "storm_cached", "storm_ensemble"]
)
def test_snapshots_are_consistent_during_a_storm(server: ServerProcess, model: str) -> None:
    storm(server, model)


@pytest.mark.slow
def test_instances_that_take_turns(tmp_path: Path) -> None:
    limits = """instance_group { count: 2 rate_limiter { resources [ { name: "R" count: 1 } ] } }"""
    batching = "dynamic_batching { preserve_ordering: true }"
    write_model(tmp_path, "turns", identity_config(extra=SLOW % 1 + limits))
    write_model(tmp_path, "ordered", identity_config(extra=SLOW % 1 + limits + batching))
    with ServerProcess(tmp_path, "--rate-limit=execution_count", "--rate-limit-resource=R:1") as server:
        storm(server, "turns", 20)
        storm(server, "ordered", 20)


def test_warm_up_counts_like_any_request(tmp_path: Path) -> None:
    inputs = "".join(
        f'inputs {{ key: "INPUT{i}" value {{ data_type: TYPE_INT32 dims: [ 16 ] zero_data: true }} }}'
        for i in range(2)
    )
    warmup = f'model_warmup [ {{ name: "w" batch_size: 2 count: 3 {inputs} }} ]'
    write_model(tmp_path, "m", identity_config(extra=warmup))
    with ServerProcess(tmp_path) as server:
        got = stats(server, "m", "?percentiles=50&live=true")
    check(got)
    assert got["inference_stats"]["success"]["count"] == got["inference_count"] == 6
    assert got["execution_count"] == 3 and got["last_inference"] > 0
    assert [(b["batch_size"], b["compute_infer"]["count"]) for b in got["batch_stats"]] == [(2, 3)]


def test_percentiles_on_request(server: ServerProcess) -> None:
    infer(server, "plain")
    assert "percentiles" not in stats(server, "plain", "?something=else")
    got = stats(server, "plain", "?percentiles=0,50,99.9,100")
    assert list(got)[-1] == "percentiles"
    assert list(got["percentiles"]) == ["request", *STAGES]
    for stage in got["percentiles"].values():
        assert list(stage) == ["count", "max", "p0", "p50", "p99.9", "p100"]
        assert stage["p0"] <= stage["p50"] <= stage["p99.9"] <= stage["p100"] == stage["max"]


@pytest.mark.parametrize(
    "query", ["percentiles=101", "percentiles=", "percentiles=1,x", "live=maybe", "histograms="]
)
def test_bad_queries_are_refused(server: ServerProcess, query: str) -> None:
    status, body = get(server, f"/v2/models/plain/stats?{query}")
    assert status == 400 and "query parameter" in body["error"]


def check_since_start(server: ServerProcess, *loads: dict[str, Any]) -> None:
    """What is said of all loads of a version is the sum of what was said of each."""

    def told() -> dict[str, Any]:
        found: dict[str, Any] = stats(server, "m", "?since_start=true")["since_start"]
        return found

    def told_by_grpc(asked: str) -> dict[str, Any]:
        with grpcclient.InferenceServerClient(server.grpc) as client:
            got = client.get_inference_statistics("m", headers={"neptrio-since-start": asked}, as_json=True)
        row: dict[str, Any] = got["model_stats"][0]
        return row

    # a load counts until it has answered everything, so from here on nothing changes
    until(lambda: told()["inference_count"] == sum(load["inference_count"] for load in loads), told)
    total = told()
    assert list(total) == [key for key in loads[0] if key not in ("name", "version", "memory_usage")]
    assert total["last_inference"] == max(load["last_inference"] for load in loads)
    assert total["execution_count"] == sum(load["execution_count"] for load in loads)
    row = told_by_grpc("true")
    assert row["inference_count"] == str(total["inference_count"])
    assert row["inference_stats"]["success"]["ns"] == str(total["inference_stats"]["success"]["ns"])
    assert row["last_inference"] == str(total["last_inference"])
    assert len(row["batch_stats"]) == len(total["batch_stats"])
    assert told_by_grpc("false")["inference_count"] == str(stats(server, "m")["inference_count"])
    with pytest.raises(
        InferenceServerException, match="metadata 'neptrio-since-start' must be true or false, got 'perhaps'"
    ):
        told_by_grpc("perhaps")
    for name, duration in total["inference_stats"].items():
        for part in ("count", "ns"):
            assert duration[part] == sum(load["inference_stats"][name][part] for load in loads)
    sizes = sorted({row["batch_size"] for load in loads for row in load["batch_stats"]})
    assert [row["batch_size"] for row in total["batch_stats"]] == sizes
    for row in total["batch_stats"]:
        same = [r for load in loads for r in load["batch_stats"] if r["batch_size"] == row["batch_size"]]
        assert row["compute_infer"]["count"] == sum(r["compute_infer"]["count"] for r in same)
        assert row["compute_infer"]["ns"] == sum(r["compute_infer"]["ns"] for r in same)


def test_a_reload_starts_anew_and_unloaded_models_are_not_listed(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config())
    write_model(tmp_path, "other", identity_config())
    with ServerProcess(
        tmp_path, "--model-control-mode=explicit", "--load-model=m", "--load-model=other"
    ) as server:
        infer(server, "m")
        infer(server, "other")
        with httpclient.InferenceServerClient(server.http) as client:
            expected = [stats(server, "m")]
            write_model(tmp_path, "m", identity_config(extra=SLOW % 1))
            client.load_model("m")
            got = stats(server, "m")
            assert (
                got["last_inference"]
                == got["inference_count"]
                == got["inference_stats"]["success"]["ns"]
                == 0
            )
            assert stats(server, "other")["inference_count"] == 1
            assert "since_start" not in got, "who does not ask is not told"
            infer(server, "m", 3)
            expected.append(stats(server, "m"))
            check_since_start(server, *expected)
            config = identity_config(extra=SLOW % 1 + " instance_group [ { count: 2 } ]")
            write_model(tmp_path, "m", config)
            client.load_model("m")
            assert stats(server, "m")["inference_count"] == 3, "instances changed in place"
            check_since_start(server, *expected)
            client.unload_model("m")
            assert [m["name"] for m in get(server, "/v2/models/stats")[1]["model_stats"]] == ["other"]
            assert 'model="m"' not in scrape(server)
            client.load_model("m")
            infer(server, "m")
            check_since_start(server, *expected, stats(server, "m"))
