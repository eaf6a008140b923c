"""The file of --auth-config: which clients there are, how each is recognised, and what it may do.

TOML, or YAML with the same names where the file's name ends in .yaml or .yml:

    [[token]]
    name = "dashboard"                     # in errors and logs
    hash = "sha256:5e88..."                # of the token, as `neptrio token` prints it
    scopes = ["read", "infer"]
    models = ["resnet", "bert-*"]          # without it: all models
    requests_per_second = 100              # without it, or 0: no limit
    concurrent_requests = 8                # without it, or 0: no limit

    [[certificate]]                        # for clients that show a certificate over TLS
    name = "trainer"
    common_name = ["trainer-*"]            # patterns; also dns, uri, email, ip: its alternative names
    scopes = ["infer"]                     # models, requests_per_second, concurrent_requests: as above

    [anonymous]                            # what clients with neither may; without it: nothing
    scopes = ["read"]

Rules:
 1. A name stands for one client: tokens and certificates have different names.
 2. A certificate entry is for a certificate if each key that it gives has a pattern that matches one of the
    certificate's names of that kind. Of several entries the first counts.
 3. What is not known or not complete is refused: a file that means less, or more, than it says would be worse than none.
    Messages contain no token and no hash.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from neptrio.service.certificates import KINDS, Certificate

INFER, READ, OPERATE, ADMIN = SCOPES = ("infer", "read", "operate", "admin")
HASH = re.compile(r"sha256:([0-9a-f]{64})\Z")
ANONYMOUS = "anonymous"
LIMITS = ("requests_per_second", "concurrent_requests")
RIGHTS = ("scopes", "models", *LIMITS)
YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Client:
    """What a client may do. `models` are patterns of model names, None for all models; limits of 0 are none."""

    name: str
    scopes: frozenset[str]
    models: tuple[str, ...] | None = None
    requests_per_second: int = 0
    concurrent_requests: int = 0
    digest: bytes = b""  # SHA-256 of its token
    patterns: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # of its certificate, by kind of name

    @property
    def title(self) -> str:
        """How errors name it."""
        if self.name == ANONYMOUS:
            return "a client without a token"
        return f"{'certificate' if self.patterns else 'token'} '{self.name}'"

    def covers(self, model: str) -> bool:
        """Whether the client may use `model`; "" means something that concerns all models."""
        if self.models is None:
            return True
        return bool(model) and any(fnmatchcase(model, pattern) for pattern in self.models)

    def shows(self, certificate: Certificate) -> bool:
        """Whether the entry is for this certificate (rule 2)."""
        return bool(self.patterns) and all(
            any(
                fnmatchcase(name, pattern) for name in certificate.names.get(kind, ()) for pattern in patterns
            )
            for kind, patterns in self.patterns.items()
        )


@dataclass(frozen=True)
class AuthConfig:
    """The content of the file, checked. `tokens` maps a token's SHA-256 to its client."""

    tokens: Mapping[bytes, Client]
    certificates: tuple[Client, ...] = ()
    anonymous: Client | None = None
    open_health: bool = True

    def clients(self) -> list[Client]:
        """All clients of the file."""
        found = [*self.tokens.values(), *self.certificates]
        return found if self.anonymous is None else [*found, self.anonymous]


def read(path: Path) -> AuthConfig:
    """The content of a file. Raises ValueError that names the file and says what is wrong."""
    try:
        return parse(path.read_text("utf-8"), path.suffix.lower() in YAML_SUFFIXES)
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"'{path}': {error}") from None


