"""Whether a folder as a load finds it differs from what serves, and in what."""

from __future__ import annotations

from neptrio.repository import scan
from neptrio.repository.loader import Found
from neptrio.repository.records import Record


def unchanged(record: Record, found: Found) -> bool:
    """Every wanted version serves already, from the files as they are."""
    return (
        record.folder is None
        and set(record.serving) == set(found.versions) != set()
        and record.fingerprint == found.fingerprint
    )


def same_but_instances(record: Record, found: Found) -> bool:
    """The new configuration differs from the serving one in instance groups at most."""
    if record.source is None or found.folder is not None or record.folder is not None:
        return False
    plain = []
    for source in (record.source, found.source):
        config = type(source.config)()
        config.CopyFrom(source.config)
        config.ClearField("instance_group")
        plain.append(config.SerializeToString(deterministic=True))
    return plain[0] == plain[1] and _files(record.fingerprint) == _files(found.fingerprint)


def _files(state: scan.Fingerprint | None) -> dict[str, tuple[int, int]]:
    """The folder's state without its configuration files."""
    return {
        name: value
        for name, value in (state or {}).items()
        if name not in ("config.pbtxt", "config.json") and not name.startswith("configs/")
    }
