"""The console's modules that only compute, run by Node and compared with what Python and numpy say."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from google.protobuf import json_format, text_format

from neptrio.config import model_config
from neptrio.console import pages
from neptrio.observe.top_view import duration as top_duration
from neptrio.traces.reader import Trace
from neptrio.traces.view import outcome, segments

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(
    NODE is None, reason="no node on PATH: modules are tested in the browser alone"
)
ASSETS = Path(pages.__file__).parent / "assets"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules where Node takes them for ES modules."""
    made: Path = tmp_path_factory.mktemp("modules")
    for path in ASSETS.glob("*.js"):
        shutil.copy(path, made)
    (made / "package.json").write_text('{"type": "module"}')
    return made


def run(folder: Path, module: str, expression: str, given: Any = None) -> Any:
    """The JSON value of an expression in which `m` is the module and `given` a value."""
    program = (
        f'import * as m from "{(folder / module).as_uri()}"; import {{ readFileSync }} from "node:fs"; '
        "const given = JSON.parse(readFileSync(0, 'utf8')); "
        "const plain = (key, value) => typeof value === 'bigint' ? value.toString() : value; "
        f"console.log(JSON.stringify({expression}, plain));"
    )
    assert NODE is not None
    done = subprocess.run(
        [NODE, "--input-type=module", "-e", program],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


POINTS = ("HTTP_RECV_START", "HTTP_RECV_END", "GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "REQUEST_START",
          "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END", "REQUEST_END",
          "INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END", "HTTP_SEND_START", "HTTP_SEND_END")  # fmt: skip
ERRORS = ("", "", "no luck", "the request was cancelled", "it timed out", "exceeds maximum queue size 4")


def test_stages_are_those_of_trace_view(folder: Path) -> None:
    choice = random.Random(3)
    given = []
    for number in range(300):
        names = [name for name in POINTS if choice.random() < 0.8]
        at = sorted(choice.randrange(1000) for _ in names)
        times = [{"name": name, "ns": ns} for name, ns in zip(names, at, strict=True)]
        given.append({"id": number, "timestamps": times, "error": choice.choice(ERRORS)})
    found = run(
        folder,
        "stages.js",
        "given.flatMap(t => [false, true].map(p => [m.segments(t, p).map(s => [s.stage, s.begin, s.end]), m.outcome(t)]))",
        given,
    )
    for i, (stages, result) in enumerate(found):
        row = given[i // 2]
        trace = Trace(
            id=row["id"], times=[(t["ns"], t["name"]) for t in row["timestamps"]], error=row["error"]
        )
        assert [tuple(stage) for stage in stages] == segments(trace, bool(i % 2)), row
        assert result == outcome(trace) or not row["timestamps"], row


def test_requests_keep_their_steps_below_them(folder: Path) -> None:
    def trace(number: int, begin: int, parent: int | None = None) -> dict[str, Any]:
        times = [{"name": "REQUEST_START", "ns": begin}, {"name": "REQUEST_END", "ns": begin + 5}]
        return {"id": number, "timestamps": times, **({} if parent is None else {"parent_id": parent})}

    given = [trace(2, 12, 1), trace(3, 11, 1), trace(4, 13, 2), trace(1, 10), trace(5, 50), trace(6, 60, 99)]
    found = run(
        folder,
        "stages.js",
        "m.requests(given).map(r => [r.total, r.parts.map(p => [p.trace.id, p.depth])])",
        given,
    )
    assert found == [[5, [[6, 0]]], [5, [[5, 0]]], [8, [[1, 0], [3, 1], [2, 1], [4, 2]]]]


@pytest.mark.parametrize(
    ("datatype", "dtype"), [("FP16", np.float16), ("BF16", ml_dtypes.bfloat16), ("FP32", np.float32), ("FP64", np.float64)]
)  # fmt: skip
def test_floating_point_is_written_as_numpy_writes_it(folder: Path, datatype: str, dtype: Any) -> None:
    choice = random.Random(5)
    values = [
        0.0,
        -0.0,
        1.0,
        65504.0,
        65519.9,
        65520.0,
        1e-8,
        6e-8,
        2.0**-24,
        2.0**-25,
        3 * 2.0**-26,
        1e300,
        -1e300,
    ]
    values += [
        np.float32(choice.uniform(-1, 1) * 2.0 ** choice.randrange(-40, 20)).item() for _ in range(2000)
    ]
    found = run(folder, "tensors.js", f"Array.from(m.encode(given, '{datatype}'))", values)
    with np.errstate(over="ignore"):
        assert (
            bytes(found)
            == np.array(values, np.float32 if datatype == "BF16" else dtype).astype(dtype).tobytes()
        )


def test_whole_numbers_keep_every_digit(folder: Path) -> None:
    text = "[-9223372036854775808, 9223372036854775807 ; 1\n2]"
    found = run(folder, "tensors.js", "[m.jsonText(m.parseValues(given, 'INT64')), Array.from(m.encode(m.parseValues(given, 'INT64'), 'INT64'))]", text)  # fmt: skip
    assert json.loads(found[0]) == [-(2**63), 2**63 - 1, 1, 2]
    assert np.frombuffer(bytes(found[1]), np.int64).tolist() == [-(2**63), 2**63 - 1, 1, 2]


@pytest.mark.parametrize(
    ("text", "datatype", "problem"),
    [("300", "UINT8", "from 0 to 255"), ("-1", "UINT64", "from 0 to"), ("1.5", "INT32", "a whole number"),
     ("x", "FP32", "a number, got 'x'"), ("maybe", "BOOL", "true or false"), ("0x10", "INT8", "a whole number")],
)  # fmt: skip
def test_what_is_no_value_is_refused(folder: Path, text: str, datatype: str, problem: str) -> None:
    tried = "(() => { try { return m.parseValues(given[0], given[1]); } catch (error) { return error.message; } })()"
    found = run(folder, "tensors.js", tried, [text, datatype])
    assert isinstance(found, str) and problem in found


def test_bodies_have_the_form_of_the_protocol(folder: Path) -> None:
    made = "(() => { const t = given.map(g => ({...g, values: m.parseValues(g.text, g.datatype)})); const made = m.body(t, {id: 'a\"b', parameters: {p: 1}, binary: %s}); return [Array.from(made.body), made.jsonBytes]; })()"
    given = [
        {"name": "A", "datatype": "BYTES", "shape": [2], "text": "one\ntwo é"},
        {"name": "B", "datatype": "INT16", "shape": [1, 2], "text": "1, -2"},
    ]
    data, length = run(folder, "tensors.js", made % "false", given)
    document = json.loads(bytes(data))
    assert length is None and document["id"] == 'a"b' and document["parameters"] == {"p": 1}
    assert document["inputs"] == [
        {"name": "A", "shape": [2], "datatype": "BYTES", "data": ["one", "two é"]},
        {"name": "B", "shape": [1, 2], "datatype": "INT16", "data": [1, -2]},
    ]
    data, length = run(folder, "tensors.js", made % "true", given)
    document = json.loads(bytes(data[:length]))
    sizes = [tensor["parameters"]["binary_data_size"] for tensor in document["inputs"]]
    assert bytes(data[length:]) == b"\3\0\0\0one\6\0\0\0two \xc3\xa9" + np.array([1, -2], np.int16).tobytes()
    assert sizes == [17, 4]


def test_images_become_tensors(folder: Path) -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    rgb = pixels[:, :, :3]
    for layout, expected in (("HWC", rgb), ("CHW", rgb.transpose(2, 0, 1))):
        expression = (
            f"m.pixels(given, 3, 2, {{layout: '{layout}', channels: 3, scale: 255, datatype: 'FP32'}})"
        )
        found = run(folder, "tensors.js", expression, pixels.ravel().tolist())
        assert np.allclose(np.array(found).reshape(expected.shape), expected / 255)
    shapes = "given.map(s => m.imageShape(s))"
    found = run(
        folder, "tensors.js", shapes, [[1, 3, 224, 224], [-1, 480, 640, 3], [1, 16], [28, 28], [3, -1, -1]]
    )
    assert [image and (image["layout"], image["channels"], image["height"], image["width"]) for image in found] == [
        ("CHW", 3, 224, 224), ("HWC", 3, 480, 640), None, ("HWC", 1, 28, 28), ("CHW", 3, 224, 224)]  # fmt: skip


@pytest.mark.slow
def test_figures_of_an_interval(folder: Path) -> None:
    def stat(success: int, histogram: list[list[int]], sizes: dict[str, int]) -> dict[str, Any]:
        counts = {"count": success, "ns": 0}
        stages = ("request", "queue", "compute_input", "compute_infer", "compute_output")
        return {
            "inference_stats": {"success": counts, "fail": {"count": 1, "ns": 0}},
            "execution_count": success // 2, "inference_count": success,
            "histograms": {stage: histogram for stage in stages},
            "batches": {"full": {"count": sum(sizes.values()), "size_sum": 0, "sizes": sizes}},
        }  # fmt: skip

    old = stat(10, [[100, 10]], {"2": 5})
    new = stat(30, [[100, 15], [200, 14], [300, 1]], {"2": 5, "4": 5})
    found = run(folder, "figures.js", "m.interval(given[0], given[1], 2)", [old, new])
    assert (found["requests"], found["failures"], found["batch"]) == (10, 0, 2)
    assert found["histograms"]["request"] == [[100, 5], [200, 14], [300, 1]]
    assert (found["closings"], found["sizes"]) == ({"full": 5}, {"4": 5})
    reloaded = run(folder, "figures.js", "m.interval(given[0], given[1], 2)", [new, old])
    assert reloaded["requests"] == 0 and reloaded["histograms"]["request"] == []
    shares = run(folder, "figures.js", "[0, 0.25, 0.26, 0.95, 1].map(s => m.percentile(given, s))", [[100, 5], [200, 14], [300, 1]])  # fmt: skip
    assert shares == [100, 100, 200, 200, 300]
    assert run(folder, "figures.js", "m.percentile([], 0.5)") is None
    assert run(folder, "figures.js", "m.apart([[1, 2], [2, 5]])") == [[1, 2], [2, 3]]


def test_durations_are_those_of_top(folder: Path) -> None:
    values = [1_000, 1_240, 9_940, 12_300, 870_000, 1_200_000, 35_000_000, 2_100_000_000]
    found = run(folder, "figures.js", "given.map(m.duration)", values)
    assert [text.replace(" ", "").replace("µ", "u") for text in found] == [top_duration(ns) for ns in values]
    assert run(folder, "figures.js", "[0, 740, null, 3e11, 1e13].map(m.duration)") == [
        "0 ns",
        "740 ns",
        "–",
        "5 min",
        "2.8 h",
    ]


def test_texts_for_shells_and_python_are_quoted(folder: Path) -> None:
    hostile = "a'b\"; $(rm -rf x) `id` \\ \n {} </script>"
    quoted, literal = run(folder, "snippets.js", "[m.quoted(given), m.literal(given)]", hostile)
    assert (
        subprocess.run(["sh", "-c", f"printf %s {quoted}"], capture_output=True, text=True).stdout == hostile
    )
    scope: dict[str, Any] = {}
    exec(f"value = {literal}", scope)
    assert scope["value"] == hostile


def test_javascript_keeps_values_and_texts_exact(folder: Path) -> None:
    hostile = "a'b\"; `${process.exit(3)}` \\ \u2028 </script>"
    tensors = [{"name": hostile, "datatype": "BYTES", "shape": [1], "values": [hostile]}]
    options = {"id": hostile, "parameters": {hostile: hostile}, "headers": [], "token": False}
    large = [{"name": "A", "datatype": "INT64", "shape": [2], "values": None}]
    expression = (
        "[m.javascript('http://h', '/p', given[0], given[1]), m.javascript('http://h', '/p', "
        "[{...given[2][0], values: [9007199254740993n, -1n]}], {...given[1], parameters: {sequence_id: 18446744073709551611n}})]"
    )
    programs = run(folder, "snippets.js", expression, [tensors, options, large])
    sent = []
    for program in programs:
        asked = "globalThis.fetch = async (url, o) => (console.log(o.body), {ok: true, json: async () => ({outputs: []})});\n"
        assert NODE is not None
        done = subprocess.run(
            [NODE, "--input-type=module", "-e", asked + program], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        sent.append(json.loads(done.stdout))
    assert sent[0]["id"] == hostile and sent[0]["parameters"] == {hostile: hostile}
    assert sent[0]["inputs"][0] == {"name": hostile, "datatype": "BYTES", "shape": [1], "data": [hostile]}
    assert sent[1]["inputs"][0]["data"] == [9007199254740993, -1]
    assert sent[1]["parameters"] == {"sequence_id": 18446744073709551611}


def test_front_ends(folder: Path) -> None:
    """Differences of rows of the same process; nothing of one that has just begun."""

    def row(number: int, pid: int, requests: int, cpu: float, counts: list[int]) -> dict[str, Any]:
        lag = {"cumulative": [[10, counts[0]], [20, counts[1]]]}
        return {"number": number, "pid": pid, "requests": requests, "cpu_seconds": cpu, "loop_lag": lag}

    given = {
        "before": [row(0, 7, 10, 1.0, [3, 4]), row(1, 8, 50, 9.0, [1, 1])],
        "now": [row(0, 7, 30, 2.0, [4, 9]), row(1, 9, 5, 0.5, [2, 2])],
    }
    found = run(folder, "figures.js", "m.frontEnds(given.before, given.now, 2)", given)
    assert [(each["number"], each["rate"], each["cores"], each["lag99"]) for each in found] == [
        (0, 10, 0.5, 20),
        (1, None, None, None),
    ]
    assert [each["rate"] for each in run(folder, "figures.js", "m.frontEnds(null, given.now, 0)", given)] == [
        None,
        None,
    ]


def test_a_time_axis_has_few_round_marks(folder: Path) -> None:
    """At least a minute is shown; the last mark is now."""

    def marks(seconds: int) -> list[str]:
        times = [1_000_000_000_000 + 1000 * second for second in range(seconds + 1)]
        found = run(folder, "figures.js", "m.ticks(...m.span(given)).map(t => t.label)", times)
        assert isinstance(found, list)
        return found

    assert marks(3) == marks(60) == ["−45 s", "−30 s", "−15 s", "now"]
    assert marks(239) == ["−3 min", "−2 min", "−1 min", "now"]
    assert marks(600) == ["−8 min", "−6 min", "−4 min", "−2 min", "now"]
    assert run(folder, "figures.js", "m.ticks(...m.span([]))").pop()["label"] == "now"
    assert run(folder, "figures.js", "[0, 12, 16, 99].map(t => m.nearest([5, 10, 20], t))") == [0, 1, 2, 2]
    assert run(folder, "figures.js", "[m.ago(5, 900), m.ago(0, 90e3), m.ago(9e3, 0)]") == ["just now", "90 s ago", "just now"]  # fmt: skip


CONFIGS = [
    'name: "m" backend: "python" max_batch_size: 8 input [ { name: "A\\"" data_type: TYPE_FP32 dims: [ -1, 4 ] } ] '
    'output [ { name: "B" data_type: TYPE_STRING dims: [ 1 ] } ] dynamic_batching { } '
    'parameters { key: "a b" value { string_value: "x\\ny" } } parameters { key: "z" value { string_value: "1" } } '
    "instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0, 1 ] } ] version_policy { specific { versions: [ 1, 3 ] } }",
    'name: "s" backend: "sequence" input [ { name: "I" data_type: TYPE_INT32 dims: [ 1 ] } ] '
    'output [ { name: "O" data_type: TYPE_INT32 dims: [ 1 ] } ] '
    'sequence_batching { max_sequence_idle_microseconds: 5000000 direct { } control_input [ { name: "START" control [ { '
    "kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ] }",
    'name: "e" platform: "ensemble" input [ { name: "I" data_type: TYPE_INT32 dims: [ 1 ] } ] '
    'output [ { name: "O" data_type: TYPE_INT32 dims: [ 1 ] } ] ensemble_scheduling { step [ { model_name: "s" '
    'model_version: -1 input_map { key: "I" value: "I" } output_map { key: "O" value: "O" } } ] }',
    'name: "w" backend: "identity" max_batch_size: 2 input [ { name: "I" data_type: TYPE_INT32 dims: [ 1 ] } ] '
    'output [ { name: "O" data_type: TYPE_INT32 dims: [ 1 ] } ] model_warmup [ { name: "one" batch_size: 1 inputs { '
    'key: "I" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } } ] dynamic_batching { '
    "max_queue_delay_microseconds: 100 priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 1 value { "
    "max_queue_size: 4 timeout_action: DELAY } } }",
]


@pytest.mark.parametrize("text", CONFIGS, ids=["parameters", "sequence", "ensemble", "warm-up"])
def test_a_configuration_is_copied_as_text_that_means_the_same(folder: Path, text: str) -> None:
    wanted = text_format.Parse(text, model_config.new_config())
    raw = json_format.MessageToDict(wanted, preserving_proto_field_name=True)
    written = run(folder, "config.js", "m.pbtxt(given)", {**raw, "defaulted": [["name"]]})
    assert text_format.Parse(written, model_config.new_config()) == wanted, written
    zeros = json_format.MessageToDict(
        wanted, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    again = run(folder, "config.js", "m.pbtxt(given)", zeros)
    assert text_format.Parse(again, model_config.new_config()) == wanted, again


def test_fp32_is_shown_as_it_was_meant(folder: Path) -> None:
    values = [0.1, 1e-45, 3.4028235e38, -2.5, 16777216.0, 1 / 3, 123456.79, 0.0]
    singles = [float(np.float32(value)) for value in values]
    shown = run(folder, "figures.js", "given.map(m.single)", singles)
    assert [float(np.float32(text)) for text in shown] == singles
    assert shown[0] == "0.1" and shown[5] == "0.33333334" and max(map(len, shown)) <= 14


def test_the_steps_of_an_ensemble_stand_behind_what_they_wait_for(folder: Path) -> None:
    def step(name: str, needs: list[str], makes: list[str]) -> dict[str, Any]:
        maps = {"input_map": {f"I{i}": need for i, need in enumerate(needs)}, "output_map": {f"O{i}": made for i, made in enumerate(makes)}}  # fmt: skip
        return {"model_name": name, "model_version": "-1", **maps}

    config = {
        "input": [{"name": "A"}, {"name": "B"}],
        "output": [{"name": "Z"}, {"name": "M"}],
        "ensemble_scheduling": {
            "step": [step("last", ["L", "R"], ["Z"]), step("first", ["A", "B"], ["M"]), step("left", ["M"], ["L"]), step("right", ["M", "B"], ["R", "unused"])],
        },
    }  # fmt: skip
    found = run(folder, "ensemble.js", "m.layout(given)", config)
    assert [(n["kind"], n["name"], n["column"], n["row"]) for n in found["nodes"]] == [
        ("inputs", "request", 0, 0),
        ("step", "last", 3, 0),
        ("step", "first", 1, 0),
        ("step", "left", 2, 0),
        ("step", "right", 2, 1),
        ("outputs", "answer", 4, 0),
    ]
    edges = {(e["from"], e["to"]): e["tensors"] for e in found["edges"]}
    assert edges == {(3, 1): ["L"], (4, 1): ["R"], (0, 2): ["A", "B"], (2, 3): ["M"], (2, 4): ["M"], (0, 4): ["B"], (1, 5): ["Z"], (2, 5): ["M"]}  # fmt: skip
    assert (found["columns"], found["rows"]) == (5, 2)
    bare = run(folder, "ensemble.js", "m.layout({})")
    assert [node["column"] for node in bare["nodes"]] == [0, 1]
    old = [{"model_name": "a", "count": 2, "failed": 0, "max_ns": 9, "histogram": [[5, 2]]}]
    new = [{"model_name": "a", "count": 4, "failed": 1, "max_ns": 80, "histogram": [[5, 2], [70, 2]]}]
    (row,) = run(folder, "ensemble.js", "m.times(given[0], given[1])", [new, old])
    assert (row["p50"], row["all50"], row["all99"], row["max"], row["failed"]) == (70, 5, 70, 80, 1)
    (reloaded,) = run(folder, "ensemble.js", "m.times(given[0], given[1])", [old, new])
    assert reloaded["p50"] is None and reloaded["all50"] == 5


def test_a_model_that_fails_most_requests_is_failing(folder: Path) -> None:
    def said(failed: int, answered: int, failures: float, requests: float) -> bool:
        stat = {"inference_stats": {"fail": {"count": str(failed)}, "success": {"count": answered}}}
        return bool(
            run(
                folder,
                "figures.js",
                "m.failing(...given)",
                [stat, {"failures": failures, "requests": requests}],
            )
        )

    assert said(3, 1, 0, 0) and not said(1, 3, 0, 0) and not said(0, 0, 0, 0)
    assert said(3, 100, 2, 1), "most of the last interval"
    assert not said(100, 3, 1, 2), "it has recovered"


def test_what_is_said_of_models_on_demand(folder: Path) -> None:
    def row(name: str, state: str, **more: int) -> dict[str, Any]:
        counts = dict.fromkeys(("waiting", "hits", "misses", "loads", "load_failures", "put_away"), 0)
        return {"name": name, "state": state, **counts, **more}

    models = [
        row("a", "loaded", hits=199, misses=1, loads=2, put_away=1),
        row("b", "put away"),
        row("c", "loading", waiting=3),
        row("d", "loading", waiting=5),
        row("e", "failed", load_failures=2),
    ]
    given = {
        "models": models,
        "states": {"on demand": 90, "failed": 1, "loaded": 1},
        "held_bytes": 3 << 29,
        "budget_bytes": 2 << 30,
    }
    found = dict(run(folder, "demand.js", "m.summary(given)", given))
    assert found == {
        "Models": "1 failed, 1 loaded, 90 on demand", "Memory": "1.5 GiB of 2.0 GiB (75 %)", "Hits": "199 (99 %)",
        "Misses": "1", "Waiting": "8 requests", "Loads": "2, 2 failed", "Put away": "1 time",
    }  # fmt: skip
    assert [each["name"] for each in run(folder, "demand.js", "m.ordered(given)", models)] == [
        "e",
        "d",
        "c",
        "a",
        "b",
    ]
    bare = dict(run(folder, "demand.js", "m.summary(given)", {**given, "models": [], "budget_bytes": 0}))
    assert (bare["Memory"], bare["Hits"], bare["Loads"]) == ("no budget", "0", "0")
    grown = dict(run(folder, "demand.js", "m.summary(given)", {**given, "server_bytes": 1 << 28}))
    assert grown["Memory"] == "1.5 GiB and the server's 256 MiB of 2.0 GiB (88 %)"
    rows = [
        {"state": "UNAVAILABLE", "reason": "on demand"},
        {"state": "UNAVAILABLE", "reason": "put away: room for model 'x'"},
        {"state": "UNAVAILABLE", "reason": "Internal: on demand"},
        {"state": "UNAVAILABLE"},
        {"state": "READY", "reason": "on demand"},
    ]
    assert run(folder, "demand.js", "given.map(m.resting)", rows) == ["on demand", "put away", "", "", ""]
