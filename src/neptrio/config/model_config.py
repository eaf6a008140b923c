"""Reading a model's configuration: config.pbtxt, config.json or configs/NAME.pbtxt.

The text form is parsed by protobuf's own text parser, the JSON form by its JSON parser. Errors name file
and line, what was expected and the nearest valid name. config/defaults.py fills in what is left open,
config/validate_config.py checks the result, config/describe_config.py shows it to clients.
Source: docs/protocol/features.md A4, docs/protocol/observed.md 2.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format

from neptrio import datatypes
from neptrio.codec.descriptors import message_class, pool
from neptrio.config import lenient_json, locate
from neptrio.config.problem import ERROR, Problem
from neptrio.errors import InvalidArgument
from neptrio.request.infer_request import InputSpec


@dataclass(frozen=True)
class ConfigSource:
    """A parsed configuration and the file it came from. `path` is "" when there was no file."""

    config: Any  # inference.ModelConfig
    path: str = ""
    text: str = ""

    @cached_property
    def _lines(self) -> dict[locate.Path, int]:
        if self.text.lstrip()[:1] == "{":
            try:
                return locate.lines_of_json(self.text)
            except (ValueError, LookupError):  # it is no JSON by the letter (lenient_json)
                return {}
        return locate.lines_of_text(self.text)

    def problem(self, path: locate.Path, message: str, severity: str = ERROR) -> Problem:
        """A Problem with the field at `path`, such as ("input", 1, "dims"): it names file, line and field."""
        return Problem(message, self.path, locate.line_of(self._lines, path), field_name(path), severity)

    def where(self, path: locate.Path) -> str:
        """`FILE:LINE: FIELD` of the field at `path`."""
        found = self.problem(path, "")
        place = f"{found.file}:{found.line}: " if found.line else f"{found.file}: " if found.file else ""
        return f"{place}{found.field}"


def field_name(path: locate.Path) -> str:
    """A field path as text: `input[1].dims` for ("input", 1, "dims")."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", ".".join(str(part) for part in path))


def new_config() -> Any:
    """An empty inference.ModelConfig."""
    return message_class("inference.ModelConfig")()


def parse_text(text: str, where: str) -> Any:
    """The inference.ModelConfig of a config.pbtxt's text. Raises InvalidArgument naming file and line."""
    config = new_config()
    try:
        try:
            text_format.Parse(text, config)
        except text_format.ParseError:
            joined = signs_joined(text)
            if joined == text:
                raise
            config = new_config()
            text_format.Parse(joined, config)
    except text_format.ParseError as error:
        line = error.GetLine()
        place = f"{where}:{line}" if line else where
        raise InvalidArgument(f"{place}: {explain(str(error))}") from None
    except RecursionError:
        raise InvalidArgument(f"{where}: messages are nested too deeply") from None
    return config


_SIGN = re.compile(r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\#[^\n]*)|-(\s+)(?=[\d.])""")


def signs_joined(text: str) -> str:
    """`- 1` as `-1`, which protobuf's parser in Python wants; lines stay where they are."""
    return _SIGN.sub(lambda m: m[1] if m[1] is not None else "\n" * m[2].count("\n") + "-", text)


def parse_json(text: str | bytes, where: str) -> Any:
    """The inference.ModelConfig of a JSON document. Raises InvalidArgument with the parser's reason."""
    config = new_config()
    try:
        plain = text.decode() if isinstance(text, bytes) else text
        if plain.lstrip()[:1] not in ("{", ""):
            raise ValueError("expected an object")
        with contextlib.suppress(json.JSONDecodeError):  # json_format reports the error below
            check_unicode(json.loads(plain))
        try:
            json_format.Parse(plain, config)
        except json_format.ParseError:
            return _parse_leniently(plain)
    except lenient_json.Refused as error:
        raise InvalidArgument(f"{where}:{error.line}: {error}") from None
    except json_format.ParseError as error:
        message = str(error)
        at = re.search(r"line (\d+) column", message)
        unknown = _named_in(message)
        line = int(at[1]) if at else _line_with(plain, unknown) if unknown else 0
        raise InvalidArgument(
            f"{where}:{line}: {explain(message)}" if line else f"{where}: {explain(message)}"
        ) from None
    except (UnicodeDecodeError, RecursionError, ValueError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{where}: not a model configuration in JSON: {error}") from None
    return config


def _parse_leniently(text: str) -> Any:
    """What the strict parser has refused. Raises its ParseError, or Refused."""
    config = new_config()
    document = lenient_json.parse(text, config.DESCRIPTOR)
    check_unicode(document)
    json_format.ParseDict(document, config)
    return config


def check_unicode(document: Any) -> None:
    """Raises ValueError when a name or value is not valid Unicode: protobuf strings cannot hold such text."""
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 20) : error.end]
        raise ValueError(f"a name or a value is not valid Unicode: {near!r}") from None


