"""The interpreter of a model's own environment: a folder, or an archive that is unpacked once.

Rules of archives:
 1. An archive is unpacked once, into a folder of the cache that is named by the digest of its content. Models and
    servers that need it at the same time wait for the first, by a lock file. A folder without the file COMPLETE was
    left by an interrupted unpacking; it is removed and unpacked again.
 2. No member may lead out of that folder: no absolute name, no `..`, no device, no link to something outside, no name
    that passes through a link or replaces one. The exception is bin/python*, which in a virtual environment is a link
    to the interpreter that made it.
 3. Members belong to the user that the model runs as, without set-user-id bits, writable by nobody else. Each user has
    folders of its own. Nobody else reaches a folder before it is complete.
 4. An archive that needs more space than the disk has is refused while it is unpacked.
 5. What an archive brings runs as the model: with its user, variables and limits (conda-unpack).
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import posixpath
import shutil
import stat
import subprocess
import tarfile
import tempfile
import threading
from pathlib import Path
from typing import Any

from neptrio.backends.python.limits import launched
from neptrio.errors import InvalidArgument

log = logging.getLogger("neptrio.python")

COMPLETE = ".neptrio-complete"
UNPACK_SECONDS = 300  # for conda-unpack to rewrite paths
RESERVE_BYTES = 256 << 20  # of disk that an archive may not take
_lock = threading.Lock()
_digests: dict[tuple[str, int, int], str] = {}  # (path, mtime, size) -> content


def cache_directory(settings: dict[str, str]) -> Path:
    """Where archives are unpacked: --backend-config=python,environment-cache-directory=DIR, or the
    user's cache folder."""
    given = settings.get("environment-cache-directory")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        base = tempfile.gettempdir()
    return Path(base) / "neptrio" / "environments"


def _check_passable(cache: Path, user: list[int]) -> None:
    """Raises InvalidArgument where the user of a model cannot reach what is unpacked into the folder."""
    for folder in cache.resolve().parents:
        found = folder.stat()
        passes = found.st_mode & 0o001
        passes |= found.st_uid == user[0] and found.st_mode & 0o100
        passes |= found.st_gid == user[1] and found.st_mode & 0o010
        if not passes:
            raise InvalidArgument(
                f"user {user[0]} (RUN_AS_UID) cannot pass through '{folder}' to environments unpacked into '{cache}': "
                "name another folder with --backend-config=python,environment-cache-directory=DIR"
            )


