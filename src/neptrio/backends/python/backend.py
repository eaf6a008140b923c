"""PythonBackend: a model version whose code is a TritonPythonModel class in model.py."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf import json_format

import triton_python_backend_utils as utils
from neptrio.backends.base import READY_SECONDS, Backend, BackendInstance, LoadContext
from neptrio.backends.python import examine
from neptrio.backends.python.convert import Reader
from neptrio.backends.python.environment import cache_directory, environment_python
from neptrio.backends.python.instance import OWN_FILES, InProcessInstance, ModelRunner
from neptrio.backends.python.isolated import IsolatedInstance
from neptrio.backends.python.isolated import auto_complete as isolated_auto_complete
from neptrio.backends.python.source import ModelSource
from neptrio.errors import Internal, InvalidArgument, TritonError
from neptrio.model import config as model_config
from neptrio.model.describe_config import to_dict
from triton_python_backend_utils._execute import failure_text

log = logging.getLogger("neptrio.python")


def parameter(config: Any, key: str) -> str:
    """A configuration parameter's text, "" when it is not set."""
    return str(config.parameters[key].string_value) if key in config.parameters else ""


def isolated(config: Any) -> bool:
    """True when the model runs in a process of its own. Raises InvalidArgument."""
    value = parameter(config, "isolation")
    if value not in ("", "none", "process"):
        raise InvalidArgument(f"parameter 'isolation' must be 'none' or 'process', got '{value}'")
    if value == "none" and parameter(config, "EXECUTION_ENV_PATH"):
        raise InvalidArgument("EXECUTION_ENV_PATH needs isolation 'process', got 'none'")
    return value == "process" or bool(parameter(config, "EXECUTION_ENV_PATH"))


def python_of(context: LoadContext) -> str | None:
    """The interpreter of the model's own environment, None for the server's."""
    path = parameter(context.config, "EXECUTION_ENV_PATH")
    if not path:
        return None
    cache = cache_directory(context.settings.backend_settings("python"))
    return environment_python(path, context.model_dir, cache)


def initialize_seconds(context: LoadContext) -> float:
    """How long a model may take to be imported, to complete its configuration, and to initialize. Raises InvalidArgument."""
    key = "INITIALIZE_TIMEOUT_SECONDS"
    text = parameter(context.config, key) or context.settings.backend_settings("python").get(
        "initialize-timeout-seconds", "300"
    )
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise InvalidArgument(
            f"{key} of model '{context.name}' must be a number of seconds > 0, got '{text}'"
        )
    return value


def ready_seconds(context: LoadContext) -> float:
    """How long a model's is_ready() may take. Raises InvalidArgument."""
    text = context.settings.backend_settings("python").get("is-ready-timeout-seconds", str(READY_SECONDS))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise InvalidArgument(
            f"--backend-config=python,is-ready-timeout-seconds must be a number of seconds > 0, got '{text}'"
        )
    return value


