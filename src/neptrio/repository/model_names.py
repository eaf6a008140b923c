"""Labels of versions and aliases of models: further names by which requests find what serves.

The problem: a client that names a version by its number has to be changed with every release, and so has one that names a
model. The choice: names that are moved instead, said by the model's configuration, set by calls, or both. They are looked at
only where a request's text is neither a number nor the name of a model, so requests without them pay nothing.

Rules:
 1. What calls have set counts before what the configuration says, and stays until it is set again, removed, or the model is
    unloaded by hand. The server keeps it in memory only.
 2. A label names a version that the model has: whoever changes labels or versions asks check() first. The model itself may
    be away (repository.demand).
 3. All names of one change change together: nothing in here waits.
 4. An alias belongs to one model. The own name of a model counts before an alias of another (Catalog.own_name).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from neptrio.config import version_labels
from neptrio.errors import InvalidArgument
from neptrio.limits import shown


@dataclass(slots=True)
class Said:
    """What is said of one model."""

    labels: dict[str, int] = field(default_factory=dict)  # by its configuration
    aliases: tuple[str, ...] = ()
    set_labels: dict[str, int] = field(default_factory=dict)  # by calls
    set_aliases: set[str] = field(default_factory=set)

    @property
    def all_labels(self) -> dict[str, int]:
        """Those that count."""
        return {**self.labels, **self.set_labels}


@dataclass(frozen=True)
class Change:
    """What a call asks for: label -> version, None to remove what was set; alias -> whether it is the model's from now on, or
    what was set is removed."""

    labels: Mapping[str, int | None] = field(default_factory=dict)
    aliases: Mapping[str, bool] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.labels or self.aliases)


def parse(document: Mapping[str, Any]) -> Change:
    """The change that a call's JSON asks for. Raises InvalidArgument."""
    for key in document:
        if key not in ("labels", "aliases"):
            raise InvalidArgument(f"unknown member '{shown(key)}', expected labels or aliases")
    labels, aliases = document.get("labels", {}), document.get("aliases", {})
    if not isinstance(labels, dict) or not isinstance(aliases, dict):
        raise InvalidArgument("expected labels as {LABEL: version} and aliases as {ALIAS: true}")
    version_labels.check_count("version labels", labels)
    version_labels.check_count("aliases", aliases)
    given: dict[str, int | None] = {}
    for label, version in labels.items():
        version_labels.check_label(label)
        if isinstance(version, str) and version.isascii() and version.isdigit() and len(version) < 20:
            version = int(version)
        right = type(version) is int and 0 < version < version_labels.HIGHEST
        if version is not None and not right:
            raise InvalidArgument(
                f"label '{label}' must be the number of a version, or null to remove it, got {shown(str(version))}"
            )
        given[label] = version
    for alias, wanted in aliases.items():
        version_labels.check_alias(alias)
        if wanted is not None and wanted is not True:
            raise InvalidArgument(
                f"alias '{alias}' must be true, or null to remove it, got {shown(str(wanted))}"
            )
    return Change(given, {alias: wanted is True for alias, wanted in aliases.items()})


def numbers(versions: Iterable[int]) -> str:
    """Versions for an error's text."""
    return ", ".join(map(str, sorted(versions))) or "none"


