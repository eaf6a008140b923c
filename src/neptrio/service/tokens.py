"""Who may do what: tokens of clients, from a file (--auth-config).

    [[token]]
    name = "dashboard"                     # in errors and the log
    hash = "sha256:5e88..."                # of the token, as `neptrio token` prints it
    scopes = ["read", "infer"]
    models = ["resnet", "bert-*"]          # without it: all models

    [anonymous]                            # what clients without a token may; without it: nothing
    scopes = ["read"]

Rules:
 1. `infer` may infer; `read` may read metadata, configurations, statistics, settings and metrics; `operate` may
    change traces, logging, shared memory and sequences, and see recent traces; `admin` may load, unload and check
    models. No scope includes another.
 2. A token that is limited to models may do nothing that concerns other models: it may not list all models, read
    metrics or use settings of the whole server. With `read` it may read the server's own metadata.
 3. Health probes need no token unless the file says `open_health = false`; then they need `read`.
 4. The file has only hashes of tokens. Tokens are long and random (`neptrio token` makes them), so SHA-256 is enough to
    hide them. A token is looked up by its hash, and hashes are compared in constant time, so that the time an answer
    takes reveals nothing about valid tokens.
 5. The file is read again when it changes. If it is then not valid, the old content stays, and the log says why.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from neptrio.errors import Denied, Unauthenticated

log = logging.getLogger("neptrio.tokens")

INFER, READ, OPERATE, ADMIN = SCOPES = ("infer", "read", "operate", "admin")
HASH = re.compile(r"sha256:([0-9a-f]{64})\Z")
LOOK_SECONDS = 1.0  # between two looks at the file
PREFIX = "npt_"
TOKEN_BYTES = 32
LONGEST = 4096  # longest token in bytes that is accepted from clients
ANONYMOUS = "anonymous"


def digest(token: bytes) -> bytes:
    """The SHA-256 of a token, which is all that the file keeps of it."""
    return hashlib.sha256(token).digest()


def make() -> tuple[str, str]:
    """A new token, and its hash for the file."""
    token = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    return token, "sha256:" + digest(token.encode()).hex()


@dataclass(frozen=True)
class Token:
    """What the holder of a token may do. `models` are patterns of model names, None for all models."""

    name: str
    scopes: frozenset[str]
    models: tuple[str, ...] | None = None
    digest: bytes = b""

    def covers(self, model: str) -> bool:
        """Whether the token may be used for `model`; "" means something that concerns all models."""
        if self.models is None:
            return True
        return bool(model) and any(fnmatchcase(model, pattern) for pattern in self.models)


@dataclass(frozen=True)
class AuthConfig:
    """The content of the file, checked. `tokens` maps a token's SHA-256 to the token."""

    tokens: Mapping[bytes, Token]
    anonymous: Token | None = None
    open_health: bool = True