def parse(text: str, yaml: bool = False) -> AuthConfig:
    """The content of a file as TOML or YAML. Raises ValueError saying what is wrong, without any token or hash."""
    document = _yaml(text) if yaml else _toml(text)
    _known("the file", document, ("token", "certificate", "anonymous", "open_health"))
    names: set[str] = set()
    tokens: dict[bytes, Client] = {}
    for where, row in _rows(document, "token", names):
        _known(where, row, ("name", "hash", *RIGHTS))
        given = row.get("hash")
        found = HASH.match(given) if isinstance(given, str) else None
        if found is None:
            raise ValueError(f'{where}: expected hash = "sha256:" and 64 hexadecimal digits (neptrio token)')
        key = bytes.fromhex(found[1])
        if key in tokens:
            raise ValueError(f"{where}: it has the hash of token '{tokens[key].name}'")
        tokens[key] = Client(row["name"], digest=key, **_rights(where, row))
    certificates = []
    for where, row in _rows(document, "certificate", names):
        _known(where, row, ("name", *KINDS, *RIGHTS))
        patterns = {kind: tuple(_texts(where, row, kind)) for kind in KINDS if kind in row}
        if not patterns or not all(patterns.values()):
            raise ValueError(f"{where}: expected patterns of one or more of {', '.join(KINDS)}")
        certificates.append(Client(row["name"], patterns=patterns, **_rights(where, row)))
    anonymous = None
    if "anonymous" in document:
        row = document["anonymous"]
        if not isinstance(row, dict):
            raise ValueError("expected a table [anonymous]")
        _known(ANONYMOUS, row, RIGHTS)
        anonymous = Client(ANONYMOUS, **_rights(ANONYMOUS, row))
    open_health = document.get("open_health", True)
    if not isinstance(open_health, bool):
        raise ValueError("expected open_health = true or false")
    return AuthConfig(tokens, tuple(certificates), anonymous, open_health)


def _toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it is no TOML: {error}") from None


def _yaml(text: str) -> dict[str, Any]:
    # only servers with such a file pay for the import
    import yaml

    class Loader(yaml.SafeLoader):
        """The safe loader, which makes plain values only, but a key that is there twice is an error, as in TOML."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[Any] = set()
            for key, _ in node.value:
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem="a key is there twice", problem_mark=key.start_mark)
                seen.add(key.value)
            return dict(super().construct_mapping(node, deep))

    try:
        document = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        # without its excerpt of the file, which may contain a hash
        problem = getattr(error, "problem", None) or "it cannot be read"
        mark = getattr(error, "problem_mark", None)
        at = "" if mark is None else f" (at line {mark.line + 1}, column {mark.column + 1})"
        raise ValueError(f"it is no YAML: {problem}{at}") from None
    except RecursionError:
        raise ValueError("it is no YAML: its values are nested too deeply") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ValueError("expected a mapping with token, certificate, anonymous or open_health")
    return document


def _rows(document: dict[str, Any], kind: str, names: set[str]) -> list[tuple[str, dict[str, Any]]]:
    """The tables of a kind, each with what errors call it. Adds their names to `names`."""
    rows = document.get(kind, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"expected tables [[{kind}]]")
    found = []
    for number, row in enumerate(rows, 1):
        name = row.get("name")
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or name == ANONYMOUS:
            raise ValueError(f"{kind} {number}: expected name = TEXT, other than '{ANONYMOUS}'")
        where = f"{kind} '{name}'"
        if name in names:
            raise ValueError(f"{where}: the name is there twice")
        names.add(name)
        found.append((where, row))
    return found


def _known(where: str, row: Mapping[Any, Any], keys: tuple[str, ...]) -> None:
    for key in row:
        if key not in keys:
            raise ValueError(f"{where}: unknown key '{key}', expected one of {', '.join(keys)}")


def _texts(where: str, row: Mapping[str, Any], key: str) -> list[str]:
    given = row[key]
    if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
        raise ValueError(f"{where}: expected {key} = [TEXT, ...]")
    return given


def _rights(where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """What an entry allows: the fields of Client by name."""
    scopes = _texts(where, row, "scopes") if "scopes" in row else []
    for scope in scopes:
        if scope not in SCOPES:
            raise ValueError(f"{where}: unknown scope '{scope}', expected one of {', '.join(SCOPES)}")
    if not scopes:
        raise ValueError(f"{where}: expected scopes = [...] with one or more of {', '.join(SCOPES)}")
    found: dict[str, Any] = {"scopes": frozenset(scopes)}
    if "models" in row:
        found["models"] = tuple(_texts(where, row, "models"))
    for key in LIMITS:
        limit = row.get(key, 0)
        if isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit < 1 << 62:
            raise ValueError(f"{where}: expected {key} = a number of requests, 0 for no limit")
        found[key] = limit
    return found
