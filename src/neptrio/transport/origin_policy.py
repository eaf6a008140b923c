"""Requests that a web page caused: which are answered, and what browsers are told (CORS).

The problem: a browser sends whatever a page asks it to send, to any address that its machine can reach, with
the user's network behind it. A page of anybody's can so POST to a server on the visitor's own machine, which
takes the request for the user's. It cannot read the answer, but a load or a changed setting is done by then.
A page can also have its own name point to that machine after it was loaded (DNS rebinding); then it may even
read. The choice: browsers say of every POST which page caused it, and pages cannot change what they say. So
a request with these headers is held against what the operator allows, and one without is not from a browser.

Rules:
 1. Only POST has effects here; what a page may GET it cannot read unless it is told that it may (rule 5).
    So only POST is refused for its origin. HTTP clients that are no browsers send none of the headers.
 2. An Origin that --cors-allow-origin names may do everything.
 3. Another Origin may POST only if it is the server itself, by a Host that nobody can rebind (rule 4): a proxy
    may serve pages beside the server. Without an Origin, Sec-Fetch-Site must be `same-origin` or `none`.
 4. A Host is beyond doubt if it is an address, `localhost` or under it, a name without a dot, or given by
    --allowed-host: no such name can be had in the public DNS. On a server that listens on a loopback address,
    or was given --allowed-host, requests with another Host are refused, whatever their method; probes are not.
 5. Allowed origins are told so in every answer; a preflight (OPTIONS with Access-Control-Request-Method) is
    answered by what is allowed and never reaches a verb. What is not allowed is told nothing.
Source: Fetch standard (CORS protocol), Fetch Metadata request headers; RFC 9110, 7.2 for Host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from neptrio.errors import Code, TritonError

Headers = list[tuple[bytes, bytes]]

ANY = "*"
OWN = (b"same-origin", b"none")  # of Sec-Fetch-Site: a page of this server, or the user's own doing
PREFLIGHT_SECONDS = 600  # for which a browser need not ask again
METHODS = b"GET, POST"
EXPOSED = b"Inference-Header-Content-Length, Content-Encoding, Retry-After"
SHOWN = 60  # characters of a header in an answer
MOST_HOSTS = 256  # that are remembered; what others try must not grow memory


def host_name(host: bytes) -> str:
    """The name in a Host header or an origin's authority, lower-case, without port and last dot."""
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def _certain(name: str) -> bool:
    """Rule 4, but for --allowed-host."""
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class OriginPolicy:
    """What the operator allows. Pure: headers in, decisions out."""

    def __init__(
        self, origins: Iterable[str] = (), hosts: Iterable[str] = (), loopback: bool = False
    ) -> None:
        """`origins` and `hosts` as --cors-allow-origin and --allowed-host have them; `loopback`: the server
        listens on a loopback address."""
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
        """Whether any page of another origin may use the server."""
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
            if len(self._known) >= MOST_HOSTS:
                self._known.clear()
            self._known[host] = found
        return found

    def accepts_host(self, host: bytes | None) -> bool:
        """Whether requests with this Host are answered."""
        return not self._strict or host is None or self.names_server(host)

    def allows(self, origin: bytes | None) -> bool:
        """Rule 2."""
        return origin is not None and (self._any_origin or origin in self._origins)

    def problem(
        self, method: str, host: bytes | None, origin: bytes | None, site: bytes | None
    ) -> TritonError | None:
        """Why a request is refused (FORBIDDEN), None when it is not.

        `host`, `origin` and `site` are the headers Host, Origin and Sec-Fetch-Site, None where there is none.
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

    def answer_headers(self, origin: bytes | None) -> Headers:
        """What an answer to a request from `origin` says (rule 5)."""
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
        """The headers of the answer to a preflight beside answer_headers(), None for another request.

        `headers` have lower-case names.
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
