"""A repository in cloud storage: any fsspec URL, copied model by model to local folders when models are loaded.

The problem: backends read local files; storage is slow and may fail halfway; and its contents may change while they
are read. The choice: every model has a local folder, which is brought up to date when the model is loaded (or
when polling has seen a change) and replaced as a whole.

Rules:
 1. A loader never sees part of a download: files go to a separate folder, which is renamed to the model's folder
    once everything is there.
 2. A file is fetched again only if its ETag has changed (or its checksum, or else its size or time); otherwise it
    is linked from the previous folder. Files that an earlier server left are used only if they still have the
    SHA-256 noted then.
 3. After a fetch the model is listed again; if it has changed meanwhile, the fetch starts over.
 4. When storage cannot be reached the last listing stays valid, and its models go on serving.
 5. Credentials are left to fsspec (its configuration and the usual environment variables); they never appear in
    a message.
 6. fsspec is imported only when a URL is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neptrio import extras
from neptrio.errors import InvalidArgument, TritonError, Unavailable
from neptrio.foreign import summary
from neptrio.repository import override

log = logging.getLogger("neptrio.repository")

ATTEMPTS = 3  # of fetching a model that changes meanwhile
CHECKSUMS = ("ETag", "etag", "e_tag", "md5Hash", "md5", "content_md5", "Content-MD5", "checksum", "crc32c")
TIMES = ("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "modified", "created")
MANIFEST = ".neptrio-manifest.json"  # beside the models' folders; describes the files of all of them
Fingerprint = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class CloudStatistics:
    """What a repository in cloud storage has fetched, and how often it was listed."""

    url: str
    models: int
    files_fetched: int
    files_kept: int
    bytes_fetched: int


@dataclass(frozen=True)
class _Remote:
    """A file in the storage. `key` changes when its contents change."""

    path: str
    key: str
    size: int


class CloudRepository:
    """One URL and the local copies of its models. Any thread; every method may take long.

    `single` is --model-name: when the URL is the folder of one model, with a configuration or version folders, this
    is what it is called (`is_model`).
    """

    def __init__(self, url: str, cache: Path | None, single: str = "") -> None:
        self.url = re.sub(r"://[^/@]*@", "://", url)  # without credentials, to be shown
        self.problem = ""  # why the last listing failed
        self.is_model = False  # the URL is the folder of one model, as the last listing saw it
        self._single = single
        self._url = url
        self._cache = cache
        self._own = cache is None
        self._names: dict[str, None] = {}  # in their order; replaced as a whole, since other threads read it
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._folder: Path | None = None
        self._manifest: dict[str, dict[str, Any]] = {}
        self._verified: set[str] = set()  # models whose local files this process has fetched or verified
        self._fetched = self._kept = self._bytes = 0

    def statistics(self) -> CloudStatistics:
        """What was fetched so far."""
        return CloudStatistics(self.url, len(self._names), self._fetched, self._kept, self._bytes)

    @property
    def folder(self) -> Path:
        """The folder with the models' local folders; created at the first use."""
        with self._lock:
            if self._folder is None:
                if self._cache is None:
                    base = Path(tempfile.mkdtemp(prefix="neptrio-cloud-"))
                else:
                    base = self._cache / hashlib.sha256(self._url.encode()).hexdigest()[:16]
                (base / "models").mkdir(parents=True, exist_ok=True)
                shutil.rmtree(base / "work", ignore_errors=True)
                (base / "work").mkdir()
                with contextlib.suppress(OSError, ValueError):
                    self._manifest = json.loads((base / MANIFEST).read_text())
                self._folder = base
            return self._folder / "models"

    @property
    def made_folder(self) -> Path | None:
        """The folder, where it was created; never waits for the disk."""
        base = self._folder
        return base / "models" if base is not None else None

    def close(self) -> None:
        """Removes the local copies, unless they are kept in --model-repository-cache."""
        if self._own and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------ the storage

    @contextlib.contextmanager
    def _storage(self) -> Iterator[tuple[Any, str]]:
        """(file system, path of the repository). Raises Unavailable for any error of the storage."""
        try:
            try:
                import fsspec
            except ImportError:
                raise Unavailable(
                    f"repository '{self.url}' needs fsspec: {extras.install('cloud')}, or the storage's own package"
                ) from None
            storage, root = fsspec.core.url_to_fs(self._url)
            yield storage, root.rstrip("/")
        except TritonError:
            raise
        except Exception as error:
            reason = summary(error).replace(self._url, self.url)
            raise Unavailable(f"repository '{self.url}' cannot be read: {reason}") from None

    def refresh(self) -> None:
        """Lists the models. A failure keeps the last listing and sets `problem`."""
        try:
            with self._storage() as (storage, root):
                storage.invalidate_cache()
                found = storage.ls(root, detail=True)
                is_model = bool(self._single) and _is_model(storage, found)
        except Unavailable as error:
            if self.problem != str(error):
                log.error("%s", error)
            self.problem = str(error)
            return
        self.is_model = is_model
        names = {_leaf(entry["name"]) for entry in found if entry["type"] == "directory"}
        if is_model:
            names = {self._single}
        self._names = dict.fromkeys(sorted(name for name in names if name and not name.startswith(".")))
        self.problem = ""

    @property
    def names(self) -> Collection[str]:
        """The models of the last listing, sorted."""
        return self._names.keys()

    def model_dir(self, name: str) -> Path | None:
        """The local folder of one model, which exists once localise() was called for it; None for one that is not listed."""
        return self.folder / name if name in self._names else None

    def model_dirs(self) -> dict[str, Path]:
        """Model name -> model_dir() of it."""
        folder = self.folder
        return {name: folder / name for name in self._names}

    def _list(self, name: str) -> tuple[dict[str, _Remote], tuple[str, ...]]:
        """(relative path -> file, relative paths of folders) of a model."""
        with self._storage() as (storage, root):
            storage.invalidate_cache()
            top = root if self.is_model else f"{root}/{name}"
            found = storage.find(top, withdirs=True, detail=True)
            files: dict[str, _Remote] = {}
            folders = []
            for path, info in found.items():
                relative = path.rstrip("/")[len(top) :].lstrip("/")
                if not relative:
                    continue
                try:
                    override.parts_of(relative)
                except InvalidArgument:
                    raise Unavailable(
                        f"repository '{self.url}' holds '{name}/{relative[:80]}', which is no file name here"
                    ) from None
                if info["type"] == "directory" or path.endswith("/"):
                    folders.append(relative)
                else:
                    files[relative] = self._remote(storage, path, info)
        return files, tuple(sorted(folders))

    def _remote(self, storage: Any, path: str, info: dict[str, Any]) -> _Remote:
        key = _key(info)
        if not key or info.get("size") is None:
            info = storage.info(path)
            key = _key(info)
        size = info.get("size")
        return _Remote(path, f"{key}:{size}", -1 if size is None else int(size))

    def state(self, name: str) -> Fingerprint:
        """The model's state in the storage, to be compared with an earlier one. Raises Unavailable."""
        return _fingerprint(*self._list(name))

    # ------------------------------------------------------------ the local copies

    def localise(self, name: str) -> Fingerprint:
        """Brings the model's local folder up to date and returns its state. Raises Unavailable."""
        _ = self.folder  # creates the folder and reads an earlier server's manifest
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            for _ in range(ATTEMPTS):
                files, folders = self._list(name)
                if not files and not folders:
                    raise Unavailable(f"repository '{self.url}' has no model '{name}' any more")
                before = self._usable(name)
                target = self.folder / name
                keys = {path: file.key for path, file in files.items()}
                if os.path.isdir(target) and {p: e["key"] for p, e in before.items()} == keys:
                    self._kept += len(files)
                    return _fingerprint(files, folders)
                made = Path(tempfile.mkdtemp(dir=self.folder.parent / "work"))
                try:
                    manifest = self._fetch(made, target, files, folders, before)
                    if self._list(name) != (files, folders):
                        continue
                    self._put(name, made, target, manifest)
                    return _fingerprint(files, folders)
                except OSError as error:
                    raise Unavailable(
                        f"model '{name}' of repository '{self.url}' cannot be written to {self.folder}: {error}"
                    ) from None
                finally:
                    shutil.rmtree(made, ignore_errors=True)
            raise Unavailable(f"model '{name}' of repository '{self.url}' kept changing while it was fetched")

    def _usable(self, name: str) -> dict[str, dict[str, str]]:
        """The manifest's entries of a model whose local files are undamaged."""
        known: dict[str, dict[str, str]] = self._manifest.get(name, {})
        if name not in self._verified:
            folder = self.folder / name
            known = {path: e for path, e in known.items() if _digest(folder / path) == e.get("sha256")}
            self._verified.add(name)
        return known

    def _fetch(
        self,
        made: Path,
        old: Path,
        files: dict[str, _Remote],
        folders: tuple[str, ...],
        before: dict[str, dict[str, str]],
    ) -> dict[str, dict[str, str]]:
        manifest: dict[str, dict[str, str]] = {}
        for folder in folders:
            made.joinpath(folder).mkdir(parents=True, exist_ok=True)
        for path, file in files.items():
            target = made / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if before.get(path, {}).get("key") == file.key and os.path.isfile(old / path):
                os.link(old / path, target)
                manifest[path] = before[path]
                self._kept += 1
                continue
            with self._storage() as (storage, _):
                storage.get_file(file.path, str(target))
            size = target.stat().st_size
            if file.size >= 0 and size != file.size:
                raise Unavailable(
                    f"'{file.path}' of repository '{self.url}' has {file.size} bytes, {size} came: fetched in part"
                )
            manifest[path] = {"key": file.key, "sha256": _digest(target)}
            self._fetched += 1
            self._bytes += size
        return manifest

    def _put(self, name: str, made: Path, target: Path, manifest: dict[str, dict[str, str]]) -> None:
        made.chmod(0o755)
        trash = made.with_name(made.name + "-old")
        if os.path.exists(target):
            target.rename(trash)
        made.rename(target)
        shutil.rmtree(trash, ignore_errors=True)
        with self._lock:
            self._manifest[name] = manifest
            self._verified.add(name)
            base = target.parent.parent
            part = base / (MANIFEST + ".part")
            part.write_text(json.dumps(self._manifest))
            part.replace(base / MANIFEST)


def _is_model(storage: Any, listing: list[dict[str, Any]]) -> bool:
    """Whether what is listed is the folder of one model: a configuration, or numbers that are no models."""
    for entry in listing:
        name = _leaf(entry["name"])
        if entry["type"] != "directory":
            if name == "config.pbtxt":
                return True
        elif name.isascii() and name.isdigit():
            below = {_leaf(file["name"]) for file in storage.ls(entry["name"], detail=True)}
            if below and "config.pbtxt" not in below and not any(one.isdigit() for one in below):
                return True
    return False


def _leaf(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _key(info: dict[str, Any]) -> str:
    """A value that changes with the file's contents, "" when the storage gives none."""
    for names in (CHECKSUMS, TIMES):
        for name in names:
            if info.get(name):
                return f"{name}={info[name]}"
    return ""


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _fingerprint(files: dict[str, _Remote], folders: tuple[str, ...]) -> Fingerprint:
    found = {
        path: (int.from_bytes(hashlib.sha256(file.key.encode()).digest()[:8], "big"), file.size)
        for path, file in files.items()
    }
    return found | {folder + "/": (0, -1) for folder in folders}