def _line_with(text: str, word: str) -> int:
    """The first line of a JSON document that contains `word`, 0 if none does."""
    match = re.search(re.escape(json.dumps(word)), text)
    return text.count("\n", 0, match.start()) + 1 if match else 0


# what a model's metadata calls a field that has another name in its configuration; published examples mix them up
_OF_METADATA = {"inputs": "input", "outputs": "output", "datatype": "data_type", "shape": "dims"}
_NO_FIELD = re.compile(r'type "([\w.]+)" has no field named "([^"]+)"')
_NO_VALUE = re.compile(r'Enum type "([\w.]+)" has no value named (\S+?)\.?$')
_NO_JSON_VALUE = re.compile(r"Invalid enum value (\S+) for enum type ([\w.]+)")
_TWICE = re.compile(r'type "([\w.]+)" should not have multiple "([^"]+)" fields')


def _named_in(message: str) -> str:
    found = _NO_FIELD.search(message)
    if found:
        return found[2]
    found = _NO_JSON_VALUE.search(message)
    return found[1] if found else ""


def explain(message: str) -> str:
    """A protobuf parser's error message in a user's words, with the nearest valid name."""
    if found := _NO_FIELD.search(message):
        names = [f.name for f in pool().FindMessageTypeByName(found[1]).fields]
        if _OF_METADATA.get(found[2]) in names:
            return (
                f"unknown field '{found[2]}' of {_short(found[1])}, did you mean '{_OF_METADATA[found[2]]}'? A model's metadata "
                "has inputs, outputs, datatype (FP32) and shape; its configuration has input, output, data_type "
                "(TYPE_FP32) and dims"
            )
        return f"unknown field '{found[2]}' of {_short(found[1])}{_nearest(found[2], names)}"
    if found := _NO_VALUE.search(message):
        return _bad_value(found[2], found[1])
    if found := _NO_JSON_VALUE.search(message):
        return _bad_value(found[1], found[2])
    if found := _TWICE.search(message):
        return f"field '{found[2]}' of {_short(found[1])} is given twice"
    text = re.sub(r"^\d+:\d+ : ", "", message.splitlines()[0])
    text = re.sub(r"^'.*': ", "", text)
    return f"{text} JSON belongs in config.json" if text.endswith("number, got {.") else text


def _bad_value(value: str, enum: str) -> str:
    names = [v.name for v in pool().FindEnumTypeByName(enum).values]
    meant = datatypes.CONFIG_NAME.get(datatypes.meant_by(value))
    if meant in names:
        return f"'{value}' is no {_short(enum)}, did you mean '{meant}'?"
    return f"'{value}' is no {_short(enum)}{_nearest(value, names)}"


def _short(full_name: str) -> str:
    return full_name.removeprefix("inference.")


def _nearest(word: str, names: list[str]) -> str:
    near = difflib.get_close_matches(word, names, 1, 0.5)
    return f", did you mean '{near[0]}'?" if near else f", expected one of {', '.join(names)}"


def read(model_dir: Path, config_name: str = "") -> ConfigSource:
    """The configuration in a model's folder; an empty one when there is no file.

    With `config_name` (--model-config-name) configs/NAME.pbtxt is preferred.
    """
    path = file_of(model_dir, config_name)
    if path is None:
        return ConfigSource(new_config())
    text = read_text(path)
    parse = parse_json if path.suffix == ".json" else parse_text
    return ConfigSource(parse(text, str(path)), str(path), text)


def file_of(model_dir: Path, config_name: str = "") -> Path | None:
    """The path of the configuration file that is read, None when the folder has none."""
    return next((path for name in candidates(config_name) if (path := model_dir / name).is_file()), None)


def candidates(config_name: str = "") -> tuple[str, ...]:
    """The files in a model's folder of which the first that is there is read."""
    found = ("config.pbtxt", "config.json")
    return (f"configs/{config_name}.pbtxt", *found) if config_name else found


def read_text(path: Path) -> str:
    """A configuration file's text. Raises InvalidArgument when it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: cannot be read: {error}") from None


def input_specs(config: Any) -> list[InputSpec]:
    """The model's inputs in the form that requests are validated against."""
    return [
        InputSpec(i.name, i.data_type, tuple(i.dims), i.optional, i.allow_ragged_batch) for i in config.input
    ]
