"""PythonBackend: a model version whose code is a TritonPythonModel class in model.py."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf import json_format

import triton_python_backend_utils as utils
from neptrio.backends.python import examine, limits, template
from neptrio.backends.python.auto_complete import complete_config
from neptrio.backends.python.convert import Reader
from neptrio.backends.python.environment import cache_directory, environment_python
from neptrio.backends.python.instance import InProcessInstance
from neptrio.backends.python.isolated import IsolatedInstance
from neptrio.backends.python.model_runner import OWN_FILES, ModelRunner
from neptrio.backends.python.source import ModelSource
from neptrio.backends.python.template import ModelTemplate, Template
from neptrio.config import code_fields, time_limits
from neptrio.config import model_config as model_config
from neptrio.config.describe_config import to_dict
from neptrio.config.isolation import environment_path, isolated, parameter, sees_devices
from neptrio.config.misplaced import hinted
from neptrio.errors import Internal, InvalidArgument, TritonError, settled
from neptrio.execution.backend import READY_SECONDS, Backend, BackendInstance, LoadContext
from neptrio.foreign import text_of
from neptrio.loop import threads
from triton_python_backend_utils._execute import check_completed, described
from triton_python_backend_utils._host import completing

log = logging.getLogger("neptrio.python")


def apart(context: LoadContext) -> bool:
    """Whether the model runs in processes of its own, by its configuration and the settings. Raises InvalidArgument."""
    return isolated(context.config, settings_of(context))


def settings_of(context: LoadContext) -> dict[str, str]:
    """The --backend-config of `python`, and of the Python-based backend that the model names the environment."""
    found = context.settings.backend_settings("python")
    own = context.settings.backend_settings(context.config.backend)
    return found | {key: own[key] for key in ("execution-env-path",) if key in own}


SHOWN_NAMES = 50  # of variables that a model is not given
Resources = tuple[dict[str, str], dict[str, Any]]  # environment variables, limits


def resources(context: LoadContext, backend: str = "python", config: Any = None) -> Resources:
    """The environment variables and the limits of the model's processes. Raises InvalidArgument.

    `backend` is whose --backend-config decides where the model does not; `config`: None for the context's.
    """
    config = context.config if config is None else config
    settings = context.settings.backend_settings(backend)
    limited = {**limits.limits(config), "withheld": limits.withheld(config, settings)}
    return limits.environment(config, settings), limited


def python_of(context: LoadContext) -> str | None:
    """The path of the Python interpreter in the model's EXECUTION_ENV_PATH or its backend's, None if it uses the server's."""
    path = environment_path(context.config, settings_of(context)) if apart(context) else ""
    if not path:
        return None
    cache = cache_directory(context.settings.backend_settings("python"))
    return environment_python(path, context.model_dir, cache, *resources(context))


def initialize_seconds(context: LoadContext, backend: str = "python") -> float:
    """How long a model may take to import, complete its configuration and initialize, in seconds; `backend` as for
    resources(). Raises InvalidArgument.
    """
    key = "INITIALIZE_TIMEOUT_SECONDS"
    text = parameter(context.config, key) or context.settings.backend_settings(backend).get(
        "initialize-timeout-seconds", "300"
    )
    return time_limits.seconds(text, f"{key} of model '{context.name}'")


def execute_seconds(context: LoadContext, own: bool) -> float | None:
    """After how many seconds an execute() is late and its process is killed; None for no limit. `own`: the model runs in
    processes of its own. Raises InvalidArgument."""
    value = time_limits.execute_seconds(context.config, context.name)
    if value is not None and not own:
        raise InvalidArgument(
            f"parameter 'EXECUTE_TIMEOUT_SECONDS' of model '{context.name}' needs a process of the model's own: leave out "
            "the parameters isolation 'none' and FORCE_CPU_ONLY_INPUT_TENSORS"
        )
    return value


def ready_seconds(context: LoadContext) -> float:
    """How many seconds a model's is_ready() may take. Raises InvalidArgument."""
    text = context.settings.backend_settings("python").get("is-ready-timeout-seconds", str(READY_SECONDS))
    return time_limits.seconds(text, "--backend-config=python,is-ready-timeout-seconds")


