"""Checks one model of a running server: would a load succeed, and what would it change?

Nothing that serves is changed. The served configurations are collected on the trio thread; files are read, and
configurations are compared, on a thread of the check's own, so a check of large folders or configurations delays
nobody. Checks take turns: threads that run Python at the same time would take the interpreter's lock from the loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import trio

from neptrio.codec.http_json import dump_json
from neptrio.config import defaults
from neptrio.config.describe_config import to_dict
from neptrio.config.problem import WARNING, Problem
from neptrio.errors import NotFound, Unavailable
from neptrio.limits import shown
from neptrio.loop import threads
from neptrio.repository import change, override, scan
from neptrio.repository.catalog import Catalog
from neptrio.repository.check import Checked, Checker
from neptrio.repository.model import Model
from neptrio.repository.model_builder import Found
from neptrio.repository.override import LoadParameters
from neptrio.repository.records import Record
from neptrio.scheduling import ensemble_graph
from neptrio.settings import Settings

Serving = Mapping[str, Mapping[int, Any]]  # model -> version -> its running configuration


async def dry_run(
    settings: Settings, catalog: Catalog, name: str, parameters: LoadParameters, turns: trio.CapacityLimiter
) -> bytes:
    """The answer of the verb `check` as JSON: problems, what a load with these parameters would do, and the
    differences.

    `turns` is held while a thread works. Raises NotFound for a name that is no model's, InvalidArgument for broken parameters.
    """
    serving = {
        name: {version: model.config for version, model in record.serving.items()}
        for name, record in catalog.records.items()
        if record.serving
    }

    def look() -> tuple[Checked, scan.Fingerprint | None]:
        catalog.repositories.refresh()
        others = {n: v for n, v in serving.items() if n != name}
        checker = Checker(settings, others, repositories=catalog.repositories)
        folder = None
        files = override.decode(parameters.files)
        if name not in checker.names and not files:
            raise NotFound(f"Request for unknown model: '{shown(name)}' is not found")
        try:
            if files:
                folder = override.write(files)
            checked = checker.given(name, folder.path if folder else None, parameters.config)
            if files and parameters.config is None:
                checked.report(Problem("files were given without the parameter 'config'"))
            _above(checked, serving)
            state = None
            if checked.folder is not None:
                try:
                    state = catalog.repositories.state(checked.folder)
                except (OSError, Unavailable):
                    pass
            return checked, state
        finally:
            if folder is not None:
                folder.release()

    checked, state = await threads.run(look, abandon_on_cancel=True, limiter=turns)
    record = catalog.records.get(name)
    running = catalog.latest.get(name)

    def compare() -> bytes:
        return dump_json(_answer(checked, state, parameters, record, running))

    return await threads.run(compare, abandon_on_cancel=True, limiter=turns)


def _answer(
    checked: Checked,
    state: scan.Fingerprint | None,
    parameters: LoadParameters,
    record: Record | None,
    running: Model | None,
) -> dict[str, Any]:
    answer = checked.as_dict()
    answer["load_would"] = _action(record, checked, state, parameters)
    if record is not None and running is not None and checked.source is not None:
        answer["running_version"] = running.version
        if checked.config is not None and checked.complete:
            answer["compared"] = "complete configurations"
            before, after = running.config, checked.config
        else:
            answer["compared"] = "configurations as written"
            before = record.source.config if record.source is not None else running.config
            after = checked.source.config
        answer["changes"] = list(differences(to_dict(before), to_dict(after)))
    return answer


def _above(checked: Checked, serving: Serving) -> None:
    """Reports served ensembles that would not fit the new version of this model."""
    config = checked.config
    if config is None or not checked.complete or not checked.ok:
        return
    own = {checked.name: checked.configs}

    class Child:
        def __init__(self, config: Any) -> None:
            self.config = config

    def lookup(name: str, version: str) -> Any:
        configs = own.get(name) or serving.get(name, {})
        number = int(version) if version else max(configs, default=0)
        return Child(configs[number]) if number in configs else None

    for name, versions in sorted(serving.items()):
        for ensemble in versions.values():
            if not defaults.is_ensemble(ensemble) or checked.name not in ensemble_graph.child_names(ensemble):
                continue

            def report(path: Any, message: str, name: str = name) -> None:
                text = f"the ensemble '{name}', which serves, would not load again: {message}"
                checked.report(Problem(text, severity=WARNING))

            ensemble_graph.examine(ensemble, lookup, report)


def _action(
    record: Record | None, checked: Checked, state: scan.Fingerprint | None, parameters: LoadParameters
) -> str:
    if not checked.ok or checked.folder is None or checked.source is None:
        return "fail"
    if record is None or not record.serving:
        return "load"
    found = Found(checked.folder, checked.source, state or {}, checked.versions)
    if not parameters.overrides and change.unchanged(record, found):
        return "nothing"
    if not parameters.files and change.going_on(record, found):
        return "update"  # changed in place, no version is loaded again
    return "reload"


def differences(before: Any, after: Any, path: str = "") -> Iterator[dict[str, Any]]:
    """Yields the differences between two configurations, field by field, as JSON objects."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            yield from differences(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif (
        isinstance(before, list)
        and isinstance(after, list)
        and len(before) == len(after)
        and all(isinstance(item, dict) for item in (*before, *after))
    ):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, f"{path}[{i}]")
    elif before != after:
        yield {"field": path, "running": before, "checked": after}
