"""Certificates for tests, of a root that is made for them."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import trustme


class Certificates:
    """A root, and what it issued."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = trustme.CA()
        self.roots = folder / "root.pem"
        self.root.cert_pem.write_to_path(str(self.roots))

    def issue(
        self, name: str, issuer: trustme.CA | None = None, names: tuple[str, ...] = (), common_name: str = ""
    ) -> tuple[Path, Path]:
        """(certificate, key), each written in one step; for `names` (hosts, addresses, emails), or for this machine."""
        names = names or ("localhost", "127.0.0.1")
        made = (issuer or self.root).issue_cert(*names, common_name=common_name or None)
        paths = self.files(name)
        contents = b"".join(part.bytes() for part in made.cert_chain_pems), made.private_key_pem.bytes()
        for path, content in zip(paths, contents, strict=True):
            new = path.with_suffix(".new")
            new.write_bytes(content)
            os.replace(new, path)
        return paths

    def files(self, name: str) -> tuple[Path, Path]:
        """The certificate of `name` and its key."""
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"

    def flags(self, name: str) -> tuple[str, str]:
        """Those of a server whose REST port shows the certificate of `name`."""
        certificate, key = self.files(name)
        return f"--http-tls-cert={certificate}", f"--http-tls-key={key}"

    def client(self, name: str = "", alpn: str = "http/1.1") -> ssl.SSLContext:
        """A client that trusts the root, with the certificate of `name` if there is one."""
        context = ssl.create_default_context(cafile=str(self.roots))
        if alpn:
            context.set_alpn_protocols([alpn])
        if name:
            context.load_cert_chain(*self.files(name))
        return context
