"""Makes models from their folders: the part of a load that can fail or take long.

Rules:
 1. Files are read on loader threads (repository.loader_threads); nothing here changes what serves.
 2. A cancelled load leaves its thread behind: what the thread still makes is dropped when it ends.
 3. Every failure is a TritonError with the text and traceback of the model's own error.
 4. A folder that changes while its configuration is read is read again, so that nobody serves half a file.
    Later changes (weights replaced during the load) are noticed by the next load or poll.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from neptrio.backends import registry
from neptrio.config import defaults, groups, validate_config
from neptrio.config import model_config as model_config
from neptrio.config.misplaced import hinted, hints, pointers
from neptrio.config.model_config import ConfigSource
from neptrio.config.no_effect import fields_without_effect
from neptrio.errors import Internal, InvalidArgument, Killed, TritonError, Unavailable, meant
from neptrio.execution.backend import Backend, LoadContext
from neptrio.execution.model_host import ModelHost
from neptrio.foreign import summary, text_of
from neptrio.loop import allocator, threads
from neptrio.loop.mailbox import CompletionQueue
from neptrio.observe.memory import MemoryProbe
from neptrio.repository import override, scan
from neptrio.repository.loader_threads import LoaderThreads
from neptrio.repository.model import Model, too_long
from neptrio.repository.override import Folder, LoadParameters
from neptrio.repository.regroup import Regrouping
from neptrio.repository.repositories import Repositories
from neptrio.scheduling.base import LoopServices
from neptrio.settings import Settings

log = logging.getLogger("neptrio.repository")

READS = 5  # of a folder that changes while it is read; after these the last reading is used


Building = Model | Regrouping  # a load's product; its stop() undoes it


@dataclass(frozen=True)
class Found:
    """A model's folder and configuration as a load found them."""

    model_dir: Path
    source: ConfigSource  # name and backend are filled in, the rest is as it was given
    fingerprint: scan.Fingerprint
    versions: list[int]  # those that the version policy selects, ascending
    folder: Folder | None = None  # the temporary folder of a file override
    listed: bool = True  # a repository has a folder of that name
    written: Any = None  # inference.ModelConfig, before anything was filled in
    digest: str = ""  # scan.digest() of the folder; "" where a load call has brought configuration or files

    @property
    def place(self) -> Path | None:
        """The folder of the repository, None where the files came with the load call."""
        return None if self.folder is not None else self.model_dir.parent


class PollFailure(Exception):
    """The folder or its configuration cannot be used; the message says why."""

    fingerprint: scan.Fingerprint | None = None  # the folder's state before it was read
    listed = False  # a repository has a folder of that name


