"""A backend reads whose trace a request's is, and reports activities: they are in trace files, among recent traces, and spans."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http as http

from tests.backends.compiled.asking import ONE, TEXT, numbers, text_of
from tests.support.collector import Collector
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.slow

# what traces.c reports, beside COMPUTE_START, which is a name of the server's own
REPORTED = ("OUTER_START", "INNER_START", 'a "point"', "INNER_END", "OUTER_END", "ALONE", "UNENDED_START")


def recent(server: ServerProcess) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"http://{server.http}/v2/trace/recent") as answer:
        return [dict(each) for each in json.load(answer)]


def written(file: Path) -> list[dict[str, Any]]:
    return [dict(each) for each in json.loads(file.read_text())] if file.exists() else []


def told(client: Any, what: str = "traced", model: str = "probe", **more: Any) -> list[str]:
    parameters = {"do": what, "neptrio_trace": "TIMESTAMPS"}
    found = client.infer(model, [numbers(5)], parameters=parameters, **more).as_numpy("TEXT")
    return str(found[0, 0].decode()).split("|")


def test_a_request_that_is_not_traced_has_no_trace(client: Any) -> None:
    assert text_of(client, "traced").startswith("3 TRITONSERVER_InferenceTraceReportActivity: ")


def test_what_it_reads_and_what_it_reports(client: Any, server: ServerProcess, trace_file: Path) -> None:
    id, parent, name, version, request, context, above, no_id, no_activity, set_here = told(
        client, request_id="mine"
    )
    assert (parent, name, version, request, context) == ("0", "probe", "1", "mine", "")
    assert above == id and set_here == '{"mine":1}'
    assert no_id.startswith("5 TRITONSERVER_InferenceTraceId is not supported")
    assert no_activity.startswith("5 TRITONSERVER_InferenceTraceReportActivity is not supported")
    for source in (lambda: recent(server), lambda: written(trace_file)):
        (found,) = until(lambda source=source: [each for each in source() if each["id"] == int(id)])
        stamps = found["timestamps"]
        assert stamps == sorted(stamps, key=lambda stamp: stamp["ns"])
        names = [stamp["name"] for stamp in stamps]
        at = [names.index(each) for each in ("REQUEST_START", *REPORTED, "REQUEST_END")]
        assert at == sorted(at) and names.count("COMPUTE_START") == 2


def test_a_step_has_an_id_and_a_parent(client: Any, server: ServerProcess) -> None:
    id, parent, *_ = told(client, model="steps")
    rows = {
        row["id"]: row
        for row in until(lambda: [r for r in recent(server) if r["id"] == int(id)] and recent(server))
    }
    assert rows[int(id)]["parent_id"] == int(parent) and rows[int(parent)]["model_name"] == "steps"
    assert "ALONE" in [stamp["name"] for stamp in rows[int(id)]["timestamps"]]
    assert "ALONE" not in [stamp["name"] for stamp in rows[int(parent)]["timestamps"]]


def test_a_backend_that_reports_without_end_takes_no_memory(client: Any, server: ServerProcess) -> None:
    id = told(client, "traced without end")[0]
    (found,) = until(lambda: [each for each in recent(server) if each["id"] == int(id)])
    stamps = [stamp for stamp in found["timestamps"] if stamp["name"].startswith("xxx")]
    assert len(stamps) == 1000 - len(REPORTED) - 1 and max(len(stamp["name"]) for stamp in stamps) < 1200


def test_activities_are_spans(backends: Path, tmp_path: Path) -> None:
    write_model(tmp_path, "probe", TEXT + ONE)
    collector = Collector()
    server = ServerProcess(
        tmp_path,
        f"--backend-directory={backends}",
        "--trace-config=mode=opentelemetry",
        f"--trace-config=opentelemetry,url={collector.url}",
        "--trace-config=opentelemetry,bsp_schedule_delay=100",
        "--trace-config=rate=1",
        "--trace-config=level=TIMESTAMPS",
    )
    try:
        with http.InferenceServerClient(server.http) as client:
            found = text_of(client, "traced").split("|")
        assert found[5].startswith('{"traceparent":"00-')
        spans = {span.name: span for span in collector.wait(lambda spans: len(spans) >= 7)}
    finally:
        server.stop()
        collector.close()
    model = spans["probe"]
    assert found[5].split("-")[2] == model.span_id.hex()
    above = {
        "OUTER": model,
        "INNER": spans["OUTER"],
        "COMPUTE": model,
        "UNENDED": spans["COMPUTE"],
        "compute": model,
    }
    for name, parent in above.items():
        assert spans[name].parent_span_id == parent.span_id, name
        assert parent.start_time_unix_nano <= spans[name].start_time_unix_nano
        assert spans[name].end_time_unix_nano <= parent.end_time_unix_nano
    events = {name: [event.name for event in span.events] for name, span in spans.items()}
    assert events["INNER"] == ["INNER_START", 'a "point"', "INNER_END"]
    assert events["OUTER"] == ["OUTER_START", "OUTER_END"] and events["UNENDED"] == ["UNENDED_START"]
    assert "ALONE" in events["probe"]
