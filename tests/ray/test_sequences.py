"""Sequences stay on their replica, whatever way their requests take, and while replicas come and go."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.grpc
import tritonclient.http
from ray import serve

from tests.ray.support import Ports, Rest, declare, replicas, running, tensor, until_running
from tests.support.waiting import until


@pytest.fixture(scope="module")
def rest(cluster: Ports) -> Iterator[Rest]:
    with running(cluster, "tests.ray.models:make", num_replicas=3) as found:
        until_running(3)
        yield found


def test_rest_requests_find_their_sequence(cluster: Ports, rest: Rest) -> None:
    ids: list[int | str] = [*range(1, 13), "text", "7"]
    homes: dict[int | str, set[str]] = {sequence: set() for sequence in ids}
    totals = dict.fromkeys(ids, 0)
    for step in range(6):
        random.shuffle(ids)
        for sequence in ids:
            number = random.randrange(100)
            answer = rest.add(sequence, number, start=step == 0, end=step == 5)
            totals[sequence] += number
            assert answer.output() == totals[sequence]
            homes[sequence].add(answer.replica)
    assert all(len(found) == 1 for found in homes.values())
    assert len(set.union(*homes.values())) > 1


def test_a_sequence_over_all_ways(cluster: Ports, rest: Rest) -> None:
    number = [tensor(tritonclient.grpc, "x", [1])]
    with (
        tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{cluster.grpc}") as over_grpc,
        tritonclient.http.InferenceServerClient(f"127.0.0.1:{cluster.http}") as over_http,
    ):
        for sequence in range(100, 108):
            total = 0
            for step in range(3):
                assert rest.add(sequence, 1, start=step == 0).output() == total + 1
                result = over_grpc.infer("total", number, sequence_id=sequence)
                assert result.as_numpy("total").tolist() == [total + 2]
                binary = [tensor(tritonclient.http, "x", [1])]
                packed = over_http.infer(
                    "total", binary, sequence_id=sequence, request_compression_algorithm="gzip"
                )
                assert packed.as_numpy("total").tolist() == [total + 3]
                answers: list[Any] = []
                over_grpc.start_stream(lambda result, error, answers=answers: answers.append((result, error)))
                over_grpc.async_stream_infer("total", number, sequence_id=sequence)
                until(lambda answers=answers: answers)
                over_grpc.stop_stream()
                result, error = answers[0]
                assert error is None and result.as_numpy("total").tolist() == [total + 4]
                total += 4
            ended = rest.ask(f"/v2/models/total/sequences/{sequence}/end", {})
            assert ended.status == 200 and ended.json["id"] == sequence


def test_a_session_header_chooses_the_replica(rest: Rest) -> None:
    for session in ("a", "b", "c", "d"):
        assert len({rest.ask("/v2", x_session_id=session).replica for _ in range(8)}) == 1
    assert len({rest.ask("/v2", x_session_id=str(session)).replica for session in range(32)}) == 3


def test_an_ended_sequence_is_given_back(rest: Rest) -> None:
    rest.add(900, 1, start=True).output()
    handle = serve.get_app_handle("t")

    def counted() -> int:
        return sum(found["sequences"] for found in handle.replicas.remote().result().values())

    assert counted() >= 1
    rest.add(900, 1, end=True).output()
    until(lambda: counted() == 0, counted)
    assert rest.add(900, 5, start=True).output() == 5
    assert rest.add(900, 1, end=True).output() == 6


def test_sequences_survive_scaling_and_updates(cluster: Ports) -> None:
    """Up: they stay where they are. Down and updates: replicas that leave wait for them, and requests still arrive."""
    server, options = "tests.ray.models:make", {"drain_seconds": 100.0}
    declare(server, "scaled", "/s", num_replicas=1, **options)
    try:
        found = Rest(cluster, "/s")
        until_running(1, "scaled")
        totals = dict.fromkeys(range(1, 7), 0)
        homes: dict[int, str] = {}

        def add(sequence: int, end: bool = False) -> None:
            """The next request of a sequence, which must find it at its replica."""
            answer = found.add(sequence, 1, start=not totals[sequence], end=end)
            totals[sequence] += 1
            assert answer.output() == totals[sequence]
            assert homes.setdefault(sequence, answer.replica) == answer.replica

        for sequence in totals:
            add(sequence)
        declare(server, "scaled", "/s", num_replicas=3, **options)
        until_running(3, "scaled")
        totals.update(dict.fromkeys(range(11, 23), 0))
        for sequence in (*totals, *totals):
            add(sequence)
        assert len(set(homes.values())) == 3
        declare(server, "scaled", "/s", num_replicas=1, wait=False, **options)
        until(lambda: serve_count("scaled") == 1, "one replica runs")
        for sequence in totals:
            add(sequence)
        stays = found.ask("/v2").replica
        for sequence in [sequence for sequence in totals if homes[sequence] != stays]:
            add(sequence, end=True)
            del totals[sequence]
        assert totals
        # Ray updates a deployment only when the replicas of the change before have left
        until(lambda: replicas("scaled") == {stays}, "the others have left")
        declare(server, "scaled", "/s", num_replicas=1, wait=False, settings={"id": "second"}, **options)
        until(lambda: found.ask("/v2").json["name"] == "second", "the second version answers")
        for sequence in totals:
            add(sequence)
        for sequence in totals:
            add(sequence, end=True)
        until(lambda: stays not in serve.get_app_handle("scaled").replicas.remote().result(), "it has left")
    finally:
        serve.delete("scaled")


def serve_count(name: str) -> int:
    """How many replicas of an application Ray sends requests to."""
    states = serve.status().applications[name].deployments["neptrio"].replica_states
    return int(sum(count for state, count in states.items() if str(state).endswith("RUNNING")))


def test_sequences_of_a_dead_replica_are_told_so(cluster: Ports) -> None:
    with running(cluster, "tests.ray.models:make", "/d", app_name="dead", num_replicas=2) as found:
        until_running(2, "dead")
        homes = {sequence: found.add(sequence, 1, start=True).replica for sequence in range(1, 9)}
        answer = found.infer("process")
        victim = answer.replica
        os.kill(answer.output(), signal.SIGKILL)
        for sequence, home in homes.items():
            # while the process ends, its connections break: it is not known then what became of the request
            answer = until(lambda s=sequence: (a := found.add(s, 1)).status != 503 and a)  # type: ignore[misc]
            if home == victim:
                assert answer.status == 400 and "START" in answer.json["error"], answer.body
                assert found.add(sequence, 7, start=True).output() == 7
            else:
                assert answer.output() == 2 and answer.replica == home
