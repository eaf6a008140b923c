"""The directory, the keys, the policy and the router's choice, without a cluster."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from neptrio.ray import sequence_key
from neptrio.ray.autoscaling import EXECUTING, PENDING, SEQUENCES, QueueDepthPolicy
from neptrio.ray.directory import Address, SequenceDirectory
from neptrio.ray.router import weight
from neptrio.ray.sequences import Sequences

A: Address = {"http": "127.0.0.1:1", "grpc": "127.0.0.1:2"}
B: Address = {"http": "127.0.0.1:3", "grpc": "127.0.0.1:4"}


class Remote:
    """A directory as its actor's handle shows it; it can be put in the place of another."""

    def __init__(self) -> None:
        self.directory = SequenceDirectory()

    def __getattr__(self, verb: str) -> Any:
        return SimpleNamespace(remote=getattr(self.directory, verb))


def pair(remote: Remote) -> tuple[Sequences, Sequences, set[int | str]]:
    """Two replicas and the ids that are live at the first."""
    live: set[int | str] = set()

    async def ids() -> set[int | str]:
        return set(live)

    async def none() -> set[int | str]:
        return set()

    return Sequences("a", A, lambda: remote, ids), Sequences("b", B, lambda: remote, none), live


def test_a_sequence_is_claimed_once_and_kept_until_it_has_ended() -> None:
    async def main() -> None:
        remote = Remote()
        a, b, live = pair(remote)
        await a.join()
        await b.join()
        assert await a.owner("m\nu1") is None
        claim = await b.owner("m\nu1")
        assert claim is not None and (claim["owner"], claim["address"]) == ("a", A)
        live.add(1)
        for _ in range(3):
            await a.look()
        assert await b.owner("m\nu1") is not None
        live.clear()
        await a.look()  # suspected
        assert await b.owner("m\nu1") is not None  # which counts as a use
        await a.look()
        assert await b.owner("m\nu1") is not None
        await a.look()
        with a.using("m\nu1"):
            await a.look()
            await a.look()
        assert await b.owner("m\nu1") is not None
        await a.look()
        await a.look()
        assert await b.owner("m\nu1") is None  # it was given back
        assert await a.owner("m\nu1") is not None

    asyncio.run(main())


def test_a_directory_that_was_started_again_is_told() -> None:
    async def main() -> None:
        remote = Remote()
        a, b, live = pair(remote)
        await a.join()
        await b.join()
        assert await a.owner("m\nu1") is None
        live.add(1)
        remote.directory = SequenceDirectory()
        await a.look()
        assert await b.owner("m\nu2") is None  # joins
        claim = await b.owner("m\nu1")
        assert claim is not None and claim["owner"] == "a"

    asyncio.run(main())


def test_a_dead_replicas_sequences_are_free() -> None:
    async def main() -> None:
        directory = SequenceDirectory()
        with socket.socket() as listening, socket.socket() as silent:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            silent.bind(("127.0.0.1", 0))
            ports = [s.getsockname()[1] for s in (listening, silent)]
            await directory.join("lives", {"http": f"127.0.0.1:{ports[0]}", "grpc": ""})
            await directory.join("dead", {"http": f"127.0.0.1:{ports[1]}", "grpc": ""})
            await directory.claim("m\nu1", "lives")
            await directory.claim("m\nu2", "dead")
            assert not await directory.lost("lives")
            assert await directory.lost("dead") and await directory.lost("dead")
        assert (await directory.claim("m\nu1", "x"))["owner"] == "lives"
        assert (await directory.claim("m\nu2", "x"))["owner"] == "x"
        await directory.leave("lives")
        assert (await directory.claim("m\nu1", "x"))["owner"] == "x"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"parameters":{"sequence_id":7}}', "m\nu7"),
        (b'{"parameters":{"sequence_id":"7"}}', "m\ns7"),
        (b'{"parameters":{"sequence_id":0}}', ""),
        (b'{"parameters":{"sequence_id":true}}', ""),
        (b'{"parameters":{"sequence_id":[1]}}', ""),
        (b'{"parameters":["sequence_id"]}', ""),
        (b'["sequence_id"]', ""),
        (b'{"sequence_id"', ""),
        (b"{}", ""),
    ],
)
def test_keys_of_json(body: bytes, expected: str) -> None:
    assert sequence_key.of_json("m", body) == expected
    assert sequence_key.of_json("m", body + b"\0sequence_id", len(body)) == expected


@pytest.mark.parametrize("sequence", [7, 2**64 - 1, "text", 0, ""])
def test_keys_of_messages(sequence: int | str) -> None:
    made = service_pb2.ModelInferRequest(model_name="m", id="request", raw_input_contents=[b"sequence_id"])
    made.parameters["other"].bool_param = True
    kind = "string_param" if isinstance(sequence, str) else "uint64_param"
    setattr(made.parameters["sequence_id"], kind, sequence)
    message = made.SerializeToString()
    expected = sequence_key.key("m", sequence) if sequence else ""
    assert sequence_key.of_message(message) == expected
    for cut in range(len(message)):
        assert sequence_key.of_message(message[:cut]) in ("", expected)
    if expected:
        assert sequence_key.parsed(expected) == ("m", sequence)


def test_a_key_stays_where_it_is_when_a_replica_joins() -> None:
    def home(key: int, names: str) -> str:
        return max(names, key=lambda name: weight(name, str(key)))

    before = [home(key, "abc") for key in range(300)]
    after = [home(key, "abcd") for key in range(300)]
    assert all(new in (old, "d") for old, new in zip(before, after, strict=True))
    assert 40 < after.count("d") < 110 and min(before.count(name) for name in "abc") > 60


def test_the_policy_counts_what_engines_hold() -> None:
    metrics = {PENDING: {"r1": 30.0, "r2": 6.0}, EXECUTING: {"r1": 4.0}, SEQUENCES: {"r1": 900.0}}
    context = SimpleNamespace(aggregated_metrics=metrics, total_queued_requests=8.0)
    assert QueueDepthPolicy(8)(context) == (6.0, {})
    assert QueueDepthPolicy(8, sequences_per_replica=100)(context) == (9.0, {})
    assert QueueDepthPolicy()(SimpleNamespace(aggregated_metrics={}, total_queued_requests=0))[0] == 0
    with pytest.raises(ValueError):
        QueueDepthPolicy(0)
