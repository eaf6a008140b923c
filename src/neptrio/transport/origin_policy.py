"""Requests that a web page caused: which of them are answered, and what browsers are told (CORS).

The problem: a browser sends requests for any web page to any address that the browser's machine can reach. So a page
of a stranger can POST to a server on the visitor's own machine. The page cannot read the answer, but its request may
have loaded a model or changed a setting. A page can also change its own DNS name to point to the visitor's machine
after it was loaded (DNS rebinding); the browser then takes the server for the page's own and lets the page read, too.

The choice: browsers add headers to each POST that tell which page caused it, and pages cannot change these headers. A
request with such headers must come from a page that the operator allows. One without them is not from a browser.

Rules:
 1. Only POST has effects in this server, and a page cannot read what it GETs unless the answer allows it (rule 5). So
    only POST is refused for its origin. HTTP clients that are not browsers send none of these headers.
 2. An Origin that --cors-allow-origin names may do everything.
 3. Another Origin may POST only if it is the server's own, and the Host is beyond doubt (rule 4). This lets a proxy
    serve pages under the server's name. Without an Origin, Sec-Fetch-Site must be `same-origin` or `none`.
 4. A Host is beyond doubt if an attacker cannot own it in the public DNS: an address, `localhost` or a name that ends
    in `.localhost`, a name without a dot, or one given by --allowed-host. If the server listens on a loopback address
    or has --allowed-host, requests with another Host are refused, whatever their method, except health probes.
 5. Answers to allowed origins say that they are allowed. A preflight (OPTIONS with Access-Control-Request-Method) is
    answered here and never reaches a verb. Answers to other origins carry no CORS permission.
Source: Fetch standard (CORS protocol), Fetch Metadata request headers; RFC 9110, 7.2 for Host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from neptrio.errors import Code, TritonError, raise_it
from neptrio.limits import remember

Headers = list[tuple[bytes, bytes]]

ANY = "*"
OWN = (b"same-origin", b"none")  # Sec-Fetch-Site of a page of this server, and of the user's own input
PREFLIGHT_SECONDS = 600  # how long a browser may remember the answer to a preflight
METHODS = b"GET, POST"
EXPOSED = b"Inference-Header-Content-Length, Content-Encoding, Retry-After"
SHOWN = 60  # characters of a header in an answer
MOST_HOSTS = 256  # remembered; the bound keeps clients that try many from filling the memory


def host_name(host: bytes) -> str:
    """The name in a Host header or in an Origin after `://`: in lower case, without the port and a final dot."""
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def _certain(name: str) -> bool:
    """Whether a name is beyond doubt by its form alone (rule 4 without --allowed-host)."""
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class OriginPolicy:
    """Decides by the headers of a request whether it is answered. Does no I/O."""

    def __init__(
        self, origins: Iterable[str] = (), hosts: Iterable[str] = (), loopback: bool = False
    ) -> None:
        """`origins` and `hosts` are the values of --cors-allow-origin and --allowed-host; `loopback` says that the
        server listens on a loopback address."""
        self._origins = frozenset(origin.encode() for origin in origins)
        self._any_origin = ANY.encode() in self._origins
        names = frozenset(host.lower() for host in hosts)
        self._names = frozenset(name for name in names if "*" not in name)
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))
        self._any_host = ANY in names
        self._strict = bool(names or loopback) and not self._any_host
        self._known: dict[bytes, bool] = {}

    @property
    def cors(self) -> bool:
        """Whether pages of some other origin may use the server."""
        return bool(self._origins)

    def names_server(self, host: bytes) -> bool:
        """Whether `host`, a Host header, is beyond doubt (rule 4)."""
        found = self._known.get(host)
        if found is None:
            name = host_name(host)
            found = (
                self._any_host
                or name in self._names
                or _certain(name)
                or name.endswith(self._suffixes or "\n")
            )
            remember(self._known, host, found, MOST_HOSTS)
        return found

    def accepts_host(self, host: bytes | None) -> bool:
        """Whether requests with this Host header, None for none, are answered (rule 4)."""
        return not self._strict or host is None or self.names_server(host)

    def allows(self, origin: bytes | None) -> bool:
        """Whether --cors-allow-origin names this Origin (rule 2)."""
        return origin is not None and (self._any_origin or origin in self._origins)

    def problem(
        self, method: str, host: bytes | None, origin: bytes | None, site: bytes | None
    ) -> TritonError | None:
        """Why a request is refused (an error with Code.FORBIDDEN), None if it is not.

        `host`, `origin` and `site` are the headers Host, Origin and Sec-Fetch-Site; None if the request lacks them.
        """
        if not self.accepts_host(host):
            return TritonError(
                f"Host '{_shown(host)}' is none of this server's names; start it with --allowed-host=NAME to allow it",
                Code.FORBIDDEN,
            )
        if method != "POST" or self.allows(origin):
            return None
        if origin is not None:
            own = host is not None and origin.partition(b"://")[2].lower() == host.lower()
            if not (own and self.names_server(host or b"")):
                return TritonError(
                    f"a web page of origin '{_shown(origin)}' may not use this server; start it with "
                    "--cors-allow-origin=ORIGIN to allow it",
                    Code.FORBIDDEN,
                )
        if site is not None and site.strip().lower() not in OWN and not self._any_origin:
            return TritonError(
                f"the request was caused by a web page of another origin (Sec-Fetch-Site: {_shown(site)}); "
                "--cors-allow-origin=ORIGIN allows pages",
                Code.FORBIDDEN,
            )
        return None

    def check(self, method: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises the problem() of a request with these headers, whose names must be in lower case."""
        found = dict(headers)
        raise_it(self.problem(method, found.get(b"host"), found.get(b"origin"), found.get(b"sec-fetch-site")))

    def answer_headers(self, origin: bytes | None) -> Headers:
        """The headers to add to each answer to a request with this Origin (rule 5)."""
        if not self._origins:
            return []
        if self._any_origin:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", EXPOSED)]
        if origin is None or origin not in self._origins:
            return [(b"vary", b"Origin")]  # caches must not give this answer to another origin
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", EXPOSED),
            (b"vary", b"Origin"),
        ]

    def preflight(self, method: str, headers: Iterable[tuple[bytes, bytes]]) -> Headers | None:
        """The headers to add to the answer of a preflight, besides answer_headers(). None if the request is no preflight
        of an allowed origin. The names in `headers` must be in lower case.
        """
        if method != "OPTIONS" or not self._origins:
            return None
        found = dict(headers)
        if b"access-control-request-method" not in found or not self.allows(found.get(b"origin")):
            return None
        made = [
            (b"access-control-allow-methods", METHODS),
            (b"access-control-max-age", b"%d" % PREFLIGHT_SECONDS),
        ]
        asked = found.get(b"access-control-request-headers")
        if asked:
            made.append((b"access-control-allow-headers", asked))
        if found.get(b"access-control-request-private-network") == b"true":
            made.append((b"access-control-allow-private-network", b"true"))
        return made


def _shown(value: bytes | None) -> str:
    return (value or b"")[:SHOWN].decode("latin-1")
