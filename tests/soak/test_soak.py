"""Many clients, mixed sizes, random cancels and random model errors: the accounts must close.

`make test-all` runs the short form; `make soak` (NEPTRIO_SOAK_SECONDS=60) the long one, which also
asks whether the server's memory is flat between the 20th and the 60th second.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as grpcclient
from tritonclient.utils import InferenceServerException

from tests.support.memory import growth, peak, resident
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("NEPTRIO_SOAK_SECONDS", "4"))
CLIENTS = 200
CHANNELS = 8
# what forty seconds (some 75,000 requests) may add, so a leak of 40 bytes a request fails; and how
# far a single second may lie above the usual one: batches in flight, arenas that come and go
GROWTH, PEAK = 3 << 20, 8 << 20

FAILING = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy() for r in requests]
        if any(array.flat[0] == 666 for array in arrays):
            raise ValueError("the whole batch fails")
        return [
            pb_utils.InferenceResponse(error=pb_utils.TritonError("this one fails"))
            if array.flat[0] == 13
            else pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)])
            for array in arrays
        ]
"""
IO = 'input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ] output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ] '
DELAY = 'parameters { key: "execute_delay_ms" value { string_value: "2" } } '


def write_models(repository: Path) -> list[str]:
    write_model(repository, "plain", identity_config(dims="-1", pairs=1))
    batching = "dynamic_batching { max_queue_delay_microseconds: 500 preferred_batch_size: [ 4 ] } instance_group [ { count: 2 } ] "
    write_model(repository, "batching", identity_config(dims="-1", pairs=1, extra=DELAY + batching))
    policy = (
        "dynamic_batching { priority_levels: 3 default_priority_level: 2 default_queue_policy { "
        "max_queue_size: 16 default_timeout_microseconds: 20000 allow_timeout_override: true } } "
    )
    write_model(repository, "limited", identity_config(dims="-1", pairs=1, extra=DELAY + policy))
    write_model(
        repository,
        "failing",
        f'backend: "python" max_batch_size: 8 {IO} dynamic_batching {{ preserve_ordering: true }}',
        {"1/model.py": FAILING},
    )
    start = "name: 'START' control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }"
    write_model(
        repository,
        "sequences",
        identity_config(
            dims="-1",
            pairs=1,
            extra="sequence_batching { max_sequence_idle_microseconds: 2000000 "
            f"oldest {{ max_candidate_sequences: 16 }} control_input {{ {start} }} }}",
        ),
    )
    return ["plain", "batching", "limited", "failing", "sequences"]


async def one_client(
    client: Any, models: list[str], counts: Counter[tuple[str, str]], seed: int, end: float
) -> None:
    """Requests one after the other; about one in five is cancelled at a random moment."""
    dice = random.Random(seed)
    left, sequence = 0, 0  # requests to come of a sequence that has begun, its id
    while time.monotonic() < end or left:
        model = "sequences" if left else dice.choice(models)
        options: dict[str, Any] = {}
        if model == "sequences":
            if not left:
                left, sequence = dice.randint(1, 4), dice.getrandbits(63) | 1
                options["sequence_start"] = True
            left -= 1
            options |= {"sequence_id": sequence, "sequence_end": not left}
        rows = 1 if model == "sequences" else dice.randint(1, 4)
        width = dice.choice([1, 1, 16, 4096])
        value = (
            dice.choice([1, 2, 3, 13, 666])
            if model == "failing" and dice.random() < 0.1
            else dice.randint(20, 99)
        )
        tensor = grpcclient.InferInput("INPUT0", [rows, width], "INT32")
        tensor.set_data_from_numpy(np.full((rows, width), value, np.int32))
        call = asyncio.ensure_future(
            client.infer(
                model, [tensor], priority=dice.randint(0, 4), timeout=dice.choice([None, 3000]), **options
            )
        )
        counts[model, "sent"] += 1
        if dice.random() < 0.2:
            await asyncio.wait([call], timeout=dice.random() * 0.02)
            call.cancel()
        try:
            result = await call
        except asyncio.CancelledError:
            counts[model, "cancelled"] += 1
            left = 0  # its sequence is over, or ends when it has been idle
        except InferenceServerException as error:
            left = 0
            text = str(error.message())
            known = (
                "Exceeds maximum queue size",
                "Request timeout expired",
                "this one fails",
                "whole batch fails",
                "Locally cancelled",
                "timeout of the corresponding sequence has been expired",
                "must specify the START flag",  # its client was slower than the idle timeout
            )
            assert any(part in text for part in known), text
            kind = "cancelled" if "cancelled" in text else "failed"
            if "Exceeds" in text or "START" in text:  # not accepted
                kind = "refused"
            counts[model, kind] += 1
        else:
            assert np.array_equal(result.as_numpy("OUTPUT0"), np.full((rows, width), value, np.int32))
            counts[model, "ok"] += 1


