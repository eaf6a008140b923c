"""Runs a sweep: for every size of request and number of clients a short run, and what the server counted in it.

A point is a warm-up of a quarter of its time, then the run. When the two halves of the run differ by more than a
tenth in throughput it is repeated once, and the second is kept. The server is only asked and given inferences;
nothing of it is changed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from neptrio.addresses import model_in_path
from neptrio.client.client import InferenceError
from neptrio.client.http import HEADER, HttpClient, encode
from neptrio.errors import InvalidArgument
from neptrio.flags import authorization
from neptrio.observe.machine import parse_cpu_times
from neptrio.sweep.advice import Point, Tuned
from neptrio.sweep.inputs import Inputs
from neptrio.sweep.load import Load, Loaded, Script

STEADY = 0.1  # by how much the halves of a run may differ
LOOPBACK = re.compile(r"localhost|127\.[\d.]+|::1")


@dataclass(frozen=True)
class Plan:
    """What to measure: rows per request, clients, seconds per point, requests per sequence."""

    batches: tuple[int, ...]
    clients: tuple[int, ...]
    seconds: float = 1.0
    sequence_length: int = 16

    def points(self) -> list[tuple[int, int]]:
        """(rows, clients) in the order in which they are measured."""
        return [(batch, clients) for batch in self.batches for clients in self.clients]


class Target:
    """A model of a running server. Raises InferenceError, ConnectionLost, InvalidArgument."""

    def __init__(self, url: str, name: str, metrics_url: str = "") -> None:
        self.name = name
        self._http = HttpClient(url)
        self._load = Load(url)
        self._metrics = HttpClient(metrics_url) if metrics_url else None
        self._local = bool(
            LOOPBACK.fullmatch(urlsplit(url if "://" in url else f"http://{url}").hostname or "")
        )
        self._path = f"/v2/models/{model_in_path(name)}"
        try:
            self.metadata: dict[str, Any] = self._get(self._path)
            self.config: dict[str, Any] = self._get(f"{self._path}/config")
            if not isinstance(self.metadata.get("inputs"), list):
                raise InferenceError(
                    f"{url} answered without the inputs of '{name}': is this an inference server?"
                )
        except BaseException:
            self.close()
            raise
        versions = self.metadata.get("versions") or []
        self.version = versions[-1] if versions else ""
        if self.version:
            self._path += f"/versions/{self.version}"
        self.decoupled = bool(self.config.get("model_transaction_policy", {}).get("decoupled"))

    def _get(self, path: str) -> Any:
        return self._http.json("GET", path)

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()
        if self._metrics is not None:
            self._metrics.close()

    def tuned(self, budget_ms: float | None) -> Tuned:
        """What its configuration says about what can be recommended."""
        config = self.config
        dynamic = config.get("dynamic_batching")
        scheduler = (
            "ensemble" if config.get("ensemble_scheduling")
            else "sequence" if config.get("sequence_batching") is not None
            else "dynamic" if dynamic is not None else "none"
        )  # fmt: skip
        groups = config.get("instance_group") or []
        count = sum(max(int(g.get("count", 1)), 1) * max(len(g.get("gpus", [])), 1) for g in groups) or 1
        return Tuned(
            self.name,
            int(config.get("max_batch_size", 0)),
            scheduler,
            int((dynamic or {}).get("max_queue_delay_microseconds", 0)),
            count,
            groups[0].get("kind", "KIND_CPU") if groups else "KIND_CPU",
            budget_ms,
            self.decoupled,
        )

    def stats(self) -> dict[str, Any]:
        """The statistics of the version that is measured."""
        rows: list[dict[str, Any]] = self._get(f"{self._path}/stats")["model_stats"]
        return rows[-1]

    def cpu(self) -> tuple[int, int] | None:
        """(busy, total) CPU time of this machine when the server is on it."""
        if not self._local:
            return None
        try:
            with open("/proc/stat") as file:
                return parse_cpu_times(file.read())
        except (OSError, ValueError, IndexError):
            return None

    def cpu_gauge(self) -> float | None:
        """The server's own nv_cpu_utilization, 0..1, when its metrics port was named."""
        if self._metrics is None:
            return None
        text = self._metrics.call("GET", "/metrics")[0].decode()
        found = re.search(r"^nv_cpu_utilization\S* (\S+)$", text, re.M)
        return float(found[1]) if found else None

    # -------------------------------------------------------- requests

    def request(self, inputs: dict[str, np.ndarray], parameters: dict[str, Any]) -> bytes:
        """The bytes of one inference."""
        text, raws = encode(inputs, parameters=parameters)
        headers = {**authorization(), "Content-Type": "application/octet-stream", HEADER: str(len(text))}
        path = f"{self._path}/infer{'_stream' if self.decoupled else ''}"
        return self._load.request(path, headers, b"".join([text, *raws]))

    def scripts(self, inputs: dict[str, np.ndarray], clients: int, length: int) -> list[Script]:
        """What each client sends. Clients of a sequence model have a sequence each, one after the other."""
        batching = self.config.get("sequence_batching")
        if batching is None:
            return [Script((self.request(inputs, {}),))] * clients
        kinds = {
            control.get("data_type")
            for tensor in batching.get("control_input", [])
            for control in tensor.get("control", [])
            if control.get("kind") == "CONTROL_SEQUENCE_CORRID"
        }
        made = []
        for number in range(clients):
            chosen = secrets.randbits(30) * 4096 + number + 1
            key: int | str = str(chosen) if "TYPE_STRING" in kinds else chosen

            def step(start: bool, end: bool, key: int | str = key) -> bytes:
                flags = {"sequence_id": key, "sequence_start": start, "sequence_end": end}
                return self.request(inputs, flags)

            middle, last = step(False, False), step(False, True)
            steps = (step(True, length == 1), *[middle] * (length - 2), *[last] * (length > 1))
            made.append(Script(steps, last))
        return made

    def trial(self, inputs: dict[str, np.ndarray]) -> None:
        """Sends one request, so that what is wrong with all of them is told before the sweep. Raises InferenceError."""
        found = self._load.run(self.scripts(inputs, 1, 1), 0)
        if found.failures:
            raise InferenceError(f"the server refused a request to '{self.name}': {found.failure}")

    # -------------------------------------------------------- points

    def sweep(self, plan: Plan, inputs: Inputs) -> Iterator[Point]:
        """Measures the plan's points, each as soon as it is asked for."""
        made = {batch: inputs.make(batch) for batch in plan.batches}
        for tensors in made.values():
            self.trial(tensors)
        for batch, clients in plan.points():
            scripts = self.scripts(made[batch], clients, plan.sequence_length)
            self._load.run(scripts, plan.seconds / 4)
            point = self._point(batch, scripts, plan.seconds)
            yield point if point.stable else self._point(batch, scripts, plan.seconds)

    def _point(self, batch: int, scripts: list[Script], seconds: float) -> Point:
        cpu, before = self.cpu(), self.stats()
        found = self._load.run(scripts, seconds)
        after, cpu_after = self.stats(), self.cpu()
        share = self.cpu_gauge()
        if cpu is not None and cpu_after is not None and cpu_after[1] > cpu[1]:
            share = (cpu_after[0] - cpu[0]) / (cpu_after[1] - cpu[1])
        return point_of(batch, len(scripts), found, before, after, share)


