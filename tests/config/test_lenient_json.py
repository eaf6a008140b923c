"""Configurations as protobuf's parser in C++ takes them, which Triton servers use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio.config import model_config
from neptrio.config.describe_config import to_dict
from neptrio.errors import InvalidArgument
from tests.support.embedded import EmbeddedServer
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

STRICT = {
    "backend": "identity",
    "max_batch_size": 4,
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [2]}],
    "parameters": {"a": {"string_value": "one"}, "b": {"string_value": "it's"}},
    "dynamic_batching": {"preserve_ordering": True, "max_queue_delay_microseconds": 5},
}
TENSOR = '{"name": "%s", "data_type": "TYPE_FP32", "dims": [2]}'
REST = f"""
"backend": "identity", "max_batch_size": 4, "input": [{TENSOR % "X"}], "output": [{TENSOR % "Y"}],
"parameters": {{"a": {{"string_value": "one"}}, "b": {{"string_value": "it's"}}}},
"dynamic_batching": {{"preserve_ordering": true, "max_queue_delay_microseconds": 5}}
"""
FORMS = {
    "one value for a list": REST.replace(f"[{TENSOR % 'X'}]", TENSOR % "X").replace("[2]", "2"),
    "keys without quotes": REST.replace('"max_batch_size"', "max_batch_size").replace('"dims"', "dims"),
    "single quotes": REST.replace('"it\'s"', '"it\\u0027s"').replace('"', "'"),
    "an escaped single quote": REST.replace('"it\'s"', "'it\\'s'"),
    "trailing commas": REST.replace("]", ",]").replace("}", ",}") + ",",
    "lower-case enumerations": REST.replace("TYPE_FP32", "type_fp32"),
    "a quoted bool": REST.replace("true", '"true"'),
    "a member that is replaced": '"max_batch_size": 1,' + REST,
    "a list that is given in parts": REST.replace("[2]", "[]").replace('"dims": []', '"dims": [], "dims": 2'),
    "a message that is given in parts": REST.replace('"preserve_ordering": true, ', "")
    + ', "dynamic_batching": {preserve_ordering: true}, "dynamicBatching": {}',
    "a map that is given in parts": REST.replace('"a": {"string_value": "one"}, ', "")
    + ', "parameters": {"a": {string_value: "one"}}',
}


def test_many_keys_of_a_map_are_read_one_by_one() -> None:
    """And not all of them for each of them, which would take the time of their square."""
    keys = ",".join(f"k{i}: {{string_value: '{i}'}}" for i in range(20_000))
    found = model_config.parse_json(f"{{backend: 'identity', parameters: {{{keys}}}, }}", "here")
    assert {key: one.string_value for key, one in found.parameters.items()} == {
        f"k{i}": f"{i}" for i in range(20_000)
    }


@pytest.mark.parametrize("form", FORMS)
def test_it_is_read_as_what_it_means(form: str) -> None:
    text = "{" + FORMS[form] + "}"
    assert to_dict(model_config.parse_json(text, "here")) == to_dict(
        model_config.parse_json(json.dumps(STRICT), "here")
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{backend: 'a' input: []}", r"here:1: expected ',' or '}', got 'input: \[\]}'"),
        ("{\nbackend: }", "here:2: expected a value, got '}'"),
        ("{\nbackend 'a'}", "here:2: expected ':' behind the key 'backend', got "),
        ("{'a': 'b}", "here:1: expected a text that ends with ', got "),
        ("{backend: 'a'", "here:1: expected ',' or '}', got the end"),
        ("{backend: 'a',, }", "here:1: expected a key or '}', got ',, }'|got ', }'"),
        ("{backend: 'a'} x", "here:1: expected the end, got 'x'"),
        ("{input: {dims: [1,,2]}}", r"here:1: expected a value, got ',2\]}}'"),
        ("{backnd: 'a'}", "unknown field 'backnd' of ModelConfig, did you mean 'backend'"),
        ("{input: {data_type: type_fp33}}", "expected a value, got 'type_fp33}}'"),
        ("{input: {data_type: 'type_fp33'}}", "'type_fp33' is no DataType"),
        ("{max_batch_size: '" + "9" * 30 + "'}", "max_batch_size"),
        ("[" * 200, "expected an object"),
        ("{a:" * 200, "at most 100 objects in each other"),
    ],
)
def test_what_is_no_configuration_says_where_and_what(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        model_config.parse_json(text, "here")


def test_a_sign_may_stand_apart_in_text_format() -> None:
    text = """# a comment - 1
name: "a - 1" input { name: 'X' data_type: TYPE_FP32 dims: [ - 1, -
2 ] }
"""
    config = model_config.parse_text(text, "here")
    assert config.name == "a - 1" and list(config.input[0].dims) == [-1, -2]
    with pytest.raises(InvalidArgument, match="here:4: unknown field 'nonsense'"):
        model_config.parse_text(text + "nonsense: 1", "here")


# ---------------------------------------------------------------- served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    write_model(repository, "m", identity_config())
    with ServerProcess(repository, "--model-control-mode=explicit") as process:
        yield process


def loaded(server: ServerProcess, config: str) -> Any:
    with httpclient.InferenceServerClient(server.http) as client:
        client.load_model("m", config=config)
        return client.get_model_config("m")


def test_a_load_call_takes_it(server: ServerProcess) -> None:
    tensor = "data_type: 'type_int32', dims: -1,"
    config = f"{{backend: 'identity', max_batch_size: 2, input: {{name: 'X', {tensor}}}, output: {{name: 'Y', {tensor}}},}}"
    found = loaded(server, config)
    assert found["max_batch_size"] == 2 and found["input"][0]["dims"] == [-1]
    with pytest.raises(
        InferenceServerException, match="load parameter 'config':1: expected a value, got '}'"
    ):
        loaded(server, "{backend: }")


@pytest.mark.parametrize("mode", ["explicit", "poll"])
def test_a_comment_reloads_nothing(tmp_path: Path, mode: str) -> None:
    folder = write_model(tmp_path, "m", identity_config())
    options: dict[str, Any] = {"model_control_mode": mode, "repository_poll_secs": 3600.0}
    if mode == "explicit":
        options["load_model"] = ("m",)
    with EmbeddedServer(tmp_path, **options) as server:
        manager = server.server.repository

        def renewed(text: str) -> Any:
            (folder / "config.pbtxt").write_text(text)
            if mode == "poll":
                server.run(manager.poll_once)
            else:
                server.run(manager.load, "m", {})
            return manager.latest["m"]

        before = manager.latest["m"]
        assert renewed("# for the reader\n" + identity_config()) is before
        assert renewed("# for the reader\n" + identity_config(extra='parameters { key: "a" }')) is not before
        assert renewed(identity_config()) is not before
