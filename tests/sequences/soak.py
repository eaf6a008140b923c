"""Many live sequences on many streams: random interleavings, idle ones, and clients that vanish.

Every answer must be the running sum of its own sequence up to its own position and carry its own id.
START errors are right only for a sequence that has been left alone for the idle time.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import trio

from neptrio.client import InferenceError, open_client
from tests.sequences.models import rest, sequence_config
from tests.support.memory import resident
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

MODEL = "soak"


@dataclass
class Tally:
    """What happened."""

    answers: int = 0
    expired: int = 0
    disconnects: int = 0
    live_at_peak: int = 0
    bytes_per_sequence: float = 0.0


@dataclass
class Worker:
    """One stream and the sequences that only it uses: id -> what the server has of it."""

    ids: list[int]
    random: random.Random
    tally: Tally
    idle_s: float
    sums: dict[int, int] = field(default_factory=dict)  # of live sequences
    sent: dict[int, float] = field(default_factory=dict)

    async def burst(self, stream: Any, ids: list[int], texts: list[str]) -> None:
        """Sends all, then checks the answers, which come in the order of the requests."""
        expected = []
        for sequence, text in zip(ids, texts, strict=True):
            value = self.random.randrange(1000)
            if "s" in text:
                self.sums[sequence] = 0
            self.sums[sequence] += value
            expected.append((sequence, text, self.sums[sequence], self.sent.get(sequence, 0.0)))
            self.sent[sequence] = time.monotonic()
            if "e" in text:
                del self.sums[sequence]
            flags = {"sequence_id": sequence, "sequence_start": "s" in text, "sequence_end": "e" in text}
            await stream.send(MODEL, {"INPUT": np.array([[value]], np.int32)}, parameters=flags)
        lost: set[int] = set()
        for sequence, text, total, before in expected:
            if "s" in text:
                lost.discard(sequence)
            try:
                result = await stream.receive()
            except InferenceError as error:
                assert f"sequence {sequence} to model" in str(error) and "START flag" in str(error), error
                assert "s" not in text
                assert sequence in lost or time.monotonic() - before >= self.idle_s, "expired too early"
                if sequence not in lost:
                    self.tally.expired += 1
                lost.add(sequence)
                continue
            assert sequence not in lost
            got = (result.outputs["CORRID"].item(), result.outputs["OUTPUT"].item())
            assert got == (sequence, total), f"sequence {sequence} expected {total}, got {got}"
            self.tally.answers += 1
        for sequence in lost:
            self.sums.pop(sequence, None)

    def texts(self, ids: list[int]) -> list[str]:
        """Flags for requests to `ids`, in order: START where needed, END now and then."""
        live = set(self.sums)
        made = []
        for sequence in ids:
            text = "" if sequence in live else "s"
            live.add(sequence)
            if self.random.random() < 0.1:
                text += "e"
                live.discard(sequence)
            made.append(text)
        return made

    async def work(self, address: str, started: trio.Event, ready: Any, until: Any) -> None:
        """Starts every sequence, says so, then goes on at random until `until()`; ends them all."""
        first = True
        while True:
            async with open_client(address) as client, client.stream() as stream:
                if first:
                    for at in range(0, len(self.ids), 50):
                        some = self.ids[at : at + 50]
                        await self.burst(stream, some, ["s"] * len(some))
                    ready()
                    await started.wait()
                    first = False
                while not until():
                    some = self.random.choices(self.ids, k=self.random.randint(1, 20))
                    if self.random.random() < 0.03:  # vanish with requests under way
                        for sequence in some:
                            flags = {"sequence_id": sequence, "sequence_start": True, "sequence_end": False}
                            await stream.send(MODEL, {"INPUT": np.ones((1, 1), np.int32)}, parameters=flags)
                        break
                    await self.burst(stream, some, self.texts(some))
                else:
                    some = list(self.sums)
                    for at in range(0, len(some), 50):
                        part = some[at : at + 50]
                        await self.burst(stream, part, ["e"] * len(part))
                    return
            self.tally.disconnects += 1
            self.sums.clear()  # the model frees a stream's sequences with it


def soak(folder: Path, sequences: int, streams: int, seconds: float, idle_s: float, seed: int = 1) -> Tally:
    """Runs it all and returns what happened; raises AssertionError for anything out of place."""
    tally = Tally()
    write_model(
        folder,
        MODEL,
        sequence_config(
            f"oldest {{ max_candidate_sequences: {sequences} }}",
            64,
            idle_us=int(idle_s * 1e6),
            extra='parameters { key: "free_sequences_on_disconnect" value { string_value: "true" } }',
        ),
    )
    with ServerProcess(folder) as server:

        def listing() -> Any:
            return rest(server, "GET", f"/v2/models/{MODEL}/sequences")[1]

        listing()
        before = resident(server.process.pid)
        ids = list(range(1, sequences + 1))
        workers = [
            Worker(ids[i::streams], random.Random(seed * 1000 + i), tally, idle_s) for i in range(streams)
        ]
        waiting = streams
        started = trio.Event()
        deadline = [float("inf")]

        def ready() -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                tally.live_at_peak = sum(len(worker.sums) for worker in workers)
                grown = resident(server.process.pid) - before
                tally.bytes_per_sequence = grown / sequences
                deadline[0] = time.monotonic() + seconds
                started.set()

        def over() -> bool:
            """Whether the time is up, in which a slow machine may have come to nothing but the beginnings."""
            return time.monotonic() > deadline[0] and tally.answers > sequences

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                for worker in workers:
                    nursery.start_soon(worker.work, server.grpc, started, ready, over)

        trio.run(main)
        until(
            lambda: not any(listing()[key] for key in ("slots_used", "live", "backlog")),
            lambda: f"slots are given back: {listing()}",
        )
    return tally
