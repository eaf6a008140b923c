"""Statistics, metrics and index of models that have not changed are not made again, and what has changed is always shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio.codec.http_json import dump_json
from neptrio.observe.metrics_config import MetricsConfig
from neptrio.observe.model_families import Detail, ModelFamilies, label_texts
from neptrio.transport.grpc.service import _index_text, _statistics_text
from tests.backends.python.models import config, python_model
from tests.service.test_statistics_python import DECOUPLED
from tests.support.embedded import EmbeddedServer
from tests.support.repository import identity_config, write_model
from tests.support.streams import Answers

FORMS: dict[str, Callable[[dict[str, Any]], bytes]] = {"json": dump_json, "protobuf": _statistics_text}
FAILING = """
class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("all of it")
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    cached = "response_cache { enable: true }"
    for name, extra in (("idle", ""), ("plain", ""), ("cached", cached), ("refusing", "")):
        write_model(tmp_path, name, identity_config(extra=extra))
    (tmp_path / "no_versions").mkdir()
    python_model(
        tmp_path,
        "decoupled",
        "import numpy as np\n" + DECOUPLED,
        config(extra="model_transaction_policy { decoupled: true }"),
    )
    python_model(tmp_path, "failing", FAILING, config())
    with EmbeddedServer(
        tmp_path,
        model_control_mode="explicit",
        load_model=("idle", "plain", "cached", "decoupled", "failing"),
        cache_config="local,size=1000000",
    ) as running:
        yield running


def statistics(server: EmbeddedServer) -> dict[str, tuple[list[bytes], list[bytes]]]:
    """Form -> the texts that clients get, and those that are made anew."""
    service = server.server.verbs.statistics

    def ask() -> dict[str, tuple[list[bytes], list[bytes]]]:
        return {
            form: (list(service.texts("", "", form, text)), [text(row) for row in service.rows("", "")])
            for form, text in FORMS.items()
        }

    return server.ask(ask)


def families(server: EmbeddedServer, detail: Detail, anew: bool) -> str:
    """The models' lines of the metrics document, but those of their processes and of what they hold now."""

    def ask() -> str:
        made = ModelFamilies(MetricsConfig(), detail, True)
        for model in server.server.repository.ready_models():
            if anew:
                label_texts(model).kept.clear()
            made.add(model)
        shown = [family for family in made.families if not family.name.startswith("neptrio_process_")]
        return b"".join(part for family in shown for part in family.render()).decode()

    return server.ask(ask)


def index(server: EmbeddedServer) -> dict[str, tuple[list[bytes], list[bytes]]]:
    """As statistics()."""
    service = server.server.verbs.repository

    async def ask() -> dict[str, tuple[list[bytes], list[bytes]]]:
        found = {}
        for form, text in {"json": dump_json, "protobuf": _index_text}.items():
            for ready in (False, True):
                kept = list(await service.index_texts(ready, form, text))
                found[f"{form} {ready}"] = kept, [text(row) for row in await service.index_rows(ready)]
        return found

    return server.run(ask)


def infer(server: EmbeddedServer, model: str, first: int = 0, **options: Any) -> None:
    inputs = [httpclient.InferInput(f"INPUT{i}", [1, 16], "INT32") for i in range(2)]
    for each in inputs:
        each.set_data_from_numpy(np.full((1, 16), first, np.int32))
    with httpclient.InferenceServerClient(server.http) as client:
        client.infer(model, inputs, **options)


def fail(server: EmbeddedServer) -> None:
    tensor = httpclient.InferInput("IN", [3], "FP32")
    tensor.set_data_from_numpy(np.zeros(3, np.float32))
    with (
        httpclient.InferenceServerClient(server.http) as client,
        pytest.raises(InferenceServerException, match="all of it"),
    ):
        client.infer("failing", [tensor])


def stream(server: EmbeddedServer, good: int, bad: int) -> None:
    executions = server.server.repository.lookup("decoupled").counters
    before = executions.execution_count
    tensor = grpcclient.InferInput("IN", [3], "FP32")
    tensor.set_data_from_numpy(np.array([good, bad, 0], np.float32))
    with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client) as answers:
        client.async_stream_infer("decoupled", [tensor], enable_empty_final_response=True)
        for _ in range(good + bad + 1):
            answers.next()
    # it is counted when execute() has returned, which may be after the last response
    server.until(lambda: executions.execution_count == before + 1, "the execution is counted")


def control(server: EmbeddedServer, verb: str, model: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        getattr(client, verb)(model)
    records = server.server.repository.records
    server.until(lambda: not any(r.retiring for r in records.values()), "what was unloaded has ended")


EVENTS: dict[str, tuple[str, Callable[[EmbeddedServer], None]]] = {
    "a request": ("plain", partial(infer, model="plain")),
    "another": ("plain", partial(infer, model="plain", first=1)),
    "a miss of the cache": ("cached", partial(infer, model="cached", first=2)),
    "a hit of the cache": ("cached", partial(infer, model="cached", first=2)),
    "a failed request": ("failing", fail),
    "responses": ("decoupled", partial(stream, good=2, bad=0)),
    "a response and an error": ("decoupled", partial(stream, good=1, bad=1)),
    "no response": ("decoupled", partial(stream, good=0, bad=0)),
    "a load": ("refusing", partial(control, verb="load_model", model="refusing")),
    "an unload": ("plain", partial(control, verb="unload_model", model="plain")),
    "a load again": ("plain", partial(control, verb="load_model", model="plain")),
}


def test_whatever_happens_is_shown_at_once(server: EmbeddedServer) -> None:
    before = statistics(server), index(server)
    for what, (model, happen) in EVENTS.items():
        happen(server)
        server.until_idle()
        now = statistics(server), index(server)
        for form, (kept, anew) in {**now[0], **now[1]}.items():
            assert kept == anew, (what, form)
        for detail in Detail:
            again = [families(server, detail, anew) for anew in (False, True, False)]
            assert again[0] == again[1] == again[2], (what, detail)
            assert 'nv_inference_count{model="idle",version="1"} 0\n' in again[0]
        for form in FORMS:
            rows, earlier = now[0][form][0], before[0][form][0]
            assert rows != earlier, (what, "changes the statistics")
            others = [row for row in rows if model.encode() not in row]
            assert others, what
            assert all(any(row is old for old in earlier) for row in others), (what, "makes nothing anew")
        before = now


def test_what_makes_a_model_unready_is_shown_at_once(server: EmbeddedServer) -> None:
    model = next(m for m in server.server.repository.ready_models() if m.name == "idle")

    def states() -> list[str]:
        rows = index(server)
        for form, (kept, anew) in rows.items():
            assert kept == anew, form
        return [row.decode() for row in rows["json False"][0] if b'"idle"' in row]

    def ready(value: bool) -> None:
        model.healthy = value

    assert states() == ['{"name":"idle","version":"1","state":"READY"}']
    server.ask(ready, False)
    assert states() == ['{"name":"idle","version":"1","state":"UNAVAILABLE"}']
    server.ask(ready, True)
    assert states() == ['{"name":"idle","version":"1","state":"READY"}']
    control(server, "unload_model", "idle")
    assert states() == ['{"name":"idle","version":"1","state":"UNAVAILABLE","reason":"unloaded"}']
