"""Storage URIs of KServe, as repositories: each is a local folder, a URL that fsspec knows, or refused with what to do.

KServe copies what a storage URI names to /mnt/models before a server starts, so there the repository is that folder.
The same URIs work without KServe: what is in storage is read by the server itself.

    /models, file:///models, local:///models   the folder
    pvc://CLAIM/PATH                           /mnt/pvc/PATH, where KServe mounts the claim
    s3://, gs://, abfs://, hdfs:// and others  read through fsspec
    https://ACCOUNT.blob.core.windows.net/C/P  Azure's blob storage: abfs://C@ACCOUNT.dfs.core.windows.net/P
    hf://ORG/MODEL:REVISION                    fsspec writes the revision as hf://ORG/MODEL@REVISION
    oci://IMAGE, an archive over HTTP          refused
"""

from __future__ import annotations

import re
from pathlib import Path

PVC_MOUNT = Path("/mnt/pvc")
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
AZURE_BLOB = re.compile(
    r"https://(?P<account>[a-z0-9]+)\.blob\.core\.windows\.net/(?P<container>[^/?#]+)(?P<path>/[^?#]*)?"
)
HUGGING_FACE = re.compile(r"hf://(?P<model>[^/:@]+/[^/:@]+):(?P<revision>[^/:@]+)")


def resolve(text: str) -> Path | str:
    """The local folder as a Path, or the URL that fsspec is given. Raises ValueError, saying what to give instead."""
    scheme, separator, rest = text.partition("://")
    if not text or (
        scheme in ("file", "local") and separator and not rest
    ):  # a variable without a value, not this folder
        raise ValueError(f"expected a folder or a URL, got '{text}'")
    if not separator or "/" in scheme:
        return Path(text)
    if scheme in ("file", "local"):
        return Path(rest)
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        if not claim or ".." in path.split("/"):
            raise ValueError(f"expected pvc://CLAIM/PATH, got '{text}'")
        return PVC_MOUNT / path
    if scheme == "oci":
        raise ValueError(
            f"'{text}' is an image, which only KServe can mount (in /mnt/models): give --model-repository=/mnt/models"
        )
    if scheme in ("http", "https") and rest.partition("?")[0].endswith(ARCHIVES):
        raise ValueError(
            f"'{text}' is an archive: give the folder or URL of what is unpacked (KServe unpacks it in /mnt/models)"
        )
    if found := AZURE_BLOB.fullmatch(text):
        return f"abfs://{found['container']}@{found['account']}.dfs.core.windows.net{found['path'] or ''}"
    if found := HUGGING_FACE.fullmatch(text):
        return f"hf://{found['model']}@{found['revision']}"
    return text
