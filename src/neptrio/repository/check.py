"""A dry run: everything that is wrong with the models of a repository, without serving them.

The problem: a load stops at the first thing that is wrong, and a model that runs well today may be replaced by one
that does not load. The choice: the steps of a load are taken one by one, each reports everything it finds, and
the next works with what was right.

Rules:
 1. Nothing is run or loaded: no model code, no session, no compiler, no weights. What only these could find is
    not found (docs/model-repository.md lists it).
 2. An error is what the server would refuse; a warning is what it would accept but was probably not meant.
 3. A problem is reported once, at its cause: a field that could not be read is not also reported as missing, and
    an ensemble only says that a model of its steps has errors, not which.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from neptrio import datatypes
from neptrio.backends import registry
from neptrio.config import (
    config_problems,
    defaults,
    labels,
    openai,
    sequence_config,
    validate_config,
    version_labels,
)
from neptrio.config import model_config as model_config
from neptrio.config.config_problems import Lost
from neptrio.config.misplaced import hints, pointers
from neptrio.config.model_config import ConfigSource
from neptrio.config.no_effect import fields_without_effect
from neptrio.config.problem import ERROR, WARNING, Problem
from neptrio.errors import InvalidArgument, TritonError, Unavailable
from neptrio.execution.backend import Backend, LoadContext
from neptrio.execution.model_host import ModelHost
from neptrio.foreign import summary
from neptrio.repository import scan
from neptrio.repository.model_names import numbers
from neptrio.repository.repositories import Repositories
from neptrio.scheduling import ensemble_graph
from neptrio.scheduling.policy import batching_policy
from neptrio.settings import Settings

NO_GPU = "no GPUs are available"


log = logging.getLogger("neptrio.repository")


@dataclass
class Checked:
    """The problems and facts found about one model."""

    name: str
    folder: Path | None = None
    problems: list[Problem] = field(default_factory=list)
    source: ConfigSource | None = None
    versions: list[int] = field(default_factory=list)  # the ones that would be served, ascending
    configs: dict[int, Any] = field(default_factory=dict)  # version -> its completed configuration
    complete: bool = True  # False when inputs or outputs can be known only by running the model

    @property
    def ok(self) -> bool:
        """True when there is no error; there may be warnings."""
        return all(problem.severity != ERROR for problem in self.problems)

    @property
    def config(self) -> Any:
        """The highest version's configuration, None when no version has one."""
        return self.configs[max(self.configs)] if self.configs else None

    def report(self, problem: Problem) -> None:
        """Notes a problem, unless it was noted before."""
        if problem not in self.problems:
            self.problems.append(problem)

    def as_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "name": self.name,
            "ok": self.ok,
            "versions": [str(version) for version in self.versions],
            "problems": [problem.as_dict() for problem in self.problems],
        }


