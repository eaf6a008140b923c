"""The TLS context of a port, which follows its certificate files."""

from __future__ import annotations

import logging
import os
import ssl
from contextlib import suppress
from pathlib import Path

from neptrio.loop import periodic, threads
from neptrio.settings import Settings

HANDSHAKE_S = 20.0  # from accepting a connection to the end of its TLS handshake

log = logging.getLogger("neptrio.tls")

VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
LOOK_SECONDS = 1.0  # between two looks at the files


def server_context(
    certificate: Path,
    key: Path,
    client_roots: Path | None,
    alpn: list[str],
    least: str = "1.2",
    ciphers: str = "",
) -> ssl.SSLContext:
    """A server's TLS context. With `client_roots`, clients must show a certificate that one of these roots signed.

    `least` is the lowest TLS version that is accepted, a key of VERSIONS. `ciphers` is a list for TLS 1.2 in OpenSSL's
    syntax, "" for OpenSSL's default. Raises OSError that names the file, or the ciphers, that cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = VERSIONS[least]
    if ciphers:
        try:
            context.set_ciphers(ciphers)
        except ssl.SSLError:
            raise OSError(f"--tls-ciphers: OpenSSL knows no cipher of '{ciphers}'") from None
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise OSError(f"cannot use the certificate '{certificate}' with the key '{key}': {error}") from None
    if client_roots is not None:
        try:
            context.load_verify_locations(client_roots)
        except (OSError, ssl.SSLError) as error:
            raise OSError(f"cannot use the root certificates '{client_roots}': {error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(alpn)
    return context


class ServerTls:
    """The TLS context of a port, made again when its files change.

    Open connections keep the context they began with. If the new files cannot be used (the certificate may be written
    before the key), the old context stays, the log says why, and the next change is tried again.
    """

    def __init__(
        self, certificate: Path, key: Path, client_roots: Path | None, alpn: list[str], settings: Settings
    ) -> None:
        """Raises OSError as server_context() does."""
        self.certificate, self.key = certificate, key
        self._files = [path for path in (certificate, key, client_roots) if path is not None]
        self._make = lambda: server_context(
            certificate, key, client_roots, alpn, settings.tls_min_version, settings.tls_ciphers
        )
        self._seen = self._state()
        self.context = self._make()

    def _state(self) -> list[tuple[int, int, int]]:
        found = []
        for path in self._files:
            try:
                state = os.stat(path)
            except OSError:
                continue
            found.append((state.st_mtime_ns, state.st_size, state.st_ino))
        return found

    def look(self) -> ssl.SSLContext | None:
        """A new context if the files changed since the last call and can be used, otherwise None. Any thread."""
        state = self._state()
        if state == self._seen:
            return None
        self._seen = state
        try:
            return self._make()
        except OSError as error:
            log.error("TLS: the files have changed and cannot be used, those before hold: %s", error)
            return None

    async def watch(self) -> None:
        """Checks the files every LOOK_SECONDS, until it is cancelled."""

        async def look() -> None:
            made: ssl.SSLContext | None = None
            with suppress(threads.NoThread):
                made = await threads.run(self.look, abandon_on_cancel=True)
            if made is not None:
                self.context = made
                log.info("TLS: new connections see the certificate of '%s' as it is now", self._files[0])

        await periodic.for_ever(LOOK_SECONDS, look, "TLS: looking at the files", log)


def rest_tls(settings: Settings, alpn: list[str]) -> ServerTls | None:
    """The TLS of REST, None if it has none. Raises OSError as server_context() does."""
    if settings.http_tls_cert is None or settings.http_tls_key is None:
        return None
    return ServerTls(
        settings.http_tls_cert, settings.http_tls_key, settings.http_tls_client_ca, alpn, settings
    )


def metrics_tls(settings: Settings) -> ServerTls | None:
    """The TLS of the metrics port, None if it has none. Raises OSError as server_context() does."""
    if settings.metrics_tls_cert is None or settings.metrics_tls_key is None:
        return None
    return ServerTls(
        settings.metrics_tls_cert,
        settings.metrics_tls_key,
        settings.metrics_tls_client_ca,
        ["http/1.1"],
        settings,
    )
