"""What lies in a model repository: model folders and their version folders."""

from __future__ import annotations

from pathlib import Path

from neptrio.errors import InvalidArgument


def model_dirs(repositories: tuple[Path, ...]) -> dict[str, list[Path]]:
    """Model name -> the folders of that name, over all repositories, sorted by name."""
    found: dict[str, list[Path]] = {}
    for repository in repositories:
        if not repository.is_dir():
            raise InvalidArgument(f"failed to open model repository '{repository}': no such folder")
        for entry in repository.iterdir():
            if entry.is_dir() and not entry.name.startswith("."):
                found.setdefault(entry.name, []).append(entry)
    return dict(sorted(found.items()))


def versions(model_dir: Path) -> list[int]:
    """The version numbers of a model's folder, ascending; other names are not versions."""
    found = []
    for entry in model_dir.iterdir():
        name = entry.name
        if name.isascii() and name.isdigit() and not (len(name) > 1 and name[0] == "0") and entry.is_dir():
            found.append(int(name))
    return sorted(found)


def wanted(config: object, available: list[int]) -> list[int]:
    """The versions that config.version_policy selects among those available."""
    policy = config.version_policy  # type: ignore[attr-defined]
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return available
    if choice == "specific":
        return [v for v in available if v in set(policy.specific.versions)]
    count = policy.latest.num_versions or 1
    return available[-count:]