class PythonBackend(Backend):
    """Serves `backend: "python"`, and with `shared_file` set, a Python-based backend.

    A Python-based backend is a model.py in the backend directory that serves every model which
    names it; such models need no file of their own.
    """

    shared_file: Path | None = None
    default_model_filename = "model.py"

    @classmethod
    def based_on(cls, file: Path) -> type[PythonBackend]:
        """The Python-based backend that lives in `file`."""
        return type("PythonBasedBackend", (cls,), {"shared_file": file})

    @classmethod
    def model_file(cls, context: LoadContext) -> Path:
        """The file with the TritonPythonModel class. Raises InvalidArgument when there is none."""
        path = cls.shared_file or context.version_dir / (context.config.default_model_filename or "model.py")
        if not path.is_file():
            raise InvalidArgument(f"model '{context.name}' version {context.version} has no file {path}")
        return path

    @classmethod
    def auto_complete(cls, context: LoadContext) -> None:
        """Calls the model's auto_complete_config, if it has one, and checks what it returns."""
        path = cls.model_file(context)
        before = json.dumps(to_dict(context.config))
        if isolated(context.config):
            found = isolated_auto_complete(
                context.name,
                python_of(context),
                path,
                before,
                initialize_seconds(context),  # with the start of the interpreter
                context.abandonment,
            )
            if found is not None:
                apply_completed(context, json.dumps(found))
            return
        source = ModelSource(path, context.name)
        try:
            model_class = getattr(source.load(), "TritonPythonModel", None)
            complete = getattr(model_class, "auto_complete_config", None)
            after = before if complete is None else _completed(context, complete(utils.ModelConfig(before)))
        except TritonError:
            raise
        except Exception as error:
            raise Internal(_load_failure(context, "auto_complete_config", error)) from error
        finally:
            source.unload()
        if after != before:
            apply_completed(context, after)

    @classmethod
    def time_limit(cls, context: LoadContext) -> float | None:
        """In-process models cannot be ended, only left behind; the others' processes are killed."""
        seconds = initialize_seconds(context)
        return None if isolated(context.config) else seconds

    @classmethod
    def complete_from_files(cls, context: LoadContext) -> bool:
        return not examine.read(cls.model_file(context)).completes

    @classmethod
    def examine(cls, context: LoadContext, report: Callable[[str], None]) -> None:
        own = isolated(context.config)
        if own:
            python_of(context)
        initialize_seconds(context)
        environment = parameter(context.config, "EXECUTION_ENV_PATH")
        for problem in examine.problems(cls.model_file(context), imports=not environment):
            report(problem)

    def load(self) -> None:
        self.model_file(self.context)

    def create_instance(self, name: str, kind: str, device_id: int) -> BackendInstance:
        seconds = ready_seconds(self.context)
        instance = self._instance(name, kind, device_id)
        instance.ready_seconds = seconds
        return instance

    def _instance(self, name: str, kind: str, device_id: int) -> BackendInstance:
        context = self.context
        config = context.config
        if isolated(config):
            return IsolatedInstance(
                name,
                python_of(context),
                self.model_file(context),
                self.arguments(name, kind, device_id),
                [o.name for o in config.output],
                context.services,
                config.model_transaction_policy.decoupled,
                initialize_seconds(context),
            )
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
            context.services,
            config.model_transaction_policy.decoupled,
        )
        sees_devices = kind == "GPU" and parameter(config, "FORCE_CPU_ONLY_INPUT_TENSORS").lower() == "no"
        return InProcessInstance(runner, device_id if sees_devices else None)

    def arguments(self, name: str, kind: str, device_id: int) -> dict[str, str]:
        """What initialize(args) is given; all values are strings, as in Triton."""
        context = self.context
        return {
            "model_config": json.dumps(to_dict(context.config)),
            "model_instance_kind": kind,
            "model_instance_name": name,
            "model_instance_device_id": str(device_id),
            "model_repository": str(context.model_dir),
            "model_version": str(context.version),
            "model_name": context.name,
        }


def _completed(context: LoadContext, returned: Any) -> str:
    if not isinstance(returned, utils.ModelConfig):
        raise Internal(
            f"auto_complete_config of model '{context.name}' must return the ModelConfig it was given, "
            f"got {type(returned).__name__}"
        )
    return json.dumps(returned.as_dict())


def apply_completed(context: LoadContext, text: str) -> None:
    """Puts an auto-completed configuration (JSON) into the context. Raises TritonError."""
    try:
        made = json_format.Parse(text, model_config.new_config())
    except json_format.ParseError as error:
        raise Internal(
            f"auto_complete_config of model '{context.name}' made an invalid configuration: {error}"
        ) from None
    made.name = made.name or context.name
    context.config.CopyFrom(made)


def _load_failure(context: LoadContext, step: str, error: BaseException) -> str:
    log.debug("%s of %s failed", step, context.name, exc_info=error)
    return failure_text(context.name, error, OWN_FILES).replace(
        "Failed to process the request(s)", f"Failed in {step}"
    )