class Checker:
    """Checks the models of some repositories, each at most once. Used on one thread.

    `serving` holds the configurations that run now: an ensemble is checked against those, as its load would be.
    `here`: the models are to run on this machine, so missing GPUs are errors.
    """

    def __init__(
        self,
        settings: Settings,
        serving: Mapping[str, Mapping[int, Any]] | None = None,
        here: bool = True,
        repositories: Repositories | None = None,
    ) -> None:
        self._settings = settings
        self._serving = serving or {}
        self._here = here
        self._repositories = repositories or Repositories(settings)
        self._folders = self._repositories.model_dirs()
        self._done: dict[str, Checked] = {}
        self._under_way: list[str] = []

    def all(self) -> list[Checked]:
        """Every model, sorted by name. A folder without anything that makes it a model is one with errors."""
        return [self.model(name) for name in self._folders]

    @property
    def names(self) -> Sequence[str]:
        """The names of the models."""
        return list(self._folders)

    def model(self, name: str) -> Checked:
        """One model of the repositories. A name that no folder has is a model with an error."""
        checked = self._done.get(name)
        if checked is None:
            checked = Checked(name)
            folders = self._folders.get(name, [])
            if len(folders) > 1:
                places = ", ".join(str(folder) for folder in folders)
                checked.report(Problem(f"{scan.DUPLICATE}: {places}", str(folders[0])))
            elif not folders:
                checked.report(Problem(f"model '{name}' is in no repository{self._nearest(name)}"))
            self._under_way.append(name)
            try:
                for folder in folders[:1]:
                    self._folder(checked, folder)
            except Exception as error:  # whatever a folder holds, the others are still checked
                log.debug("checking '%s' failed", name, exc_info=True)
                text = f"its check failed, which is a fault of neptrio: {summary(error)}"
                checked.report(Problem(text, str(folders[0])))
            finally:
                self._under_way.pop()
            self._done[name] = checked
        return checked

    def given(self, name: str, folder: Path | None, config: str | None) -> Checked:
        """A model as a load call would bring it: with another folder, another configuration, or both."""
        checked = Checked(name)
        if folder is None and len(self._folders.get(name, [])) == 1:
            folder = self._folders[name][0]
        if folder is None:
            return self.model(name)
        self._under_way.append(name)
        try:
            if config is None:
                self._folder(checked, folder)
            else:
                where = "load parameter 'config'"
                self._source(checked, folder, config_problems.parse(config, where, checked.report))
        finally:
            self._under_way.pop()
        return checked

    def _nearest(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._folders, 1, 0.5)
        return f", did you mean '{near[0]}'?" if near else ""

    # ------------------------------------------------------------ one model

    def _folder(self, checked: Checked, folder: Path) -> None:
        try:
            self._repositories.localise(folder)
            for link in scan.leading_out(folder, self._repositories.roots):
                checked.report(Problem(scan.link_text(link), str(link)))
            source = config_problems.read(folder, self._settings.model_config_name, checked.report)
            _layout(checked, folder, "" if source is None else source.config.default_model_filename)
            if source is not None and self._repositories.named_by_flag(folder):
                source.config.name = checked.name
            self._source(checked, folder, source)
        except OSError as error:
            checked.report(Problem(f"cannot be read: {error.strerror}", str(error.filename or folder)))
        except Unavailable as error:
            checked.report(Problem(str(error)))

    def _source(self, checked: Checked, folder: Path, source: ConfigSource | None) -> None:
        checked.folder, checked.source = folder, source
        if source is None:
            return
        lost = config_problems.Lost(checked.problems)
        auto_complete = not self._settings.disable_auto_complete_config
        # defaults.identify() raises one error at a time: for the name, then for the backend
        for _ in range(2):
            try:
                defaults.identify(source, checked.name, folder, auto_complete)
                break
            except InvalidArgument as error:
                problem = _placed(source, str(error))
                if problem.field not in lost:
                    checked.report(problem)
                source.config.name = checked.name
        self._versions(checked, folder, source)
        backend: type[Backend] | None = None
        try:
            if source.config.backend or defaults.is_ensemble(source.config):
                folders = [*(folder / str(version) for version in reversed(checked.versions)), folder]
                backend = registry.find_for(source.config, self._settings, folders)
        except TritonError as error:
            checked.report(source.problem(defaults.asking(source), str(error)))
        else:
            try:
                if backend is not None:
                    registry.check_runtime(source.config, backend)
            except InvalidArgument as error:
                checked.report(source.problem(("runtime",), str(error)))
        for version in checked.versions or ([0] if backend is not None else []):
            self._version(checked, version, source, backend, lost)

    def _versions(self, checked: Checked, folder: Path, source: ConfigSource) -> None:
        there = scan.versions(folder)
        checked.versions = scan.wanted(source.config, there)
        if not there:
            text = f"model '{checked.name}' has no version folder (a folder named 1, 2, ...)"
            checked.report(Problem(text, str(folder)))
        elif not checked.versions:
            text = f"no version is left by the version policy; there are {', '.join(map(str, there))}"
            checked.report(source.problem(("version_policy",), text))
        for i, version in enumerate(source.config.version_policy.specific.versions):
            if version not in there and checked.versions:
                at = ("version_policy", "specific", "versions", i)
                checked.report(source.problem(at, f"there is no folder of version {version}", WARNING))
        for label, version in self._labels(source).items():
            if version not in checked.versions:
                text = (
                    f"version label '{label}' names version {version}, which is not there: it has "
                    f"{numbers(checked.versions)}"
                )
                checked.report(source.problem(("parameters",), text))

    @staticmethod
    def _labels(source: ConfigSource) -> dict[str, int]:
        try:
            return version_labels.labels(source.config)
        except InvalidArgument:  # another check says so
            return {}

    def _version(
        self, checked: Checked, version: int, source: ConfigSource, backend: Any, lost: Lost
    ) -> None:
        """Checks one version; 0 stands for a model without versions, so that its configuration is still checked."""
        assert checked.folder is not None
        own = model_config.new_config()
        own.CopyFrom(source.config)
        name, folder = checked.name, checked.folder
        context = LoadContext(
            name, version, folder, folder / str(version), own, self._settings, cast(ModelHost, None)
        )

        def tell(error: Exception | str) -> None:
            checked.report(
                _at_its_tensor(source, version, _placed(source, str(error), str(context.version_dir)))
            )

        named = validate_config.files(source, own, folder)
        files_told = bool(named)
        for problem in named:
            checked.report(problem)
        if backend is not None and version and not named and not self._settings.disable_auto_complete_config:
            try:
                checked.complete = backend.complete_from_files(context) and checked.complete
            except TritonError as error:
                files_told = True
                checked.complete = False
                tell(error)
        defaults.fill(own, backend)
        found = [p for p in validate_config.problems(source, own, folder) if p.field not in lost]
        for problem in found:
            checked.report(self._weighed(problem))
        for at, text in fields_without_effect(own):
            checked.report(source.problem(at, text, WARNING))
        self._contents(checked, source, own)
        if version:
            checked.configs[version] = own
        if defaults.is_ensemble(own):
            self._ensemble(checked, source, own)
            return
        if found or lost:
            return  # later checks would report the same in other words
        try:
            if own.WhichOneof("scheduling_choice") == "sequence_batching":
                sequence_config.parse(own, folder)
            batching_policy(own)
            openai.mapping(own, folder)
            if backend is not None and version and not files_told:
                backend.examine(context, tell)
        except TritonError as error:
            tell(error)

    def _weighed(self, problem: Problem) -> Problem:
        if self._here or NO_GPU not in problem.message:
            return problem
        text = problem.message.replace(NO_GPU, f"{NO_GPU} on this machine")
        return Problem(text, problem.file, problem.line, problem.field, WARNING)

    # ------------------------------------------------------------ files that a configuration names

    def _contents(self, checked: Checked, source: ConfigSource, config: Any) -> None:
        assert checked.folder is not None
        for i, output in enumerate(config.output):
            label = output.label_filename
            if label and validate_config.inside(label) and os.path.isfile(checked.folder / label):
                at = ("output", i, "label_filename")
                try:
                    found = labels.read_file(checked.folder / output.label_filename, output.name)
                except InvalidArgument as error:
                    checked.report(source.problem(at, str(error)))
                    continue
                if len(output.dims) == 1 and output.dims[0] > 0 and len(found) != output.dims[0]:
                    text = f"{len(found)} labels for the {output.dims[0]} elements of output '{output.name}'"
                    checked.report(source.problem(at, text, WARNING))
        inputs = {tensor.name: tensor for tensor in config.input}
        for i, sample in enumerate(config.model_warmup):
            missing = [n for n, t in inputs.items() if not t.optional and n not in sample.inputs]
            if sample.batch_size and missing:
                text = f"warm-up sample '{sample.name}' gives no data for {', '.join(missing)}"
                checked.report(source.problem(("model_warmup", i), text))
            for name, data in sorted(sample.inputs.items()):
                if name in inputs and not _fits(data.dims, inputs[name].dims):
                    text = f"warm-up input '{name}' has dims {list(data.dims)}, its input {list(inputs[name].dims)}"
                    checked.report(source.problem(("model_warmup", i, "inputs"), text))
                message = _sample_problem(checked.folder, name, data)
                if message:
                    checked.report(source.problem(("model_warmup", i, "inputs"), message))

    # ------------------------------------------------------------ ensembles

    def _ensemble(self, checked: Checked, source: ConfigSource, config: Any) -> None:
        index = -1

        def report(path: Sequence[str | int], message: str) -> None:
            checked.report(source.problem(tuple(path), message))

        def lookup(name: str, version: str) -> Any:
            nonlocal index
            index += 1
            at = (*ensemble_graph.STEP, index)
            if not name:
                report(at, "every step must name a model: model_name")
                return None
            if name in self._under_way:
                circle = " -> ".join([*self._under_way[self._under_way.index(name) :], name])
                report((*at, "model_name"), f"ensembles contain each other: {circle}")
                return None
            if name in self._serving:
                configs = self._serving[name]
            elif name not in self._folders:
                report((*at, "model_name"), f"model '{name}' is in no repository{self._nearest(name)}")
                return None
            else:
                child = self.model(name)
                if not child.ok:
                    report((*at, "model_name"), f"model '{name}' has errors of its own")
                configs = child.configs
                if not child.complete:
                    return None
            number = int(version) if version else max(configs, default=0)
            if number not in configs:
                if configs:
                    there = ", ".join(map(str, sorted(configs)))
                    text = f"model '{name}' does not serve version {number}, but {there}"
                    report((*at, "model_version"), text)
                return None
            return _Child(configs[number])

        graph = ensemble_graph.examine(config, lookup, report)
        if graph is not None:
            config.model_transaction_policy.decoupled = graph.decoupled


