"""Reading a configuration for a check: everything that is wrong with it, not only the first thing.

A field that the parser refuses is left out and the rest is parsed again, so that later checks still see
the fields that are right. A text that is no configuration at all has one problem: the place where it
stops being one.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format

from neptrio.codec.descriptors import is_list
from neptrio.config import locate, text_fields
from neptrio.config import model_config as model_config
from neptrio.config.model_config import ConfigSource, explain
from neptrio.config.problem import Problem, Report
from neptrio.errors import InvalidArgument

MOST = 100  # problems of one file; nobody reads more


def read(model_dir: Path, config_name: str, report: Report) -> ConfigSource | None:
    """The configuration in a model's folder, without the fields that are wrong; None when nothing is left of it.

    Every problem is passed to `report`.
    """
    path = model_config.file_of(model_dir, config_name)
    if path is None:
        return ConfigSource(model_config.new_config())
    try:
        text = model_config.read_text(path)
    except InvalidArgument as error:
        report(Problem(str(error)))
        return None
    return parse(text, str(path), report)


def parse(text: str, where: str, report: Report) -> ConfigSource | None:
    """A configuration's text: text format when `where` ends in .pbtxt, else JSON."""
    reader = _parse_text if where.endswith(".pbtxt") else _parse_json
    config = reader(text, where, report)
    return None if config is None else ConfigSource(config, where, text)


class Lost:
    """The fields that were left out because of problems. Later checks must not also report them as missing.

    `field in lost` compares names alone where the source was text, and the whole path where it was JSON.
    """

    def __init__(self, problems: list[Problem]) -> None:
        self._fields = {p.field for p in problems if p.field}
        for problem in problems:
            meant = re.search(r"did you mean '(\w+)'", problem.message)
            if meant and problem.message.startswith("unknown field"):
                parent, dot, _ = problem.field.rpartition(".")
                self._fields.add(parent + dot + meant[1])

    def __bool__(self) -> bool:
        return bool(self._fields)

    def __contains__(self, field: str) -> bool:
        leaf = re.sub(r"\[\d+\]$", "", field.rpartition(".")[2])
        return field in self._fields or leaf in self._fields


def _parse_text(text: str, where: str, report: Report) -> Any:
    rest = model_config.signs_joined(text)
    for _ in range(MOST):
        config = model_config.new_config()
        try:
            text_format.Parse(rest, config)
            return config
        except text_format.ParseError as error:
            line, column = error.GetLine() or 0, error.GetColumn() or 0
            try:
                field = text_fields.innermost(
                    text_fields.spans(rest), text_fields.offset_of(rest, line, column)
                )
            except text_fields.Unbalanced:
                field = None
            name = re.match(r"\w*", rest[field.start :])[0] if field else ""  # type: ignore[index]
            report(Problem(explain(str(error)), where, line, name))
            if field is None:
                return None
            rest = text_fields.blanked(rest, field)
        except RecursionError:
            report(Problem("messages are nested too deeply", where))
            return None
    return None


def _parse_json(text: str, where: str, report: Report) -> Any:
    with contextlib.suppress(InvalidArgument):  # what follows finds all problems, by the letter of JSON
        return model_config.parse_json(text, where)
    try:
        document = json.loads(text)
        model_config.check_unicode(document)
    except json.JSONDecodeError as error:
        report(Problem(f"not JSON: {error.msg}, column {error.colno}", where, error.lineno))
        return None
    except (RecursionError, ValueError) as error:
        report(Problem(f"not JSON: {error}", where))
        return None
    if not isinstance(document, dict):
        report(Problem(f"expected an object, got {_kind(document)}", where, 1))
        return None
    lines = locate.lines_of_json(text)
    config = model_config.new_config()

    def wrong(path: locate.Path, message: str) -> None:
        report(Problem(message, where, locate.line_of(lines, path), model_config.field_name(path)))

    try:
        json_format.ParseDict(_right_part(document, config.DESCRIPTOR, (), wrong), config)
    except (json_format.ParseError, RecursionError, ValueError, TypeError, AttributeError) as error:
        wrong((), explain(str(error)))
        return None
    return config


def _right_part(document: dict[str, Any], descriptor: Any, path: locate.Path, wrong: Any) -> dict[str, Any]:
    """The members of a JSON object that its message type accepts; each other member is reported with `wrong()`."""
    right: dict[str, Any] = {}
    for key, value in document.items():
        name = re.sub("([A-Z])", lambda m: "_" + m[1].lower(), key)
        here = (*path, name)
        field = descriptor.fields_by_name.get(key) or descriptor.fields_by_camelcase_name.get(key)
        if field is None:
            wrong(here, explain(f'type "{descriptor.full_name}" has no field named "{key}"'))
            continue
        kind = field.message_type
        if kind is None or value is None:
            message = _refused(descriptor, key, value)
            if message:
                wrong(here, message)
            else:
                right[key] = value
        elif kind.GetOptions().map_entry:
            if not isinstance(value, dict):
                wrong(here, f"expected an object, got {_kind(value)}")
                continue
            inner = kind.fields_by_name["value"].message_type
            if inner is None:
                message = _refused(descriptor, key, value)
                if message:
                    wrong(here, message)
                else:
                    right[key] = value
                continue
            right[key] = {k: _message(v, inner, (*here, k), wrong) for k, v in value.items() if v is not None}
        elif is_list(field):
            if not isinstance(value, list):
                wrong(here, f"expected an array, got {_kind(value)}")
                continue
            right[key] = [_message(v, kind, (*here, i), wrong) for i, v in enumerate(value)]
        else:
            right[key] = _message(value, kind, here, wrong)
    return right


def _message(value: Any, descriptor: Any, path: locate.Path, wrong: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        wrong(path, f"expected an object, got {_kind(value)}")
        return {}
    return _right_part(value, descriptor, path, wrong)


def _refused(descriptor: Any, key: str, value: Any) -> str:
    """Why a field does not accept a value, "" when it does."""
    message = model_config.message_class(descriptor.full_name)()
    try:
        json_format.ParseDict({key: value}, message)
    except (json_format.ParseError, ValueError, TypeError, AttributeError) as error:
        text = re.sub(r"^Failed to parse \S+ field: ", "", str(error))
        return explain(text.rstrip("."))
    return ""


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