class PythonBackend(Backend):
    """Serves `backend: "python"`, and with `shared_file` set, a Python-based backend.

    A Python-based backend is a model.py in the backend directory or in an installed package. It runs all models that name
    it as their backend, so those need no model.py of their own.
    """

    shared_file: Path | None = None
    _template: ModelTemplate | None = None
    _python: str | None = None  # the interpreter of the model's own environment
    _preloads = False
    _isolated: weakref.WeakSet[IsolatedInstance] | None = None  # instances that may tell of memory
    _resources: Resources = ({}, {})
    _config_text = ""  # what models are told of their configuration, as JSON
    default_model_filename = "model.py"

    @classmethod
    def based_on(cls, file: Path) -> type[PythonBackend]:
        """Makes the class of a Python-based backend, whose code is in `file`."""
        # its models have no file of their own that a name could be filled in for
        return type("PythonBasedBackend", (cls,), {"shared_file": file, "default_model_filename": ""})

    @classmethod
    def apart(cls, context: LoadContext) -> bool:
        """Whether the model runs in processes of its own. Raises InvalidArgument."""
        return apart(context)

    @classmethod
    def interpreter(cls, context: LoadContext) -> str | None:
        """The path of the Python interpreter of the model's processes, None for the server's. Raises InvalidArgument."""
        return python_of(context)

    @classmethod
    def model_file(cls, context: LoadContext) -> Path:
        """The file with the TritonPythonModel class. Raises InvalidArgument when there is none."""
        path = cls.shared_file or context.version_dir / (context.config.default_model_filename or "model.py")
        if not path.is_file():
            text = f"model '{context.name}' version {context.version} has no file {path}"
            raise InvalidArgument(hinted(text, context.model_dir))
        return path

    @classmethod
    def auto_complete(cls, context: LoadContext) -> None:
        """Calls the model's auto_complete_config, if it has one, and checks what it returns."""
        path = cls.model_file(context)
        before = json.dumps(to_dict(context.config))
        if cls.apart(context):
            found = complete_config(
                context.name,
                cls.interpreter(context),
                path,
                str(context.version_dir),
                before,
                initialize_seconds(context),  # with the start of the interpreter
                context.abandonment,
                context.host,
                *resources(context),
            )
            if found is not None:
                apply_completed(context, json.dumps(found))
            return
        source = ModelSource(path, context.name)
        token = completing.set(str(context.version_dir))
        try:
            model_class = getattr(source.load(), "TritonPythonModel", None)
            complete = getattr(model_class, "auto_complete_config", None)
            after = (
                before
                if complete is None
                else json.dumps(
                    check_completed(
                        complete(utils.ModelConfig(before, str(context.version_dir))), context.name
                    )
                )
            )
        except TritonError as error:
            raise settled(error) from None
        except BaseException as error:  # SystemExit, too, ends the load and not the server
            log.debug("auto_complete_config of %s failed", context.name, exc_info=error)
            raise Internal(described(error, OWN_FILES)) from error
        finally:
            completing.reset(token)
            source.unload()
        if after != before:
            apply_completed(context, after)

    @classmethod
    def time_limit(cls, context: LoadContext) -> float | None:
        """The limit in seconds for a load in the server's process. Its thread cannot be killed, so the server stops
        waiting for it. None for a model in processes of its own, which are killed when they are late."""
        seconds = initialize_seconds(context)
        return None if cls.apart(context) else seconds

    @classmethod
    def complete_from_files(cls, context: LoadContext) -> bool:
        return not examine.read(cls.model_file(context)).completes

    @classmethod
    def examine(cls, context: LoadContext, report: Callable[[str], None]) -> None:
        own = cls.apart(context)
        if own:
            cls.interpreter(context)
            resources(context)
        execute_seconds(context, own)
        initialize_seconds(context)
        environment = environment_path(context.config, settings_of(context))
        for problem in examine.problems(cls.model_file(context), imports=not environment):
            report(problem)

    @property
    def own_processes(self) -> bool:  # type: ignore[override]
        return self.apart(self.context)

    @property
    def runs_code_here(self) -> bool:  # type: ignore[override]
        return not self.apart(self.context)

    def load(self) -> None:
        path = self.model_file(self.context)
        own = self.apart(self.context)
        self._preloads = own and template.SUPPORTED and examine.preloads(path)
        # an archive is unpacked here, on the loader's thread
        self._python = self.interpreter(self.context) if own else None
        self.regroup(self.context.config)
        withheld = self._resources[1].get("withheld")
        if withheld:
            shown = ", ".join(withheld[:SHOWN_NAMES]) + (", ..." if len(withheld) > SHOWN_NAMES else "")
            log.info(
                "model '%s' is not given %d of the server's environment variables, because of environment=minimal: %s",
                self.context.name,
                len(withheld),
                shown,
            )

    def regroup(self, config: Any) -> None:
        # here and not for each instance, because it takes half a millisecond, and instances are made on the trio thread
        self._config_text = json.dumps(to_dict(config))
        if self.apart(self.context):
            self._resources = resources(self.context, config=config)

    def create_instance(self, name: str, kind: str, device_id: int) -> BackendInstance:
        seconds = ready_seconds(self.context)
        execute_seconds(self.context, self.apart(self.context))
        instance = self._instance(name, kind, device_id)
        instance.ready_seconds = seconds
        return instance

    def _instance(self, name: str, kind: str, device_id: int) -> BackendInstance:
        context = self.context
        config = context.config
        if self.apart(context):
            python = self._python
            made = IsolatedInstance(
                name,
                python,
                self.model_file(context),
                self.arguments(name, kind, device_id),
                [o.name for o in config.output],
                context.host,
                config.model_transaction_policy.decoupled,
                initialize_seconds(context),
                *self._resources,
                execute_seconds(context, True),
                version=context.version,
                read_only=parameter(config, "READ_ONLY_INPUTS").lower() == "true",
                origin=self._origin() if python is None else template.template,
            )
            if self._isolated is None:
                self._isolated = weakref.WeakSet()
            self._isolated.add(made)
            return made
        runner = ModelRunner(
            name,
            ModelSource(self.model_file(context), context.name),
            self.arguments(name, kind, device_id),
            Reader(
                context.name,
                context.version,
                [o.name for o in config.output],
                parameter(config, "READ_ONLY_INPUTS").lower() == "true",
            ),
            context.host,
            config.model_transaction_policy.decoupled,
        )
        return InProcessInstance(runner, device_id if kind == "GPU" and sees_devices(config) else None)

    def memory_usage(self) -> list[tuple[str, int, int]]:
        return [row for instance in self._isolated or () for row in instance.memory_rows]

    def _origin(self) -> Template:
        """The template that instances' processes are forked from: one of this model if it has a preload()."""
        if self._template is None:
            context = self.context
            if not self._preloads:
                return template.template
            environ, limited = self._resources
            asked = {
                "name": context.name,
                "path": str(self.model_file(context)),
                "args": self.arguments("", "", 0),
            }
            self._template = ModelTemplate(context.name, asked, environ, limited, initialize_seconds(context))
        return self._template

    def unload(self) -> None:
        if self._template is not None:  # closing waits for the process to end, the trio thread must not
            try:
                threads.start(self._template.close)
            except threads.NoThread:
                self._template.kill()

    def arguments(self, name: str, kind: str, device_id: int) -> dict[str, str]:
        """The `args` of the model's initialize(); all values are strings, as in Triton."""
        context = self.context
        return {
            "model_config": self._config_text,
            "model_instance_kind": kind,
            "model_instance_name": name,
            "model_instance_device_id": str(device_id),
            "model_repository": str(context.model_dir),
            "model_version": str(context.version),
            "model_name": context.name,
        }


def apply_completed(context: LoadContext, text: str) -> None:
    """Puts an auto-completed configuration (JSON) into the context. Raises TritonError.

    It comes from a process that runs the model's code. So what confines that code stays as it was written.
    """
    try:
        made = json_format.Parse(text, model_config.new_config())
    except json_format.ParseError as error:
        raise Internal(
            f"auto_complete_config of model '{context.name}' made an invalid configuration: {text_of(error)}"
        ) from None
    made.name = made.name or context.name
    before = context.config
    for key in code_fields.PLACING:
        if key in before.parameters:
            made.parameters[key].CopyFrom(before.parameters[key])
        elif key in made.parameters:
            del made.parameters[key]
    made.backend, made.runtime = before.backend, before.runtime
    context.config.CopyFrom(made)
