"""Compares what a load has found in a model's folder with what is served from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from neptrio.config import defaults, version_labels
from neptrio.repository import scan
from neptrio.repository.model import Model
from neptrio.repository.model_builder import Found
from neptrio.repository.records import Record


def unchanged(record: Record, found: Found) -> bool:
    """True when every wanted version is served from the files as they are, and none is broken for good."""
    return (
        record.folder is None
        and record.place == found.place
        and not any(model.lost for model in record.serving.values())
        and set(record.serving) == set(found.versions) != set()
        and (record.fingerprint == found.fingerprint or _same_content(record, found))
    )


def _same_content(record: Record, found: Found) -> bool:
    """True when at most the text of the configuration has changed (a comment, say) and not what it says, but for labels of
    versions and aliases, which no model needs to be made anew for."""
    return (
        record.source is not None
        and _but_names(record.source.config) == _but_names(found.source.config)
        and _files(record.fingerprint) == _files(found.fingerprint)
    )


def same_but_instances(record: Record, found: Found) -> bool:
    """True when the new configuration differs from the served one at most in instance groups, labels and aliases."""
    if record.source is None or _elsewhere(record, found):
        return False
    before, after = (_but_names(s.config, "instance_group") for s in (record.source, found.source))
    return before == after and _files(record.fingerprint) == _files(found.fingerprint)


def going_on(record: Record, found: Found) -> dict[int, Model]:
    """The served versions that need no new model, because only instance groups, the choice of versions, their labels or the
    model's aliases changed.

    None when configuration and versions are unchanged: then something else has changed, or a reload was asked
    for. The configuration may be given as its owner wrote it, or as the server completed it and showed it.
    """
    config = found.source.config
    if record.source is None or _elsewhere(record, found):
        return {}
    if defaults.is_ensemble(config):
        return {}
    if set(record.serving) == set(found.versions) and _without(record.source.config) == _without(config):
        return {}
    as_written = _but_names(config, *CHANGED_IN_PLACE)
    written = as_written == _but_names(record.source.config, *CHANGED_IN_PLACE)
    same = {
        version: model
        for version, model in record.serving.items()
        if version in found.versions
        and not model.lost
        and (written or as_written == _but_names(model.config, *CHANGED_IN_PLACE))
    }
    if _files_of(record.fingerprint, same) != _files_of(found.fingerprint, same):
        return {}
    return same


def _elsewhere(record: Record, found: Found) -> bool:
    """True when what is served is not from the folder that was found."""
    return found.folder is not None or record.folder is not None or record.place != found.place


CHANGED_IN_PLACE = ("instance_group", "version_policy")


def _without(config: Any, *fields: str) -> bytes:
    plain = type(config)()
    plain.CopyFrom(config)
    for field in fields:
        plain.ClearField(field)
    return bytes(plain.SerializeToString(deterministic=True))


def _but_names(config: Any, *fields: str) -> bytes:
    """_without() these fields, the labels of versions and the aliases."""
    plain = type(config)()
    plain.CopyFrom(config)
    version_labels.take_over(plain, type(config)())
    return _without(plain, *fields)


def _files_of(state: scan.Fingerprint | None, versions: Iterable[int]) -> dict[str, tuple[int, int]]:
    """The part of the folder's state that these versions can see."""
    folders = {str(version) for version in versions}
    return {
        name: value
        for name, value in _files(state).items()
        if not (head := name.partition("/")[0]).isdigit() or head in folders
    }


def _files(state: scan.Fingerprint | None) -> dict[str, tuple[int, int]]:
    """The folder's state without the configuration files."""
    return {
        name: value
        for name, value in (state or {}).items()
        if name not in ("config.pbtxt", "config.json") and not name.startswith("configs/")
    }
