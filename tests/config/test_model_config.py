"""Reading configurations: what is refused, and how the message helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from neptrio.config import locate
from neptrio.config import model_config as config
from neptrio.config.model_config import ConfigSource
from neptrio.errors import InvalidArgument
from tests.support.repository import write_model


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "max_batch: 3",
            "m.pbtxt:1: unknown field 'max_batch' of ModelConfig, did you mean 'max_batch_size'?",
        ),
        ("\n\ninput { nmae: 'x' }", "m.pbtxt:3: unknown field 'nmae' of ModelInput, did you mean 'name'?"),
        (
            "\ninput { data_type: TYPE_INT31 }",
            "m.pbtxt:2: 'TYPE_INT31' is no DataType, did you mean 'TYPE_INT32'?",
        ),
        ("input { data_type: TYPE_BYTES }", "'TYPE_BYTES' is no DataType, did you mean 'TYPE_STRING'?"),
        ("input { data_type: FLOAT }", "'FLOAT' is no DataType, did you mean 'TYPE_FP32'?"),
        (
            '{"backend": "python"}',
            "m.pbtxt:1: Expected identifier or number, got {. JSON belongs in config.json",
        ),
        (
            "instance_group { kind: KIND_CPUU }",
            "m.pbtxt:1: 'KIND_CPUU' is no ModelInstanceGroup.Kind, did you mean 'KIND_CPU'?",
        ),
        ("xyzzyxyzzy: 1", "expected one of name, platform, backend"),
        ("max_batch_size: 'x'", "m.pbtxt:1: Couldn't parse integer"),
        ("name: 'a'\nname: 'b'", "m.pbtxt:2: field 'name' of ModelConfig is given twice"),
        ("input {\n name: 'a'\n", "m.pbtxt:"),
        ("max_batch_size: 99999999999", "m.pbtxt:1: Value out of range: 99999999999"),
    ],
)
def test_text_errors_name_the_line_and_the_nearest_name(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as info:
        config.parse_text(text, "m.pbtxt")
    assert message in str(info.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{\n "max_batch": 3}',
            "m.json:2: unknown field 'max_batch' of ModelConfig, did you mean 'max_batch_size'?",
        ),
        (
            '{"input": [\n{"data_type": "TYPE_INT31"}]}',
            "m.json:2: 'TYPE_INT31' is no DataType, did you mean 'TYPE_INT32'",
        ),
        ('{"input": [{"data_type": "BYTES"}]}', "'BYTES' is no DataType, did you mean 'TYPE_STRING'?"),
        ('{\n"a"', "m.json:2: "),
        ("[]", "m.json: not a model configuration in JSON"),
        ("[" * 100_000, "m.json: "),
        (b"\xff", "m.json: not a model configuration in JSON"),
    ],
)
def test_json_errors(text: str | bytes, message: str) -> None:
    with pytest.raises(InvalidArgument) as info:
        config.parse_json(text, "m.json")
    assert message in str(info.value)


def test_which_file_is_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m", "max_batch_size: 1", {"configs/big.pbtxt": "max_batch_size: 64"})
    (folder / "config.json").write_text('{"maxBatchSize": 2}')
    assert config.read(folder).config.max_batch_size == 1
    assert config.read(folder, "big").config.max_batch_size == 64
    assert config.read(folder, "absent").config.max_batch_size == 1
    (folder / "config.pbtxt").unlink()
    assert config.read(folder).config.max_batch_size == 2
    (folder / "config.json").unlink()
    assert config.read(folder).config == config.new_config()


TEXT = """name: "m"  # a comment with { and [
input [
  {
    name: "A" dims: [ 1,
      -2 ]
  },
  { name: 'B' "b"; dims: 3 }
]
dynamic_batching <
  preferred_batch_size: [ 4, 9 ]
>
parameters { key: "k" value: { string_value: "}" } }
version_policy: { specific { versions: [1, 0] } }
"""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("name",), 1),
        (("input", 0), 3),
        (("input", 0, "dims", 1), 5),
        (("input", 1, "name"), 7),
        (("input", 1, "dims", 0), 7),
        (("dynamic_batching", "preferred_batch_size", 1), 10),
        (("version_policy", "specific", "versions", 1), 13),
        (("input", 0, "absent"), 3),
        (("absent",), 0),
    ],
)
def test_lines_of_fields(path: locate.Path, line: int) -> None:
    config.parse_text(TEXT, "m")
    assert locate.line_of(locate.lines_of_text(TEXT), path) == line


def test_where() -> None:
    source = ConfigSource(config.parse_text(TEXT, "m"), "m/config.pbtxt", TEXT)
    assert source.where(("input", 0, "dims", 1)) == "m/config.pbtxt:5: input[0].dims[1]"
    json = ConfigSource(config.new_config(), "m/config.json", '{\n"input": [\n{"dims": [0]}]}')
    assert json.where(("input", 0, "dims", 0)) == "m/config.json:3: input[0].dims[0]"
    assert ConfigSource(config.new_config()).where(("backend",)) == "backend"