def parse(text: str) -> AuthConfig:
    """The content of a file. Raises ValueError saying what is wrong, without any token or hash."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it is no TOML: {error}") from None
    _known("the file", document, ("token", "anonymous", "open_health"))
    rows = document.get("token", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("expected tables [[token]]")
    tokens: dict[bytes, Token] = {}
    names: set[str] = set()
    for number, row in enumerate(rows, 1):
        where = f"token {number}"
        _known(where, row, ("name", "hash", "scopes", "models"))
        name = row.get("name")
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or name == ANONYMOUS:
            raise ValueError(f"{where}: expected name = TEXT, other than '{ANONYMOUS}'")
        where = f"token '{name}'"
        if name in names:
            raise ValueError(f"{where}: the name is there twice")
        names.add(name)
        given = row.get("hash")
        found = HASH.match(given) if isinstance(given, str) else None
        if found is None:
            raise ValueError(f'{where}: expected hash = "sha256:" and 64 hexadecimal digits (neptrio token)')
        key = bytes.fromhex(found[1])
        if key in tokens:
            raise ValueError(f"{where}: it has the hash of token '{tokens[key].name}'")
        tokens[key] = Token(name, _scopes(where, row), _models(where, row), key)
    anonymous = None
    if "anonymous" in document:
        row = document["anonymous"]
        if not isinstance(row, dict):
            raise ValueError("expected a table [anonymous]")
        _known("anonymous", row, ("scopes", "models"))
        anonymous = Token(ANONYMOUS, _scopes("anonymous", row), _models("anonymous", row))
    open_health = document.get("open_health", True)
    if not isinstance(open_health, bool):
        raise ValueError("expected open_health = true or false")
    return AuthConfig(tokens, anonymous, open_health)


def _known(where: str, row: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key in row:
        if key not in keys:
            raise ValueError(f"{where}: unknown key '{key}', expected one of {', '.join(keys)}")


def _texts(where: str, row: Mapping[str, Any], key: str) -> list[str]:
    given = row[key]
    if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
        raise ValueError(f"{where}: expected {key} = [TEXT, ...]")
    return given


def _scopes(where: str, row: Mapping[str, Any]) -> frozenset[str]:
    scopes = _texts(where, row, "scopes") if "scopes" in row else []
    for scope in scopes:
        if scope not in SCOPES:
            raise ValueError(f"{where}: unknown scope '{scope}', expected one of {', '.join(SCOPES)}")
    if not scopes:
        raise ValueError(f"{where}: expected scopes = [...] with one or more of {', '.join(SCOPES)}")
    return frozenset(scopes)


def _models(where: str, row: Mapping[str, Any]) -> tuple[str, ...] | None:
    return tuple(_texts(where, row, "models")) if "models" in row else None


class Tokens:
    """The tokens that are valid now. Trio thread, but for read()."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError when the file cannot be used."""
        self._path = path
        self._seen = self._state()
        self._config = self.read()

    def read(self) -> AuthConfig:
        """The file as it is now. Any thread. Raises ValueError."""
        try:
            return parse(self._path.read_text("utf-8"))
        except OSError as error:
            raise ValueError(f"'{self._path}' cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"'{self._path}': {error}") from None

    def _state(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def changed(self) -> AuthConfig | None:
        """The file's content if it changed since the last call and is valid, otherwise None; give it to take().

        Any thread. Logs why a changed file is not valid.
        """
        state = self._state()
        if state == self._seen:
            return None
        self._seen = state
        try:
            return self.read()
        except ValueError as error:
            log.error("--auth-config: what it says now cannot be used, what it said before holds: %s", error)
            return None

    def take(self, config: AuthConfig) -> None:
        """Replaces the valid tokens by those of `config`."""
        self._config = config
        log.info("--auth-config: there are %d tokens now", len(config.tokens))

    @property
    def open_health(self) -> bool:
        """Whether health probes are answered without a token (rule 3)."""
        return self._config.open_health

    def find(self, secret: bytes | None) -> Token:
        """The entry of a token; that of `anonymous` for None. Raises Unauthenticated if the token is not valid, or is
        missing where one is needed."""
        if secret is None:
            if self._config.anonymous is None:
                raise Unauthenticated("a token is needed: Authorization: Bearer TOKEN")
            return self._config.anonymous
        key = digest(secret[:LONGEST])
        token = self._config.tokens.get(key)
        if token is None or not hmac.compare_digest(token.digest, key) or len(secret) > LONGEST:
            raise Unauthenticated("the token is not valid")
        return token

    def check(self, secret: bytes | None, scopes: tuple[str, ...], model: str | None) -> Token:
        """The entry of a token, if it has one of `scopes` and is for `model`.

        `model` is the model that the request concerns; "" means all models, None that it is not known yet or that
        there is none. Raises Unauthenticated and Denied.
        """
        token = self.find(secret)
        if token.scopes.isdisjoint(scopes):
            who = "a client without a token" if token is self._config.anonymous else f"token '{token.name}'"
            raise Denied(f"{who} may not do this: it needs the scope {' or '.join(scopes)}")
        if model is not None and not token.covers(model):
            what = f"model '{model[:128]}'" if model else "what concerns all models"
            raise Denied(f"token '{token.name}' is limited to some models: it is not for {what}")
        return token
