"""Which fields of a completed configuration the server has filled in: those that nobody has written."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

Path = list[str | int]


def defaulted(written: Any, completed: Any) -> list[Path]:
    """Paths into the config endpoint's JSON, such as ["input", 0, "dims"], of what `completed` has and `written` has
    not, or has otherwise. Both are inference.ModelConfig messages. A path covers everything below it. Tensors and
    other things with names are the same where their names are, whatever their order.
    """
    found: list[Path] = []
    _compare(written, completed, [], found)
    return found


def _compare(written: Any, completed: Any, at: Path, found: list[Path]) -> None:
    given = {field.name: value for field, value in written.ListFields()}
    for field, value in completed.ListFields():
        path: Path = [*at, field.name]
        if field.name not in given:
            found.append(path)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            before = given[field.name]
            found += [[*path, str(key)] for key in value if key not in before or before[key] != value[key]]
        elif field.message_type is None:
            if given[field.name] != value:
                found.append(path)
        elif isinstance(value, Message):
            _compare(given[field.name], value, path, found)
        else:
            _compare_items(list(given[field.name]), list(value), path, found)


def _compare_items(written: list[Any], completed: list[Any], at: Path, found: list[Path]) -> None:
    names = {item.name: item for item in written if getattr(item, "name", "")}
    for index, item in enumerate(completed):
        own = names.get(getattr(item, "name", "")) or (written[index] if index < len(written) else None)
        if own is None:
            found.append([*at, index])
        else:
            _compare(own, item, [*at, index], found)