class ModelBuilder:
    """Reads folders and makes models. Used on the trio thread, works on loader threads."""

    def __init__(
        self,
        settings: Settings,
        repositories: Repositories,
        loop: LoopServices,
        completions: CompletionQueue,
        host: ModelHost,
        probe: MemoryProbe,
    ) -> None:
        self._settings = settings
        self._repositories = repositories
        self._loop = loop
        self._completions = completions
        self._memory = probe
        self._threads = LoaderThreads(settings.model_load_thread_count, loop)
        self._host = host

    @property
    def left_behind(self) -> int:
        """Threads of cancelled loads that are still running."""
        return self._threads.left_behind

    async def fingerprint(self, name: str, chosen: Path | None) -> scan.Fingerprint | None:
        """The current state of the model's folder; None when no folder or several have that name and none of them is in
        the repository `chosen`."""

        def look() -> scan.Fingerprint | None:
            folders = _preferred(self._repositories.folders(name), chosen)
            try:
                return self._repositories.state(folders[0]) if len(folders) == 1 else None
            except (OSError, Unavailable):
                return None

        return await threads.run(look, abandon_on_cancel=True)

    async def find(self, name: str, parameters: LoadParameters, chosen: Path | None) -> Found:
        """The folder and configuration to load. Raises PollFailure, or InvalidArgument for broken base64.

        `chosen` is the repository that an earlier load call named, which decides where several have such a folder.
        """
        found: Found = await self._threads.run(lambda: self._find(name, parameters, chosen), _forget)
        return found

    def _find(self, name: str, parameters: LoadParameters, chosen: Path | None) -> Found:
        folder: Folder | None = None
        state: scan.Fingerprint | None = None
        files = override.decode(parameters.files)
        folders: list[Path] = []
        try:
            folders = _preferred(self._repositories.folders(name, parameters.repository), chosen)
            # unreachable storage does not delay models that are known not to be there
            if not folders and not files:
                self._repositories.refresh()
                folders = _preferred(self._repositories.folders(name, parameters.repository), chosen)
            if files:
                folder = override.write(files)
                model_dir = folder.path
            elif len(folders) > 1:
                raise PollFailure(scan.DUPLICATE)
            elif not folders:
                no_model = self._repositories.no_model(name, parameters.repository)
                if self._settings.auth_config is None:  # tokens may keep names from whoever asks
                    no_model += meant(name, self._repositories.names(parameters.repository))
                raise PollFailure("; ".join((no_model, *self._repositories.problems)))
            else:
                model_dir = folders[0]
                state = self._repositories.localise(model_dir)
                if state is not None:  # nobody writes to it now
                    return self._read(name, model_dir, parameters, state)
                self._refuse_links(model_dir)
            for attempt in range(1, READS + 1):
                state = scan.fingerprint(model_dir, self._repositories.roots)
                try:
                    found = self._read(name, model_dir, parameters, state, folder, bool(folders))
                except (TritonError, OSError):
                    if attempt == READS or not self._changed(model_dir, state):
                        raise
                else:
                    if attempt == READS or not self._changed(model_dir, state):
                        return found
            raise AssertionError("the last attempt returns or raises")
        except Exception as error:
            _release(folder)
            if isinstance(error, (PollFailure, TritonError, OSError)):
                failure = PollFailure(self._repositories.shown(text_of(error)))
            else:
                log.exception("reading the folder of model '%s' failed", name)
                failure = PollFailure(summary(error))
            failure.fingerprint, failure.listed = state, bool(folders)
            raise failure from None

    def _changed(self, model_dir: Path, state: scan.Fingerprint) -> bool:
        """True when the folder has changed since `state`: what was read may be half of something."""
        return scan.fingerprint(model_dir, self._repositories.roots) != state

    def _read(
        self,
        name: str,
        model_dir: Path,
        parameters: LoadParameters,
        state: scan.Fingerprint,
        folder: Folder | None = None,
        listed: bool = True,
    ) -> Found:
        if parameters.config is not None:
            where = "load parameter 'config'"
            source = ConfigSource(model_config.parse_json(parameters.config, where), where, parameters.config)
        elif folder is not None:
            raise PollFailure("files were given without the parameter 'config'")
        else:
            source = model_config.read(model_dir, self._settings.model_config_name)
            if self._repositories.named_by_flag(model_dir):
                source.config.name = name
        written = model_config.new_config()
        written.CopyFrom(source.config)
        defaults.identify(source, name, model_dir, not self._settings.disable_auto_complete_config)
        for problem in validate_config.given(source, source.config, model_dir):
            raise InvalidArgument(str(problem))
        return Found(
            model_dir,
            source,
            state,
            scan.wanted(source.config, scan.versions(model_dir)),
            folder,
            listed,
            written,
            "" if parameters.config is not None or folder is not None else scan.digest(state),
        )

    def _refuse_links(self, model_dir: Path) -> None:
        links = scan.leading_out(model_dir, self._repositories.roots)
        if links:
            raise PollFailure(f"{links[0]}: {scan.link_text(links[0])}")

    async def build(
        self,
        name: str,
        version: int,
        found: Found,
        made: list[Building],
        tell: Callable[[str], None],
        behind: Callable[[int], None],
    ) -> Model:
        """Makes and starts a model that does not serve yet.

        It is put into `made` as soon as it holds anything; `tell` is called with the name of each phase, `behind` with 1
        when a thread is left behind and with -1 when that has ended. A failed build is tried again
        --model-load-retry-count times, and once more where the model's process was killed from outside, except when a
        thread of the model hangs. Raises TritonError.
        """
        tries, spare = self._settings.model_load_retry_count + 1, 1
        while True:
            try:
                return await self._build(name, version, found, made, tell, behind)
            except TritonError as error:
                if isinstance(error, Killed) and spare:
                    spare -= 1
                else:
                    tries -= 1
                held = [b for b in made if isinstance(b, Model) and b.version == str(version)]
                if not tries or held:
                    pointer = await self._threads.run(
                        lambda: pointers(found.model_dir / str(version)), lambda late: None
                    )
                    if pointer and "Git LFS" not in error.message:
                        error.message = f"{error.message}; {pointer}"
                    raise
                log.warning("loading '%s' version %d is tried again, it failed: %s", name, version, error)

    async def _build(
        self,
        name: str,
        version: int,
        found: Found,
        made: list[Building],
        tell: Callable[[str], None],
        behind: Callable[[int], None],
    ) -> Model:
        own = model_config.new_config()
        own.CopyFrom(found.source.config)
        context = LoadContext(
            name, version, found.model_dir, found.model_dir / str(version), own, self._settings, self._host
        )

        def limits() -> tuple[type[Backend], float | None]:
            folders = (context.version_dir, context.model_dir)
            try:
                backend_class = registry.find_for(own, self._settings, folders)
            except InvalidArgument as error:
                raise _asked_for_at(found.source, error) from None
            registry.check_runtime(own, backend_class)
            return backend_class, backend_class.time_limit(context)

        def read() -> Backend:
            for problem in validate_config.files(found.source, own, found.model_dir):
                raise InvalidArgument(str(problem))
            if not self._settings.disable_auto_complete_config:
                backend_class.auto_complete(context)
            defaults.fill(own, backend_class)
            validate_config.check(found.source, own, found.model_dir)
            for at, text in fields_without_effect(own):
                log.warning("model '%s': %s", name, found.source.problem(at, text))
            for hint in (
                hints(found.model_dir, own.default_model_filename) if version == max(found.versions) else ()
            ):
                log.warning("model '%s': %s: %s", name, found.model_dir, hint)
            backend = backend_class(context)
            backend.load()
            return backend

        try:
            with self._allocating(), self._memory.measure() as measured:
                backend_class, limit = await self._threads.run(limits, lambda late: None)
                with trio.move_on_after(math.inf if limit is None else limit) as scope:
                    backend = await self._threads.run(
                        read, lambda late: late.unload(), context.abandonment, behind
                    )
                if scope.cancelled_caught:
                    raise too_long("auto_complete_config or the import", context, limit)
                measured.weigh(_weight(backend, found, version))
                model = Model(context, backend, self._loop, self._completions)
                model.written = found.written
                model.least_bytes = 0 if backend.own_processes else _files_of(found, version)
                if own.backend == "onnxruntime":  # which does not tell what it holds on GPUs
                    on_gpus = Counter(place.device for place in groups.placements(own) if place.kind == "GPU")
                    size = _files_of(found, version)
                    model.least_device_bytes = {gpu: size * count for gpu, count in on_gpus.items()}
                made.append(model)
                try:
                    await model.start(tell)
                except Exception:
                    if not model.stuck:  # it has stopped itself
                        made.remove(model)
                    raise
                if backend.own_processes:
                    await self._threads.run(model.measure_processes, lambda late: None)
                elif (
                    self._settings.host_memory_budget
                ):  # else what the load has freed would count as the model's
                    await self._threads.run(allocator.give_back, lambda late: None)
            model.measured(measured)
        except TritonError:
            raise
        except Exception as error:
            log.exception("loading %s version %d failed", name, version)
            raise Internal(summary(error)) from error
        return model

    def _allocating(self) -> AbstractContextManager[None]:
        """Around a load: how the allocator takes memory for it. Mapping it takes time, which is spent where there is a budget."""
        return allocator.mapping_weights() if self._settings.host_memory_budget else nullcontext()

    async def regroup(
        self, model: Model, found: Found, made: list[Building], tell: Callable[[str], None]
    ) -> Regrouping:
        """Prepares the change of `model`'s instances to those of the folder's configuration, without carrying it out.

        The Regrouping is put into `made` as soon as it holds anything; `tell` is called with the name of each
        phase. Raises TritonError.
        """

        def complete() -> Any:
            config = groups.reset(model.config, found.source.config)
            defaults.version_policy(config)
            defaults.instance_groups(config, type(model.backend))
            validate_config.check(found.source, config, found.model_dir)
            model.backend.regroup(config)
            return config

        try:
            with self._allocating(), self._memory.measure() as measured:
                regrouping = Regrouping(model, await self._threads.run(complete, lambda late: None))
                regrouping.written = found.written
                made.append(regrouping)
                await regrouping.start(tell)
                if model.backend.own_processes:
                    await self._threads.run(model.measure_processes, lambda late: None)
            regrouping.measured = measured
        except TritonError:
            raise
        except Exception as error:
            log.exception("changing the instances of %s version %s failed", model.name, model.version)
            raise Internal(summary(error)) from error
        return regrouping


