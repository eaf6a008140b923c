"""The repositories of the command line, local folders and cloud storage, behind one interface.

Local folders are read each time; of cloud storage the last listing of refresh() is used. refresh(), state() and
localise() may take long: they are called on loader threads.

A client may name one repository: by the name of its folder (the last part of its path or URL) or by the whole path or
URL, as the command line has it or from the root. One name may stand for several repositories, whose models then are as
those of one.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from itertools import chain
from pathlib import Path

from neptrio.config import misplaced
from neptrio.errors import NotFound
from neptrio.limits import shown
from neptrio.loop import threads
from neptrio.repository import remembered_sizes, scan, single_model
from neptrio.repository.cloud import CloudRepository
from neptrio.settings import Settings


class Repositories:
    """Finds models in all repositories."""

    def __init__(self, settings: Settings) -> None:
        self._lock = threading.Lock()
        self._began = 0.0
        self._follow = settings.follow_external_links
        self._named = tuple(dict.fromkeys(str(place) for place in settings.model_repository))
        local = tuple(place for place in settings.model_repository if isinstance(place, Path))
        name = settings.model_name
        single = [place for place in dict.fromkeys(local) if name and single_model.is_model(place)]
        self._singles = {place: single_model.SingleModel(place, name) for place in single}
        self._made = {single.repository for single in self._singles.values()}
        self._local = tuple(self._singles[p].repository if p in self._singles else p for p in local)
        self.cloud = tuple(
            CloudRepository(place, settings.model_repository_cache, name)
            for place in dict.fromkeys(settings.model_repository)
            if isinstance(place, str)
        )
        # no model's folder: whoever starts the server in a repository has traces there
        self._traces = os.path.realpath(settings.trace_dir)
        # what a client may call each repository
        self._called = {kept: _names_of(str(given)) for given, kept in zip(local, self._local, strict=True)}
        self._clouds_called = {cloud: _names_of(cloud.url) for cloud in self.cloud}

    def sizes_file(self, settings: Settings) -> Path | None:
        """Where it is remembered what models hold (repository.remembered_sizes); None where there is no folder for it."""
        if settings.model_cache_directory is not None:
            return settings.model_cache_directory / remembered_sizes.SHOWN
        given = (place for place in settings.model_repository if isinstance(place, Path))
        return next((place / remembered_sizes.HIDDEN for place in given if place not in self._singles), None)

    def select(self, repository: str) -> tuple[tuple[Path, ...], tuple[CloudRepository, ...]]:
        """The local and the cloud repositories that a client calls `repository`, all of them for "". Raises NotFound."""
        if not repository:
            return self._local, self.cloud
        name = repository.rstrip("/") or "/"
        local = tuple(place for place, names in self._called.items() if name in names)
        cloud = tuple(place for place, names in self._clouds_called.items() if name in names)
        if not local and not cloud:
            known = ", ".join(
                f"'{names[0]}'" for names in (*self._called.values(), *self._clouds_called.values())
            )
            raise NotFound(
                f"there is no model repository '{shown(repository)}', expected the name or the path of one of {known}"
            )
        return local, cloud

    def has(self, repository: str, place: Path) -> bool:
        """Whether `place`, the folder that a model's folder lies in, is of that repository. Raises NotFound."""
        local, cloud = self.select(repository)
        return place in local or any(one.made_folder == place for one in cloud)

    def model_dirs(self) -> dict[str, list[Path]]:
        """Model name -> the folders of that name, over all repositories, sorted by name."""
        found = scan.model_dirs(self._local)
        name = os.path.basename(self._traces)
        if name in found:
            found[name] = self._but_traces(found[name])
            if not found[name]:
                del found[name]
        for repository in self.cloud:
            for name, folder in repository.model_dirs().items():
                found.setdefault(name, []).append(folder)
        return dict(sorted(found.items()))

    def folders(self, name: str, repository: str = "") -> list[Path]:
        """The folders of one name, over all repositories or those called `repository`: model_dirs() of it, without a
        listing of all the others. Raises NotFound."""
        local, clouds = self.select(repository)
        in_clouds = (cloud.model_dir(name) for cloud in clouds)
        here = self._but_traces(scan.folders_of(name, local))
        return [*here, *(folder for folder in in_clouds if folder is not None)]

    def _but_traces(self, folders: list[Path]) -> list[Path]:
        """Those of one name, without the folder of the server's traces."""
        if not folders or folders[0].name != os.path.basename(self._traces):
            return folders
        return [folder for folder in folders if os.path.realpath(folder) != self._traces]

    def names(self, repository: str = "") -> dict[str, int]:
        """Model name -> how many repositories, or how many of those called `repository`, have a folder of that name, sorted
        by name. Raises NotFound."""
        local, clouds = self.select(repository)
        places = [self._names(place) for place in dict.fromkeys(local)]
        found = Counter(chain(*places, *(cloud.names for cloud in clouds)))
        return {name: found[name] for name in sorted(found)}

    def _names(self, place: Path) -> list[str]:
        names = scan.names(place)
        traces = os.path.basename(self._traces)
        if traces in names and not self._but_traces([place / traces]):
            names.remove(traces)
        return names

    def no_model(self, name: str, repository: str = "") -> str:
        """Why nothing can be loaded under a name that folders() does not have."""
        if repository:
            return f"there is no folder '{shown(name)}' in the model repository '{shown(repository)}'"
        where = ", ".join(f"'{place}'" for place in self._named)
        return f"there is no folder '{shown(name)}' in the model repositories {where}"

    async def listed(self, repository: str = "") -> dict[str, int]:
        """names() of a worker thread, since the folder may be on a slow network. A cancelled caller leaves the
        thread behind. Raises NotFound."""
        self.select(repository)
        return await threads.run(self.names, repository, abandon_on_cancel=True)

    async def have(self, name: str) -> bool:
        """Whether a repository has a folder of that name: folders() of a worker thread, as listed() is names()."""
        return bool(await threads.run(self.folders, name, abandon_on_cancel=True))

    def refresh(self) -> None:
        """Lists the repositories in cloud storage; the reason of a failure is the repository's `problem`.

        Callers that wait while another one lists share the listing that follows.
        """
        asked = time.monotonic()
        with self._lock:
            if self._began >= asked:
                return
            self._began = time.monotonic()
            for repository in self.cloud:
                repository.refresh()

    def loose(self) -> dict[str, list[str]]:
        """What nobody reads in the local repositories themselves, a sentence for each, by the repository's path."""
        given = (place for place in self._local if place not in self._made)
        return {str(place): hints for place in given if (hints := misplaced.loose(place))}

    @property
    def problems(self) -> list[str]:
        """Why repositories could not be listed."""
        return [repository.problem for repository in self.cloud if repository.problem]

    @property
    def roots(self) -> tuple[str, ...] | None:
        """The folders that symbolic links may lead to; None: links may lead anywhere."""
        if self._follow:
            return None
        return scan.real((*self._local, *self._singles, *(repository.folder for repository in self.cloud)))

    def named_by_flag(self, folder: Path) -> bool:
        """Whether a model's name is --model-name's, whatever its configuration says."""
        repository = self._cloud_of(folder)
        if repository is not None:
            return repository.is_model
        return any(folder.parent == single.repository for single in self._singles.values())

    def shown(self, text: str) -> str:
        """A message with the folders of single models as they were given, instead of the links to them."""
        for folder, single in self._singles.items():
            text = text.replace(str(single.model), str(folder))
        return text

    def localise(self, folder: Path) -> scan.Fingerprint | None:
        """Brings a model's local folder up to date; returns its state in the storage, None for a local repository.

        Raises Unavailable.
        """
        repository = self._cloud_of(folder)
        return None if repository is None else repository.localise(folder.name)

    def state(self, folder: Path) -> scan.Fingerprint:
        """The state of a model's folder, to be compared with an earlier one. Raises OSError or Unavailable."""
        repository = self._cloud_of(folder)
        if repository is not None:
            return repository.state(folder.name)
        return scan.fingerprint(folder, self.roots)

    def _cloud_of(self, folder: Path) -> CloudRepository | None:
        return next((r for r in self.cloud if folder.parent == r.folder), None)

    def close(self) -> None:
        """Removes local copies of cloud storage that are not to be kept, and links to single models."""
        for single in self._singles.values():
            single.close()
        for repository in self.cloud:
            repository.close()


def _names_of(given: str) -> tuple[str, ...]:
    """What a client may call the repository that the command line calls `given`; first the short name."""
    given = given.rstrip("/") or "/"
    if "://" in given:
        return given.rpartition("/")[2] or given, given
    path = os.path.abspath(given)
    return os.path.basename(path) or path, given, path, os.path.realpath(path)