async def all_clients(
    address: str, models: list[str], memory: Any
) -> tuple[Counter[tuple[str, str]], list[int]]:
    counts: Counter[tuple[str, str]] = Counter()
    end = time.monotonic() + SECONDS
    clients = [grpcclient.InferenceServerClient(address) for _ in range(CHANNELS)]
    tasks = [
        asyncio.ensure_future(one_client(clients[i % CHANNELS], models, counts, i, end))
        for i in range(CLIENTS)
    ]
    sizes = []
    for _ in range(int(SECONDS)):
        await asyncio.sleep(1)  # a sample a second, while the clients work: how long it lasts is the test
        sizes.append(memory())
    await asyncio.gather(*tasks)
    for client in clients:
        await client.close()
    return counts, sizes


def statistics(server: ServerProcess, model: str) -> dict[str, Any]:
    with urllib.request.urlopen(
        f"http://{server.http}/v2/models/{model}/stats?live=true", timeout=60
    ) as answer:
        found: dict[str, Any] = json.loads(answer.read())["model_stats"][0]
    return found


def test_the_accounts_close_and_nothing_is_left(tmp_path: Path) -> None:
    models = write_models(tmp_path)
    with ServerProcess(tmp_path) as server:

        def memory() -> int:
            return resident(server.process.pid)

        counts, sizes = asyncio.run(all_clients(server.grpc, models, memory))
        for model in models:
            until(
                lambda model=model: not any(statistics(server, model)["live"].values()),
                lambda model=model: f"{model} is idle: {statistics(server, model)['live']}",
            )
            stats = statistics(server, model)
            row = {kind: counts[model, kind] for kind in ("sent", "ok", "failed", "refused", "cancelled")}
            assert row["sent"] == row["ok"] + row["failed"] + row["refused"] + row["cancelled"]
            assert not any(stats["live"].values()), "no queue entry, no slot and no byte is left"
            made = stats["accounts"]
            assert made["accepted"] == made["answered"] + made["failed"] + made["cancelled"] > 0
            success, fail = (stats["inference_stats"][k]["count"] for k in ("success", "fail"))
            # a call that the client gave up may have ended any way, or never have been accepted
            assert row["ok"] <= success <= row["ok"] + row["cancelled"], (model, row, success, fail)
            assert row["failed"] <= fail <= row["failed"] + row["cancelled"], (model, row, success, fail)
            assert row["ok"] + row["failed"] <= success + fail <= row["sent"] - row["refused"]
            assert (success, fail) == (made["answered"], made["failed"] + made["cancelled"])
            assert made["cancelled"] <= row["cancelled"], "nobody is cancelled who did not ask for it"
            print(f"\n{model}: {row}, accounts {made}", end="")
            assert row["ok"] > 0 and row["cancelled"] > 0
        print(f"\n{sum(n for (_, kind), n in counts.items() if kind == 'sent')} requests, rss {sizes}")
        if SECONDS >= 60:
            steady = sizes[19:60]
            print(f"from the 20th second on: growth {growth(steady):.0f}, peak {peak(steady):.0f} bytes")
            assert growth(steady) < GROWTH and peak(steady) < PEAK, steady