ANY_CODE = 16 << 20  # bytes that code of a model's own is expected to allocate in this process


def _weight(backend: Backend, found: Found, version: int) -> int:
    """The bytes that a version is expected to take of this process (observe.memory)."""
    if backend.own_processes:
        return 0
    return _files_of(found, version) + (ANY_CODE if backend.runs_code_here else 0)


def _files_of(found: Found, version: int) -> int:
    return sum(
        size for name, (_, size) in found.fingerprint.items() if name.startswith(f"{version}/") and size > 0
    )


def _preferred(folders: list[Path], chosen: Path | None) -> list[Path]:
    """Of several folders the one in the repository `chosen`, if there is one."""
    if len(folders) > 1 and chosen is not None:
        return [folder for folder in folders if folder.parent == chosen] or folders
    return folders


def _release(folder: Folder | None) -> None:
    if folder is not None:
        folder.release()


def _forget(found: Found) -> None:
    _release(found.folder)


def no_version(name: str, model_dir: Path) -> InvalidArgument:
    """The error for a folder without a version to load."""
    text = (
        f"load failed for model '{name}': at least one version must be available under the version "
        f"policy of model '{name}'"
    )
    return InvalidArgument(f"{hinted(text, model_dir)}\n")


def _asked_for_at(source: ConfigSource, error: InvalidArgument) -> InvalidArgument:
    """The error of a backend that is not there, with the line that asks for it behind it: what a Triton server says comes first."""
    at = source.problem(defaults.asking(source), "")
    return InvalidArgument(f"{error} ({at.file}:{at.line}: {at.field})" if at.line else str(error))


def version_failed(name: str, version: int, reason: str) -> InvalidArgument:
    """The error for a load of which a version failed."""
    return InvalidArgument(
        f"load failed for model '{name}': version {version} is at UNAVAILABLE state: {reason};\n"
    )


def poll_failed(name: str, why: str) -> Internal:
    """The error for a folder or configuration that cannot be used."""
    return Internal(
        f"failed to load '{name}', failed to poll from model repository{f': {why}' if why else ''}"
    )
