"""The inheritance table of trace settings against a slow independent model of it, and its texts."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest

from neptrio.errors import InvalidArgument, Unsupported
from neptrio.observe.trace_options import TraceOptions, span_options, start_values
from neptrio.observe.trace_settings import (
    DEFAULTS,
    FIELDS,
    Scope,
    TraceTable,
    check_file,
    parse_changes,
    reply,
)
from neptrio.settings import Settings

START = {**DEFAULTS, "trace_file": "/t/start", "trace_count": 7}
CHOICES: dict[str, tuple[Any, ...]] = {
    "trace_level": ((), ("TIMESTAMPS",), ("TENSORS",), ("TIMESTAMPS", "TENSORS")),
    "trace_rate": (0, 1, 5),
    "trace_count": (-1, 0, 3),
    "log_frequency": (0, 2),
    "trace_file": ("/t/a", "/t/b"),
    "trace_tail": (0, 500),
}


class SlowTable:
    """Keeps layers of plain values and looks every field up each time it is asked."""

    def __init__(self, start: dict[str, Any]) -> None:
        self.start = start
        self.layers: dict[str, dict[str, Any]] = {"": {}}
        self.inherited_count: dict[str, int] = {"": start["trace_count"]}  # of scopes without their own

    def effective(self, model: str, layers: Any = None, counts: Any = None) -> dict[str, Any]:
        layers = self.layers if layers is None else layers
        counts = self.inherited_count if counts is None else counts
        found = {}
        for field in FIELDS:
            chain = [layers.get(model, {}), layers[""], self.start]
            found[field] = next(layer[field] for layer in chain if field in layer)
        scope = model if model in layers else ""
        if "trace_count" not in layers[scope]:
            found["trace_count"] = counts[scope]
        return found

    def update(self, model: str, changes: dict[str, Any]) -> None:
        layers = {name: dict(layer) for name, layer in self.layers.items()}
        counts = dict(self.inherited_count)
        layer = layers.setdefault(model, {})
        for field, value in changes.items():
            layer.pop(field, None)
            if value is not None:
                layer[field] = value
        if model and not layer:
            del layers[model]
            counts.pop(model, None)
        if not model:
            counts[""] = self.start["trace_count"]
        above = layers[""].get("trace_count", counts[""])
        for name in layers:
            if name and (name == model or not model):
                counts[name] = above
        touched = [model] if model else list(layers)
        for name in touched:
            if name and name not in layers:
                continue
            values = self.effective(name, layers, counts)
            given = changes.get("trace_count") is not None and name == model
            if values["trace_level"] and (
                values["trace_rate"] == 0 or (given and values["trace_count"] == 0)
            ):
                raise ValueError(name)
        self.layers, self.inherited_count = layers, counts

    def take(self, model: str) -> None:
        """A trace is taken in the scope of `model`."""
        scope = model if model in self.layers else ""
        where = self.layers[scope] if "trace_count" in self.layers[scope] else self.inherited_count
        key = "trace_count" if where is self.layers[scope] else scope
        if where[key] > 0:
            where[key] -= 1


def compare(table: TraceTable, slow: SlowTable) -> None:
    for model in ("", "a", "b"):
        assert table.scope(model).values() == slow.effective(model)
    assert set(table.models) == {name for name in slow.layers if name}


def step(table: TraceTable, slow: SlowTable, model: str, changes: dict[str, Any]) -> None:
    before = {m: table.scope(m) for m in ("", "a", "b")}
    try:
        slow.update(model, changes)
    except ValueError:
        with pytest.raises(InvalidArgument, match="Attempting to set invalid trace setting :"):
            table.update(changes, model)
        assert before == {m: table.scope(m) for m in before}  # nothing has changed
    else:
        table.update(changes, model)
    compare(table, slow)


def test_every_pair_of_single_field_updates() -> None:
    single = [
        (model, {field: value})
        for model in ("", "a")
        for field, values in CHOICES.items()
        for value in (None, *values)
    ]
    for first, second in itertools.product(single, repeat=2):
        table, slow = TraceTable(START), SlowTable(START)
        step(table, slow, *first)
        step(table, slow, *second)


@pytest.mark.parametrize("seed", range(40))
def test_random_updates_and_traces(seed: int) -> None:
    dice = random.Random(seed)
    table, slow = TraceTable(START), SlowTable(START)
    for _ in range(150):
        if dice.random() < 0.3:
            model = dice.choice(("", "a", "b"))
            scope = table.scope(model)
            if scope.level and scope.left and scope.rate:
                while not scope.sample():
                    pass
                assert scope.keep(True)
                slow.take(model)
            compare(table, slow)
            continue
        fields = dice.sample(FIELDS, dice.randint(0, 6))
        changes = {f: dice.choice((None, *CHOICES[f])) for f in fields}
        step(table, slow, dice.choice(("", "a", "b")), changes)


def scope(**values: Any) -> Scope:
    return Scope({}, {**DEFAULTS, "trace_level": ("TIMESTAMPS",), "trace_file": "x", **values})


def test_the_rate_th_request_is_traced() -> None:
    made = scope(trace_rate=3)
    assert [made.sample() for _ in range(7)] == [False, False, True, False, False, True, False]


def test_count_runs_down_to_zero_and_stops() -> None:
    made = scope(trace_rate=2, trace_count=2)
    assert [made.sample() for _ in range(8)].count(True) == 2
    assert made.left == 0 and made.seen == 0  # nothing is counted when no trace is left


def test_off_counts_nothing() -> None:
    made = scope(trace_level=(), trace_rate=1)
    assert not made.sample() and made.seen == 0


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("trace_rate", "abc", "Unable to parse 'trace_rate', got: abc"),
        ("trace_rate", "5x", "Unable to parse 'trace_rate', got: 5x"),
        ("trace_rate", "4294967296",
         "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 4294967296"),
        ("log_frequency", "-1",
         "Unable to parse 'log_frequency', value is out of range [ 0, 4294967295 ], got: -1"),
        ("trace_count", "9" * 40,
         f"Unable to parse 'trace_count', value is out of range [ -1, 2147483647 ], got: {'9' * 40}"),
        ("trace_level", ["OFF", "TIMESTAMPS"], "Expect only one trace level 'OFF' is specified"),
        ("trace_level", ["OFF", "OFF"], "Expect only one trace level 'OFF' is specified"),
    ],
)  # fmt: skip
def test_texts(protocol: str, key: str, text: Any, message: str) -> None:
    value = text if protocol == "http" or isinstance(text, list) else [text]
    with pytest.raises(InvalidArgument) as info:
        parse_changes({key: value}, protocol)
    assert str(info.value) == message


def test_texts_of_one_protocol() -> None:
    for given, protocol, message in (
        ({"trace_count": "-2"}, "http", "Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
        ({"trace_count": ["-2"]}, "grpc", "Unable to parse 'trace_count'. Expecting value >= -1, got: -2"),
        ({"trace_rate": ["1", "2"]}, "grpc", "expect only 1 value for 'trace_rate'"),
        (
            {"trace_rate": 5},
            "http",
            "Unable to parse 'trace_rate': attempt to access JSON non-string as string, got: 5",
        ),
        (
            {"trace_file": ["a"]},
            "http",
            "Unable to parse 'trace_file': attempt to access JSON non-string as string, got: [\"a\"]",
        ),
        (
            {"trace_level": "OFF"},
            "http",
            "Unable to parse 'trace_level': attempt to access JSON non-array as array, got: \"OFF\"",
        ),
        (
            {"trace_level": ["TENSORS", True]},
            "http",
            "Unable to parse 'trace_level': attempt to access JSON non-string as string, got: true",
        ),
    ):
        with pytest.raises(InvalidArgument) as info:
            parse_changes(given, protocol)
        assert str(info.value) == message


def test_what_clears_and_what_is_ignored() -> None:
    assert parse_changes({"trace_rate": None}, "http") == {"trace_rate": None}
    for value, protocol in (("", "http"), ([], "http"), ([""], "grpc")):
        with pytest.raises(InvalidArgument, match="Unable to parse 'trace_rate'"):
            parse_changes({"trace_rate": value}, protocol)
    assert parse_changes({"trace_level": []}, "http") == {}
    assert parse_changes({"trace_file": []}, "grpc") == {"trace_file": None}
    assert parse_changes({"trace_level": []}, "grpc") == {"trace_level": None}
    assert parse_changes({"trace_level": ["FOO"], "trace_mode": "x", "other": 1}, "http") == {}
    given = {"trace_level": ["TENSORS", "TIMESTAMPS", "TENSORS"]}
    assert parse_changes(given, "http") == {"trace_level": ("TIMESTAMPS", "TENSORS")}


def test_reply_has_the_protocols_order() -> None:
    assert list(reply(TraceTable(DEFAULTS).globals).items()) == [
        ("trace_level", ["OFF"]),
        ("trace_rate", "1000"),
        ("trace_count", "-1"),
        ("log_frequency", "0"),
        ("trace_file", ""),
        ("trace_mode", "triton"),
    ]


def test_tracing_needs_no_file() -> None:
    made = TraceTable({**DEFAULTS, "trace_level": ("TIMESTAMPS",), "trace_rate": 1})
    assert made.globals.sample() and not made.globals.to_file
    Settings(trace_config=("level=TIMESTAMPS", "rate=1"))


def test_a_relative_trace_file_is_relative_to_the_directory(tmp_path: Path) -> None:
    check_file("t.json", str(tmp_path), True)
    check_file("t.json", str(tmp_path / "not yet"), True)
    with pytest.raises(InvalidArgument, match="is outside the trace directory"):
        check_file("../t.json", str(tmp_path), True)


def test_trace_file_stays_in_the_directory(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    folder = str(inside)
    check_file(f"{folder}/t.json", folder, True)
    for path, reason in (
        (f"{outside}/t", "is outside the trace directory"),
        (f"{folder}/../out/t", "is outside the trace directory"),
        (f"{folder}/link/t", "is outside the trace directory"),
        (folder + "x/t", "is outside the trace directory"),
        (f"{folder}/none/t", "does not exist"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            check_file(path, folder, True)
    with pytest.raises(Unsupported, match="can not be updated through network protocol"):
        check_file(f"{folder}/t", folder, False)


@pytest.mark.parametrize(
    ("content", "taken"),
    [
        (b"", True),
        (b"[\n]\n", True),
        (b'[\n{"model_name":"m"', True),
        (b'[{"id":1,"timestamps":[', True),
        (b"[1, 2]", False),
        (b'[{"name": "m"}]', False),
        (b'backend: "identity"', False),
        (b"\x08\x07ONNX", False),
    ],
)
def test_no_other_file_is_replaced(tmp_path: Path, content: bytes, taken: bool) -> None:
    """By default the network may choose any file of the working directory."""
    path = tmp_path / "file"
    path.write_bytes(content)
    if taken:
        check_file(str(path), str(tmp_path), True)
    else:
        with pytest.raises(InvalidArgument, match="exists and is no trace file: it would be lost"):
            check_file(str(path), str(tmp_path), True)


def test_names_leave_room_for_an_index(tmp_path: Path) -> None:
    check_file(str(tmp_path / ("x" * 231)), str(tmp_path), True)
    with pytest.raises(InvalidArgument, match="may have 231 bytes"):
        check_file(str(tmp_path / ("x" * 232)), str(tmp_path), True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidArgument, match="is no trace file"):
        check_file(str(tmp_path / "pipe"), str(tmp_path), True)


def test_command_line() -> None:
    values = start_values(
        Settings(trace_config=("triton,file=/t/x", "level=TIMESTAMPS", "level=TENSORS", "rate=2",
                               "count=9", "triton,log-frequency=4", "mode=triton")).trace_options()
    )  # fmt: skip
    assert values == {
        "trace_level": ("TIMESTAMPS", "TENSORS"),
        "trace_rate": 2,
        "trace_count": 9,
        "log_frequency": 4,
        "trace_file": "/t/x",
        "trace_tail": 0,
    }
    older = Settings(
        trace_file="f", trace_level=("MAX",), trace_rate="3", trace_count="4", trace_log_frequency="5"
    )
    assert list(start_values(older.trace_options()).values()) == [("TIMESTAMPS",), 3, 4, 5, "f", 0]


def test_the_older_level_flag_may_be_repeated() -> None:
    both = start_values(Settings(trace_file="f", trace_level=("TIMESTAMPS", "TENSORS")).trace_options())
    assert both["trace_level"] == ("TIMESTAMPS", "TENSORS")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trace_config": ("mode=x",)}, "unknown mode 'x', expected triton or opentelemetry"),
        ({"trace_config": ("opentelemetry,rate=1",)}, "unknown setting 'rate' of mode opentelemetry"),
        (
            {"trace_config": ("opentelemetry,resource=x",)},
            "expected opentelemetry,resource=KEY=VALUE, got 'x'",
        ),
        (
            {"trace_config": ("opentelemetry,bsp_schedule_delay=-1",)},
            "must be a number below 1000000000, got '-1'",
        ),
        (
            {"trace_config": ("opentelemetry,bsp_max_queue_size=5x",)},
            "must be a number below 1000000000, got '5x'",
        ),
        ({"trace_config": ("tail=-5",)}, "Unable to parse 'trace_tail', value is out of range"),
        ({"trace_config": ("speed=1",)}, "unknown setting 'speed'"),
        ({"trace_config": ("level",)}, "expected MODE,KEY=VALUE"),
        ({"trace_config": ("level=LOUD",)}, "unknown trace level 'LOUD'"),
        ({"trace_config": ("rate=x",)}, "Unable to parse 'trace_rate', got: x"),
        ({"trace_config": ("rate=1",), "trace_rate": "1"}, "use only one of them"),
    ],
)
def test_refused_command_lines(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("bsp_schedule_delay=0",), (2048, 1, 512)),
        (("bsp_max_queue_size=0",), (1, 5000, 1)),
        (("bsp_max_queue_size=9",), (9, 5000, 9)),
        (("bsp_max_queue_size=9", "bsp_max_export_batch_size=10"), (9, 5000, 9)),
        (("bsp_max_export_batch_size=0",), (2048, 5000, 1)),
        (("bsp_max_queue_size=999999999",), (999999999, 5000, 512)),
    ],
)
def test_options_of_spans_at_their_edges(given: tuple[str, ...], expected: tuple[int, int, int]) -> None:
    config = ("mode=OpenTelemetry", *(f"opentelemetry,{option}" for option in given))
    made = span_options(TraceOptions(config=config))
    assert made is not None
    assert (made.max_queue_size, made.schedule_delay_ms, made.max_export_batch_size) == expected


def test_levels_in_any_case_and_what_traces_nothing() -> None:
    flags = ("level=timestamps", "level=Tensors", "rate=0", "count=0")
    values = start_values(TraceOptions(config=flags))
    assert values["trace_level"] == ("TIMESTAMPS", "TENSORS")
    assert (values["trace_rate"], values["trace_count"], values["trace_file"]) == (0, 0, "")
    assert not TraceTable(values).globals.sample()
    assert start_values(TraceOptions(level=("off",)))["trace_level"] == ()


# ------------------------------------------------------------ trace_tail


def test_with_a_tail_only_what_is_kept_counts() -> None:
    made = scope(trace_rate=1, trace_count=2, trace_tail=1000)
    kept = []
    for slow in (False, True, False, True, True):
        if made.sample():
            kept.append(made.keep(slow))
    assert kept == [False, True, False, True] and made.left == 0


def test_a_tail_keeps_no_more_than_the_count() -> None:
    made = scope(trace_rate=1, trace_count=1, trace_tail=1000)
    assert made.sample() and made.sample()  # both under way
    assert [made.keep(True), made.keep(True)] == [True, False]


def test_the_tail_shows_where_it_is_set() -> None:
    assert "trace_tail" not in reply(scope())
    assert reply(scope(trace_tail=70))["trace_tail"] == "70"
    assert parse_changes({"trace_tail": "5"}, "http") == {"trace_tail": 5}
    assert parse_changes({"trace_tail": []}, "grpc") == {"trace_tail": None}


# ------------------------------------------------------------ mode opentelemetry


def test_span_options() -> None:
    assert span_options(Settings().trace_options()) is None
    assert (
        span_options(Settings(trace_config=("opentelemetry,url=x",)).trace_options()) is None
    )  # mode triton
    plain = span_options(Settings(trace_config=("mode=opentelemetry",)).trace_options())
    assert plain is not None and plain.attributes() == {"service.name": "triton-inference-server"}
    assert plain.shown() == {
        "url": "http://localhost:4318/v1/traces",
        "bsp_schedule_delay": "5000",
        "bsp_max_export_batch_size": "512",
        "bsp_max_queue_size": "2048",
    }
    given = ("mode=opentelemetry", "opentelemetry,url=collector:4318/v1/traces",
             "opentelemetry,resource=service.name=a=b", "opentelemetry,resource=x=y",
             "opentelemetry,bsp_schedule_delay=200", "opentelemetry,bsp_max_queue_size=10",
             "opentelemetry,bsp_max_export_batch_size=5")  # fmt: skip
    made = span_options(Settings(trace_config=given).trace_options())
    assert made is not None and made.attributes() == {"service.name": "a=b", "x": "y"}
    assert made.url == "http://collector:4318/v1/traces"
    assert (made.schedule_delay_ms, made.max_queue_size, made.max_export_batch_size) == (200, 10, 5)
    assert list(reply(TraceTable(DEFAULTS, "opentelemetry").globals, made)) == [
        "trace_level", "trace_rate", "trace_count", "trace_mode", "url", "resource", "bsp_schedule_delay",
        "bsp_max_export_batch_size", "bsp_max_queue_size",
    ]  # fmt: skip


def test_spans_need_no_file_and_may_have_rate_0() -> None:
    table = TraceTable(DEFAULTS, "opentelemetry")
    table.update({"trace_level": ("TIMESTAMPS",), "trace_rate": 0})
    assert not table.globals.sample() and table.globals.seen == 0
    table.update({"trace_level": ("TENSORS",)})
    assert table.globals.level == ("TENSORS",)
    given = {"log_frequency": "x", "trace_file": "y", "trace_rate": "3"}
    assert parse_changes(given, "http", "opentelemetry") == {"trace_rate": 3}
