"""Who may do what: the clients of --auth-config (service.auth_config), as they are now.

Rules:
 1. `infer` may infer; `read` may read metadata, configurations, statistics, settings and metrics; `operate` may
    change traces, logging, shared memory and sequences, and see recent traces, errors and lines of the log; `admin` may
    load, unload and check models. No scope includes another.
 2. A client that is limited to models may do nothing that concerns other models: it may not list all models, read
    metrics or use settings of the whole server. With `read` it may read the server's own metadata.
 3. Health probes need no token unless the file says `open_health = false`; then they need `read`.
 4. A token counts before a certificate: a request with a token that is not valid is refused, whatever its connection
    has shown.
 5. The file has only hashes of tokens. Tokens are long and random (`neptrio token` makes them), so SHA-256 is enough to
    hide them. A token is looked up by its hash, and hashes are compared in constant time, so that the time an answer
    takes reveals nothing about valid tokens.
 6. The file is read again when it changes. If it is then not valid, the old content stays, and the log says why. What
    clients have used of their limits stays counted.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
from pathlib import Path
from weakref import WeakKeyDictionary

from neptrio.errors import Denied, TooManyRequests, Unauthenticated, raise_it
from neptrio.request.infer_request import Owner
from neptrio.service import auth_config
from neptrio.service.auth_config import INFER, READ, AuthConfig, Client
from neptrio.service.certificates import Certificate
from neptrio.service.request_limits import Bucket

log = logging.getLogger("neptrio.tokens")

LOOK_SECONDS = 1.0  # between two looks at the file
PREFIX = "npt_"
TOKEN_BYTES = 32
LONGEST = 4096  # longest token in bytes that is accepted from clients


def digest(token: bytes) -> bytes:
    """The SHA-256 of a token, which is all that the file keeps of it."""
    return hashlib.sha256(token).digest()


def make() -> tuple[str, str]:
    """A new token, and its hash for the file."""
    token = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    return token, "sha256:" + digest(token.encode()).hex()


class Account(Owner):
    """A client and what it has used of its limits. The same object for as long as the file has a client of that name."""

    client: Client

    def __init__(self, client: Client) -> None:
        super().__init__(client.name)
        self._bucket = Bucket()
        self.take(client)

    def take(self, client: Client) -> None:
        """What the file says about the client now."""
        self.client = client
        self.most = client.concurrent_requests

    def sees_all(self) -> bool:
        """Whether it may see and end sequences of others."""
        return not self.client.scopes.isdisjoint((auth_config.OPERATE, auth_config.ADMIN))

    def problem(self, now_ns: int) -> TooManyRequests | None:
        """Why a request is refused now, None when it is not; it is counted then."""
        per_second = self.client.requests_per_second
        if not per_second or self._bucket.spend(per_second, now_ns):
            return None
        return TooManyRequests(
            f"{self.client.title} may make {per_second} requests per second (requests_per_second); send the request "
            "again in a second"
        )

    def owe(self, count: int) -> None:
        """Counts for the rate what a request that was let in makes besides."""
        if self.client.requests_per_second:
            self._bucket.owe(count)

    def too_many(self) -> TooManyRequests:
        return TooManyRequests(
            f"{self.client.title} has {self.most} requests under way, which is what it may have "
            "(concurrent_requests); send the request again when others are answered"
        )


class Clients:
    """The clients of a configuration, as they are known now. Trio thread only."""

    def __init__(self, config: AuthConfig) -> None:
        self._config = config
        self._accounts: dict[str, Account] = {}
        self._shown: WeakKeyDictionary[Certificate, Account] = WeakKeyDictionary()
        self._open_accounts()

    def _open_accounts(self) -> None:
        before, self._accounts = self._accounts, {}
        for account in before.values():
            account.generation += 1  # whoever remembers what it may do asks again
        for client in self._config.clients():
            found = before.get(client.name)
            if found is None:
                found = Account(client)
            else:
                found.take(client)
            self._accounts[client.name] = found
        self._shown.clear()

    @property
    def config(self) -> AuthConfig:
        """What the clients are taken from."""
        return self._config

    def take(self, config: AuthConfig) -> None:
        """Replaces the known clients by those of `config`."""
        self._config = config
        self._open_accounts()

    def named(self, name: str) -> Account:
        """The client of that name, which a front end has found. Raises Unauthenticated when there is none any more."""
        account = self._accounts.get(name)
        if account is None:
            raise Unauthenticated("the token is not valid")
        return account

    @property
    def open_health(self) -> bool:
        """Whether health probes are answered without a token (rule 3)."""
        return self._config.open_health

    def find(self, secret: bytes | None, certificate: Certificate | None = None) -> Account:
        """The client of a token; for None that of the connection's certificate, or `anonymous`.

        Raises Unauthenticated if the token is not valid, or if none of the three says who the client is.
        """
        if secret is None:
            found = None if certificate is None else self._of_certificate(certificate)
            if found is not None:
                return found
            if self._config.anonymous is None:
                what = "" if certificate is None else ", for the file has no entry for this certificate"
                raise Unauthenticated(f"a token is needed: Authorization: Bearer TOKEN{what}")
            return self._accounts[auth_config.ANONYMOUS]
        key = digest(secret[:LONGEST])
        client = self._config.tokens.get(key)
        if client is None or not hmac.compare_digest(client.digest, key) or len(secret) > LONGEST:
            raise Unauthenticated("the token is not valid")
        return self._accounts[client.name]

    def _of_certificate(self, certificate: Certificate) -> Account | None:
        found = self._shown.get(certificate)
        if found is None:
            for client in self._config.certificates:
                if client.shows(certificate):
                    found = self._shown[certificate] = self._accounts[client.name]
                    break
        return found

    def check(
        self,
        secret: bytes | None,
        scopes: tuple[str, ...],
        model: str | None,
        certificate: Certificate | None = None,
    ) -> Account:
        """The client of a token or certificate, if it has one of `scopes` and is for `model`.

        `model` is the model that the request concerns; "" means all models, None that it is not known yet or that
        there is none. Raises Unauthenticated and Denied.
        """
        account = self.find(secret, certificate)
        client = account.client
        if client.scopes.isdisjoint(scopes):
            raise Denied(f"{client.title} may not do this: it needs the scope {' or '.join(scopes)}")
        if model is not None and not client.covers(model):
            what = f"model '{model[:128]}'" if model else "what concerns all models"
            raise Denied(f"{client.title} is limited to some models: it is not for {what}")
        return account

    def count(self, account: Account, scopes: tuple[str, ...], now_ns: int) -> None:
        """Counts a request that needs `scopes`. Raises TooManyRequests beyond the client's rate.

        Control verbs are not counted, so that they are possible whatever else the client does.
        """
        if account.client.requests_per_second and not {INFER, READ}.isdisjoint(scopes):
            raise_it(account.problem(now_ns))


class Tokens(Clients):
    """The clients of a file (rule 6). Trio thread, but for changed()."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError when the file cannot be used."""
        self._path = path
        self._seen = self._state()
        super().__init__(auth_config.read(path))

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
            return auth_config.read(self._path)
        except ValueError as error:
            log.error("--auth-config: what it says now cannot be used, what it said before holds: %s", error)
            return None

    def tell(self) -> None:
        """Logs that what the file says holds from now on, everywhere."""
        log.info(
            "--auth-config: there are %d tokens now, and %d entries of certificates",
            len(self._config.tokens),
            len(self._config.certificates),
        )