class Names:
    """The labels and aliases of all models. Trio thread only."""

    def __init__(self, changed: Callable[[str], object]) -> None:
        """`changed` is told each model, and each alias, of which something has changed."""
        self._changed = changed
        self._said: dict[str, Said] = {}
        self._configured: dict[
            str, str
        ] = {}  # alias -> the model whose configuration says it, the first of several
        self._set: dict[str, str] = {}  # alias -> the model for which a call has set it
        self.aliased: dict[str, str] = {}  # alias -> the model that counts

    # ------------------------------------------------------------ what is asked

    def labels(self, name: str) -> dict[str, int]:
        """The labels of a model's versions."""
        said = self._said.get(name)
        return {} if said is None else said.all_labels

    def configured(self, name: str) -> dict[str, int]:
        """The labels that the model's configuration says."""
        return (self._said.get(name) or Said()).labels

    def configured_aliases(self, name: str) -> tuple[str, ...]:
        """The aliases that the model's configuration says."""
        return (self._said.get(name) or Said()).aliases

    def label(self, name: str, label: str) -> int | None:
        """The version that a label names."""
        said = self._said.get(name)
        return None if said is None else said.set_labels.get(label) or said.labels.get(label)

    def aliases(self, name: str) -> list[str]:
        """The model's further names, sorted."""
        said = self._said.get(name) or Said()
        return sorted(
            alias for alias in {*said.aliases, *said.set_aliases} if self.aliased.get(alias) == name
        )

    def document(self, name: str) -> dict[str, Any]:
        """What is told of a model: its labels and aliases, and which of them calls have set."""
        said = self._said.get(name) or Said()
        return {
            "labels": dict(sorted(said.all_labels.items())),
            "aliases": self.aliases(name),
            "set": {"labels": sorted(said.set_labels), "aliases": sorted(said.set_aliases)},
        }

    # ------------------------------------------------------------ what changes

    def check(self, name: str, versions: Collection[int], change: Change, config: Any = None) -> None:
        """Raises InvalidArgument where the model, if it has these versions, could not have the names that it would have with
        this change and, of a load, with this configuration."""
        said = self._said.get(name) or Said()
        load = config is not None
        configured = version_labels.labels(config) if load else said.labels
        kept = {**said.set_labels, **change.labels}
        found = {**configured, **{label: number for label, number in kept.items() if number is not None}}
        for label, number in sorted(found.items()):
            new = load or label in change.labels or said.all_labels.get(label) != number
            if new and number not in versions:
                raise InvalidArgument(
                    f"version label '{label}' of model '{shown(name)}' names version {number}, which is not there: it has "
                    f"{numbers(versions)}"
                )
        version_labels.check_count("version labels", found)
        aliases = version_labels.aliases(config) if load else said.aliases
        given = [alias for alias, wanted in change.aliases.items() if wanted]
        if name in aliases or name in given:
            raise InvalidArgument(f"alias '{shown(name)}' of model '{shown(name)}' is the model's own name")
        for alias in aliases if load else ():
            owner = self._configured.get(alias, name)
            if owner != name:
                raise InvalidArgument(
                    f"alias '{alias}' of model '{shown(name)}' is one of model '{shown(owner)}' already"
                )
        version_labels.check_count("aliases", [*aliases, *said.set_aliases, *given])

    def configure(self, name: str, config: Any) -> None:
        """This is the model's configuration from now on. Raises InvalidArgument for one that cannot be read."""
        self.tell(name, version_labels.labels(config), version_labels.aliases(config))

    def tell(self, name: str, labels: dict[str, int], aliases: tuple[str, ...]) -> None:
        """The model's configuration says these from now on."""
        said = self._said.get(name)
        if said is None:
            if not labels and not aliases:
                return
            said = self._said[name] = Said()
        if (labels, aliases) == (said.labels, said.aliases):
            return
        before, said.labels, said.aliases = said.aliases, labels, aliases
        for alias in before:
            if alias not in aliases and self._configured.get(alias) == name:
                del self._configured[alias]
                heir = next((other for other, one in self._said.items() if alias in one.aliases), None)
                if heir is not None:
                    self._configured[alias] = heir
        for alias in aliases:
            self._configured.setdefault(alias, name)
        self._renew(name, {*before, *aliases})

    def change(self, name: str, change: Change) -> None:
        """Sets and removes names; check() has allowed it."""
        if not change:
            return
        said = self._said.setdefault(name, Said())
        for label, number in change.labels.items():
            if number is None:
                said.set_labels.pop(label, None)
            else:
                said.set_labels[label] = number
        for alias, wanted in change.aliases.items():
            owner = self._set.get(alias)
            if owner is not None and (wanted or owner == name):
                self._said[owner].set_aliases.discard(alias)
                del self._set[alias]
            if wanted:
                self._set[alias] = name
                said.set_aliases.add(alias)
        self._renew(name, change.aliases)

    def unset(self, name: str) -> None:
        """Forgets what calls have set: the model was unloaded by hand."""
        said = self._said.get(name) or Said()
        self.change(name, Change(dict.fromkeys(said.set_labels), dict.fromkeys(said.set_aliases, False)))

    def forget(self, name: str) -> None:
        """There is no such model any more."""
        self.unset(name)
        self.tell(name, {}, ())
        self._said.pop(name, None)

    def _renew(self, name: str, aliases: Iterable[str]) -> None:
        self._changed(name)
        for alias in aliases:
            before, model = self.aliased.get(alias), self._set.get(alias) or self._configured.get(alias)
            if model is None:
                self.aliased.pop(alias, None)
            else:
                self.aliased[alias] = model
            if before != model:
                self._changed(alias)