_TENSOR = re.compile(r"\b(input|output) '([^']+)'")


@dataclass(frozen=True)
class _Child:
    config: Any


def _placed(source: ConfigSource, text: str, place: str = "") -> Problem:
    """An error whose text may begin with its place, FILE:LINE: FIELD."""
    text = text.rstrip("\n")
    for prefix in (source.path, place):
        if prefix and text.startswith(prefix):
            path, colon, rest = text[len(prefix) :].partition(": ")
            if not colon:
                break
            file, _, line = (prefix + path).rpartition(":")
            if not line.isdigit():
                file, line = prefix + path, "0"
            name, colon, message = rest.partition(": ")
            if prefix == source.path and colon and " " not in name:
                return Problem(message, file, int(line), name)
            return Problem(rest, file, int(line))
    return Problem(text, place or source.path)


def _at_its_tensor(source: ConfigSource, version: int, problem: Problem) -> Problem:
    """A problem with a version's files that names a tensor, placed at the line that configures this tensor."""
    named = None if problem.line else _TENSOR.search(problem.message)
    if named is None:
        return problem
    kind, name = named.groups()
    for i, tensor in enumerate(getattr(source.config, kind)):
        if tensor.name == name:
            return source.problem((kind, i, "name"), f"version {version}: {problem.message}")
    return problem


