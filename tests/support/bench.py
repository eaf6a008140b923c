"""A server with a gated model, and calls to it that a test can cancel one by one."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from tests.support.gate import Gate
from tests.support.metrics import scrape, value
from tests.support.server import ServerProcess
from tests.support.statistics import stats
from tests.support.waiting import until


def tensor(value: int = 0) -> list[Any]:
    made = grpcclient.InferInput("INPUT0", [1, 2], "INT32")
    made.set_data_from_numpy(np.full((1, 2), value, np.int32))
    return [made]


class Bench:
    """A server with one gated model `gate`, and calls that can be cancelled."""

    def __init__(self, folder: Path, size: int = 8, extra: str = "dynamic_batching { }") -> None:
        repository = folder / "repository"
        self.gate = Gate(repository, folder / "gate", extra=extra, size=size)
        self.server = ServerProcess(repository, "--metrics-port=0", "--allow-metrics=true")
        self.client = grpcclient.InferenceServerClient(self.server.grpc)
        self.calls: dict[str, Any] = {}
        self.outcomes: dict[str, Any] = {}
        self._news = threading.Condition()
        self._before = {"success": 0, "fail": 0, "queue": 0, "cancelled": 0}

    def fresh(self) -> None:
        """Resets the counts that total() and others are compared with."""
        self._before = {"success": 0, "fail": 0, "queue": 0}
        self._before = {what: self.count(what) for what in self._before}
        self._before["cancelled"] = self.cancelled()
        self.calls, self.outcomes = {}, {}
        self.gate.forget()

    def send(self, *ids: str, **options: Any) -> None:
        """Sends gRPC requests, one after the other: each is accepted before the next is sent."""
        for id in ids:
            before = self.total()
            self.calls[id] = self.client.async_infer(
                "gate", tensor(number(id)), self._callback(id), request_id=id, **options
            )
            until(lambda: self.total() > before, f"'{id}' is accepted")  # noqa: B023

    def _callback(self, id: str) -> Any:
        def called(result: Any, error: Any) -> None:
            with self._news:
                self.outcomes[id] = error or result
                self._news.notify_all()

        return called

    def stats(self) -> dict[str, Any]:
        return stats(self.server, "gate")

    def total(self) -> int:
        """How many requests were accepted so far, whatever happened to them."""
        found = self.stats()
        done = found["inference_stats"]
        return int(found["live"]["accepted"] + done["success"]["count"] + done["fail"]["count"])

    def live(self, what: str) -> int:
        return int(self.stats()["live"][what])

    def count(self, what: str) -> int:
        return int(self.stats()["inference_stats"][what]["count"]) - self._before[what]

    def cancelled(self) -> int:
        labels = {"model": "gate", "reason": "CANCELED", "version": "1"}
        return int(value(scrape(self.server), "nv_inference_request_failure", **labels))

    def cancel(self, id: str) -> None:
        """Cancels a call; returns when the server has dropped its request."""
        before = self.count("fail")
        self.calls[id].cancel()
        until(lambda: self.count("fail") == before + 1, f"'{id}' is cancelled")

    def result(self, id: str) -> Any:
        with self._news:
            assert self._news.wait_for(lambda: id in self.outcomes, 60), f"no answer for '{id}'"
            return self.outcomes[id]

    def assert_answered(self, *ids: str) -> None:
        """Fails unless each of these requests has the correct answer."""
        for id in ids:
            outcome = self.result(id)
            assert isinstance(outcome, grpcclient.InferResult), f"{id}: {outcome}"
            np.testing.assert_array_equal(outcome.as_numpy("OUTPUT0"), np.full((1, 2), number(id)))

    def assert_nothing_left(self, success: int, cancelled: int) -> None:
        until(lambda: self.live("accepted") == 0, "every request is answered")
        held = self.stats()["live"]
        assert held == dict.fromkeys(held, 0)
        assert (self.count("success"), self.count("fail"), self.count("queue")) == (
            success,
            cancelled,
            success,
        )
        assert self.cancelled() - self._before["cancelled"] == cancelled

    def close(self) -> None:
        self.client.close()
        self.server.stop()
        self.gate.close()


def number(id: str) -> int:
    return int(re.sub(r"\D", "", id) or 0)