def variables(python: str, given: dict[str, str]) -> dict[str, str]:
    """The variables `given`, changed for the interpreter of another environment: without those of the server's own
    environment, and with that environment's programs first in PATH, as its bin/activate does."""
    kept = {k: v for k, v in given.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    kept["PATH"] = os.pathsep.join((os.path.dirname(python), kept.get("PATH", os.defpath)))
    return kept


def environment_python(
    path: str, model_dir: Path, cache: Path, environ: dict[str, str], limits: dict[str, Any]
) -> str:
    """The interpreter of an EXECUTION_ENV_PATH; `environ` and `limits` are those of the model's processes. Raises
    InvalidArgument when there is none."""
    place = Path(path.replace("$$TRITON_MODEL_DIRECTORY", str(model_dir)))
    if place.is_dir():
        python = place / "bin" / "python"
        if os.access(python, os.X_OK):
            return str(python)
        raise InvalidArgument(
            f"EXECUTION_ENV_PATH '{place}' is no virtual environment: expected a folder with bin/python"
        )
    if not place.is_file():
        raise InvalidArgument(
            f"EXECUTION_ENV_PATH '{place}' does not exist: expected a virtual environment's folder or a "
            ".tar.gz archive of one (conda-pack)"
        )
    with _lock:
        try:
            return _unpacked(place, cache, environ, limits)
        except (OSError, EOFError, tarfile.TarError) as error:
            raise InvalidArgument(
                f"EXECUTION_ENV_PATH '{place}' cannot be unpacked into '{cache}': {error}"
            ) from None


def _digest(archive: Path) -> str:
    status = archive.stat()
    key = (str(archive), status.st_mtime_ns, status.st_size)
    if key not in _digests:
        with archive.open("rb") as file:
            _digests[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _digests[key]


def _unpacked(archive: Path, cache: Path, environ: dict[str, str], limits: dict[str, Any]) -> str:
    user = limits.get("user")
    name = _digest(archive) if user is None else f"{_digest(archive)}-{user[0]}-{user[1]}"
    folder = cache / name
    if not (folder / COMPLETE).is_file():
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        if user is not None:  # it has to pass through, to what it knows the name of
            _check_passable(cache, user)
            cache.chmod(cache.stat().st_mode | 0o111)
        with (cache / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / COMPLETE).is_file():
                shutil.rmtree(folder, ignore_errors=True)
                try:
                    _unpack(archive, folder, environ, limits)
                except BaseException:
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
    python = _python_in(folder)
    if python is None:
        raise InvalidArgument(
            f"EXECUTION_ENV_PATH '{archive}' is no environment: the archive has no bin/python"
        )
    return str(python)


def _python_in(folder: Path) -> Path | None:
    """bin/python of the folder, or of the only folder in it."""
    inner = [entry for entry in folder.iterdir() if entry.is_dir()]
    for root in (folder, *(inner if len(inner) == 1 else ())):
        python = root / "bin" / "python"
        if os.access(python, os.X_OK):
            return python
    return None


def _unpack(archive: Path, folder: Path, environ: dict[str, str], limits: dict[str, Any]) -> None:
    user, group = limits.get("user") or (os.getuid(), os.getgid())
    log.info("unpacking '%s' into '%s'", archive, folder)
    folder.mkdir(mode=0o700)
    options: dict[str, Any] = {}
    if hasattr(tarfile, "fully_trusted_filter"):
        options["filter"] = "fully_trusted"  # _problem() checks members; tarfile's filters refuse bin/python
    links: set[str] = set()
    with tarfile.open(archive, "r:*") as tar:
        for member in tar:
            problem = _problem(member, links)
            if problem:
                raise InvalidArgument(f"EXECUTION_ENV_PATH '{archive}': member '{member.name}' {problem}")
            if member.size > shutil.disk_usage(folder).free - RESERVE_BYTES:
                raise InvalidArgument(
                    f"EXECUTION_ENV_PATH '{archive}': no space for member '{member.name}' ({member.size} bytes)"
                )
            member.uid, member.gid, member.uname, member.gname = user, group, "", ""
            member.mode = member.mode & 0o755 | stat.S_IRUSR | stat.S_IWUSR
            if member.isdir():
                member.mode |= stat.S_IXUSR
            tar.extract(member, folder, **options)
    if limits.get("user"):
        os.chown(folder, user, group)  # only now: what is extracted later could be led elsewhere
    python = _python_in(folder)
    fix = python.parent / "conda-unpack" if python is not None else None
    if python is not None and fix is not None and fix.is_file():
        try:
            program, env = launched(
                [str(python), str(fix)], variables(str(python), environ), {**limits, "nice": None}
            )
            subprocess.run(
                program,
                check=True,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=UNPACK_SECONDS,
                text=True,
                env=env,
                process_group=0,  # as in _process/template.py
            )
        except (subprocess.SubprocessError, OSError) as error:
            text = getattr(error, "stderr", None) or error
            log.warning("conda-unpack of '%s' failed: %s", archive, text)
    # not where a link leads that was put there
    os.close(os.open(folder / COMPLETE, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def _problem(member: tarfile.TarInfo, links: set[str]) -> str:
    """Why a member is not unpacked, "" when it is; `links` collects the symbolic links."""
    name = posixpath.normpath(member.name)
    if _leads_out(member.name):
        return "leads out of the environment"
    if not (member.isdir() or member.isreg() or member.islnk() or member.issym()):
        return "is neither a file, a folder nor a link"
    parts = name.split("/")
    for i in range(1, len(parts) + 1):
        if "/".join(parts[:i]) in links:
            return "would be written through a link"
    if member.islnk():
        target = posixpath.normpath(member.linkname)
        if _leads_out(member.linkname):
            return f"links to '{member.linkname}', outside of the environment"
        if any("/".join(target.split("/")[:i]) in links for i in range(1, target.count("/") + 2)):
            return "links through a link"
    if member.issym():
        target = posixpath.join(posixpath.dirname(name), member.linkname)
        interpreter = len(parts) in (2, 3) and parts[-2] == "bin" and parts[-1].startswith("python")
        if not interpreter and (member.linkname.startswith("/") or _leads_out(posixpath.normpath(target))):
            return f"links to '{member.linkname}', outside of the environment"
        links.add(name)
    return ""


def _leads_out(name: str) -> bool:
    return name.startswith("/") or ".." in name.split("/")