def _layout(checked: Checked, folder: Path, filename: str) -> None:
    """Reports names in a model's folder that are probably misspelt. `filename`: the configuration's default_model_filename."""
    names = {entry.name: entry for entry in folder.iterdir()}
    if "config.pbtxt" in names and "config.json" in names:
        text = "config.pbtxt counts, config.json beside it does not"
        checked.report(Problem(text, str(names["config.json"]), severity=WARNING))
    for hint in hints(folder, filename):
        checked.report(Problem(hint, str(folder), severity=WARNING))
    for name, entry in sorted(names.items()):
        if name.isdigit() and not name.startswith("0") and (pointer := pointers(entry)):
            checked.report(Problem(pointer, str(folder), severity=WARNING))


def _fits(given: Sequence[int], declared: Sequence[int]) -> bool:
    return len(given) == len(declared) and all(d in (-1, g) for g, d in zip(given, declared, strict=True))


def _sample_problem(folder: Path, name: str, data: Any) -> str:
    """What is wrong with the data of a warm-up input, "" when nothing is."""
    kind = data.WhichOneof("input_data_type")
    if kind is None:
        return f"warm-up input '{name}' needs one of zero_data, random_data and input_data_file"
    path = folder / "warmup" / data.input_data_file
    if (
        kind != "input_data_file"
        or not validate_config.inside(data.input_data_file)
        or not os.path.isfile(path)
    ):
        return ""
    size = path.stat().st_size
    count = math.prod(data.dims)
    if data.data_type == datatypes.BYTES:
        return _strings_problem(path, name, count)
    expected = datatypes.ITEM_SIZE.get(data.data_type, 0) * count
    if data.data_type and expected >= 0 and size != expected:
        return (
            f"warm-up input '{name}' needs {expected} bytes for its dims, '{data.input_data_file}' has {size}"
        )
    return ""


def _strings_problem(path: Path, name: str, count: int) -> str:
    raw = path.read_bytes()
    at = found = 0
    while at + 4 <= len(raw):
        at += 4 + int.from_bytes(raw[at : at + 4], "little")
        found += 1
    if at != len(raw):
        return f"warm-up input '{name}': '{path.name}' is no list of strings with a 4-byte length each"
    if found != count:
        return f"warm-up input '{name}' needs {count} strings for its dims, '{path.name}' has {found}"
    return ""
