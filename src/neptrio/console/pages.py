"""The console's files: which there are, and with which headers a browser gets them.

The problem: the pages show names and texts that strangers choose (models, errors, request ids), on an origin from
which models can be loaded. The choice: the browser is told to run nothing but these files, so that a text that ever
became markup by mistake would still be inert.

Rules:
 1. Files are read once, when the console is made; no path of a request ever reaches the file system.
 2. The content security policy allows scripts, styles and images of this origin alone: nothing inline, nothing from
    elsewhere, no frames around it. Browsers that know trusted types refuse to make markup from texts.
 3. Every answer has a strong ETag over its content, and is asked for again each time: a new server means new pages.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

Headers = list[tuple[bytes, bytes]]

TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
SECURITY: Headers = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
ROOT = "/console"


@dataclass(frozen=True)
class Page:
    """One file as it is sent."""

    content_type: bytes
    etag: bytes
    body: bytes

    def answer(self, if_none_match: bytes | None) -> tuple[int, Headers, bytes]:
        """Status, headers and body for a GET whose If-None-Match is given (None: it has none)."""
        headers = [(b"etag", self.etag), (b"cache-control", b"no-cache"), *SECURITY]
        known = [tag.strip().removeprefix(b"W/") for tag in (if_none_match or b"").split(b",")]
        if self.etag in known or b"*" in known:
            return 304, headers, b""
        return 200, [(b"content-type", self.content_type), *headers], self.body


def read() -> dict[str, Page]:
    """Path of a URL, like /console/main.js, -> its page."""
    found: dict[str, Page] = {}
    for item in (files("neptrio.console") / "assets").iterdir():
        content_type = TYPES.get(item.name.rpartition(".")[2])
        if content_type is None:
            continue
        body = item.read_bytes()
        etag = b'"%s"' % hashlib.sha256(body).hexdigest()[:32].encode()
        path = f"{ROOT}/" if item.name == "index.html" else f"{ROOT}/{item.name}"
        found[path] = Page(content_type, etag, body)
    return found