def point_of(
    batch: int,
    clients: int,
    found: Loaded,
    before: dict[str, Any],
    after: dict[str, Any],
    host_cpu: float | None,
) -> Point:
    """A Point out of what the clients saw and two answers of the statistics."""

    def spent(name: str) -> tuple[int, int]:
        was, now = before["inference_stats"].get(name, {}), after["inference_stats"].get(name, {})
        return (
            int(now.get("count", 0)) - int(was.get("count", 0)),
            int(now.get("ns", 0)) - int(was.get("ns", 0)),
        )

    parts = ("compute_input", "compute_infer", "compute_output")
    done, queue = spent("success")[0], spent("queue")
    sizes: dict[int, tuple[int, float]] = {}
    earlier = {row["batch_size"]: row for row in before["batch_stats"]}
    for row in after["batch_stats"]:
        was = earlier.get(row["batch_size"], {})
        count = int(row["compute_infer"]["count"]) - int(was.get("compute_infer", {}).get("count", 0))
        ns = sum(int(row[part]["ns"]) - int(was.get(part, {}).get("ns", 0)) for part in parts)
        if count > 0:
            sizes[int(row["batch_size"])] = count, ns / 1e9
    quantiles = np.percentile(found.latencies, [50, 90, 99]) * 1e3 if found.latencies else np.zeros(3)
    compute_count = max(spent("compute_infer")[0], 1)
    return Point(
        batch=batch,
        concurrency=clients,
        seconds=found.seconds,
        requests=len(found.latencies),
        p50_ms=float(quantiles[0]),
        p90_ms=float(quantiles[1]),
        p99_ms=float(quantiles[2]),
        failures=found.failures,
        failure=found.failure,
        client_cpu=found.client_cpu / found.seconds if found.seconds else 0.0,
        host_cpu=host_cpu,
        stable=_steady(found),
        inferences=int(after["inference_count"]) - int(before["inference_count"]),
        executions=int(after["execution_count"]) - int(before["execution_count"]),
        queue_us=queue[1] / max(queue[0], 1) / 1e3,
        compute_us=sum(spent(part)[1] for part in parts) / compute_count / 1e3,
        cache_hits=spent("cache_hit")[0],
        others=max(0, done - len(found.latencies)),
        sizes=sizes,
    )


def _steady(found: Loaded) -> bool:
    first = sum(1 for moment in found.ended if moment < found.seconds / 2)
    second = len(found.ended) - first
    return len(found.ended) < 20 or abs(first - second) <= STEADY * len(found.ended) / 2


def chosen_batches(asked: tuple[int, ...], largest: int) -> tuple[int, ...]:
    """The sizes of requests to measure: those asked for, or powers of two up to max_batch_size and 128."""
    top = max(largest, 1)
    if asked:
        if max(asked) > top:
            raise InvalidArgument(f"--batch-sizes: the model takes up to {top} rows, got {max(asked)}")
        return asked
    sizes = [1 << i for i in range(8) if 1 << i <= top]
    return tuple(sizes if sizes[-1] == top or top > 128 else [*sizes, top])
