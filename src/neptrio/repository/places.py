"""The repositories of the command line: local folders and cloud storage, seen as one.

Local folders are looked at when they are asked for; what lies in cloud storage is what refresh()
last saw. refresh(), state() and localise() may take long: they are called on loader threads.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import trio

from neptrio.repository import scan
from neptrio.repository.cloud import CloudRepository
from neptrio.settings import Settings

LONGEST_SHOWN = 80  # letters of a name in a message


class Places:
    """Where models are."""

    def __init__(self, settings: Settings) -> None:
        self._lock = threading.Lock()
        self._began = 0.0
        self._follow = settings.follow_external_links
        self._named = tuple(dict.fromkeys(str(place) for place in settings.model_repository))
        self._local = tuple(place for place in settings.model_repository if isinstance(place, Path))
        self.cloud = tuple(
            CloudRepository(place, settings.model_repository_cache)
            for place in dict.fromkeys(settings.model_repository)
            if isinstance(place, str)
        )

    def model_dirs(self) -> dict[str, list[Path]]:
        """Model name -> the folders of that name, over all repositories, sorted by name."""
        found = scan.model_dirs(self._local)
        for repository in self.cloud:
            for name, folder in repository.model_dirs().items():
                found.setdefault(name, []).append(folder)
        return dict(sorted(found.items()))

    def no_model(self, name: str) -> str:
        """Why there is nothing to load under a name that model_dirs() does not have."""
        where = ", ".join(f"'{place}'" for place in self._named)
        return f"there is no folder '{name[:LONGEST_SHOWN]}' in the model repositories {where}"

    async def listed(self) -> dict[str, list[Path]]:
        """model_dirs() made on a worker thread: the folder may be on a slow network. A caller that is
        cancelled leaves the thread behind."""
        return await trio.to_thread.run_sync(self.model_dirs, abandon_on_cancel=True)

    def refresh(self) -> None:
        """Lists what lies in cloud storage; a failure is a repository's `problem`.

        Callers that wait for one another share the next listing.
        """
        asked = time.monotonic()
        with self._lock:
            if self._began >= asked:
                return
            self._began = time.monotonic()
            for repository in self.cloud:
                repository.refresh()

    @property
    def problems(self) -> list[str]:
        """Why repositories could not be listed."""
        return [repository.problem for repository in self.cloud if repository.problem]

    @property
    def roots(self) -> tuple[str, ...] | None:
        """The folders that links may lead to, None when they may lead anywhere."""
        if self._follow:
            return None
        return scan.real((*self._local, *(repository.folder for repository in self.cloud)))

    def localise(self, folder: Path) -> scan.Fingerprint | None:
        """Brings a model's folder up to date: its state in the storage, None for a local repository.

        Raises Unavailable.
        """
        repository = self._cloud_of(folder)
        return None if repository is None else repository.localise(folder.name)

    def state(self, folder: Path) -> scan.Fingerprint:
        """What tells whether a model changed. Raises OSError or Unavailable."""
        repository = self._cloud_of(folder)
        if repository is not None:
            return repository.state(folder.name)
        return scan.fingerprint(folder, self.roots)

    def _cloud_of(self, folder: Path) -> CloudRepository | None:
        return next((r for r in self.cloud if folder.parent == r.folder), None)

    def close(self) -> None:
        """Removes the mirrors that nobody wants to keep."""
        for repository in self.cloud:
            repository.close()
