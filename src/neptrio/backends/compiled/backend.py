"""CompiledBackend: models of a libtriton_NAME.so, which is opened in their own processes only.

The problem: such a library is foreign machine code that may do anything to the process that it is in. The choice: it is a
backend like one with a model.py, whose model.py (beside this file) opens the library, so that everything that is true of a
model's process is true here: batches over rings, limits, restarts, the reason why it ended.

Rules:
 1. The server's process never opens a backend's library, nor that which backends are bound to.
 2. What the model's process has to know beside the configuration, begun() says, in one place. What changes while it runs lies
    in memory that it is lent.
 3. Parameters that a model.py of this server has a meaning for (EXECUTION_ENV_PATH, FORCE_CPU_ONLY_INPUT_TENSORS) are the
    library's: it may be Triton's own Python backend. So are they not for its process, nor is what
    --backend-config=python says of where a model runs.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from neptrio.backends.compiled import find
from neptrio.backends.python.auto_complete import complete_config
from neptrio.backends.python.backend import PythonBackend, apply_completed, initialize_seconds, resources
from neptrio.backends.python.initialize_lock import InitializeLock
from neptrio.backends.python.isolated import IsolatedInstance
from neptrio.config import accelerators
from neptrio.config.describe_config import to_dict
from neptrio.config.isolation import parameter
from neptrio.errors import InvalidArgument
from neptrio.execution.backend import BackendInstance, LoadContext

log = logging.getLogger("neptrio.python")

MODEL = Path(__file__).with_name("model.py")


def refuse_other_ways(context: LoadContext) -> None:
    """Raises InvalidArgument where the model asks for what only a model.py can have."""
    if parameter(context.config, "isolation") not in ("", "process"):
        raise InvalidArgument(
            f"model '{context.name}' has a compiled backend, which runs in a process of its own: leave out the parameter "
            "isolation"
        )


class CompiledBackend(PythonBackend):
    """Serves the models of one library, `library`."""

    library: Path
    shared_file = MODEL
    default_model_filename = ""
    _initialize_lock: InitializeLock | None = None  # of the instances' ModelInstanceInitialize

    @classmethod
    def opening(cls, library: Path) -> type[CompiledBackend]:
        """Makes the class of the backend whose library that is."""
        return type("CompiledBackend", (cls,), {"library": library})

    @classmethod
    def apart(cls, context: LoadContext) -> bool:
        return True

    @classmethod
    def interpreter(cls, context: LoadContext) -> str | None:
        return None

    @classmethod
    def strategy(cls, context: LoadContext) -> Path | None:
        """The library that decides which requests are executed together. Raises InvalidArgument."""
        folders = (context.version_dir, context.model_dir, cls.library.resolve().parent)
        return find.strategy(context.config, folders)

    @classmethod
    def begun(cls, context: LoadContext) -> dict[str, Any]:
        """What the model's process begins the backend with."""
        library = cls.library.resolve()
        settings = context.settings
        strategy = cls.strategy(context)
        # what a Triton server tells every backend, beside what --backend-config says
        command_line = {
            "auto-complete-config": "true",
            "backend-directory": str((settings.backend_directory or Path(find.DEFAULTS[0])).absolute()),
            "default-max-batch-size": "4",
            "min-compute-capability": "6.000000",
            **settings.backend_settings(context.config.backend),
        }
        return {
            "library": str(library),
            "folder": str(library.parent),
            "backend": context.config.backend,
            "backend_config": json.dumps({"cmdline": command_line}),
            "model": context.name,
            "version": context.version,
            "repository": str(context.model_dir),
            "strategy": "" if strategy is None else str(strategy.absolute()),
            "gpus": bool(accelerators.gpus()),
        }

    @classmethod
    def auto_complete(cls, context: LoadContext) -> None:
        refuse_other_ways(context)
        before = to_dict(context.config)
        found = complete_config(
            context.name,
            None,
            MODEL,
            str(context.version_dir),
            json.dumps({**before, "compiled": cls.begun(context)}),
            initialize_seconds(context),
            context.abandonment,
            context.host,
            *resources(context),
            lent=[context.host.log_levels.descriptor],
        )
        if found is not None and found != before:
            apply_completed(context, json.dumps(found))

    @classmethod
    def time_limit(cls, context: LoadContext) -> float | None:
        initialize_seconds(context)
        return None

    @classmethod
    def complete_from_files(cls, context: LoadContext) -> bool:
        return False

    @classmethod
    def examine(cls, context: LoadContext, report: Any) -> None:
        refuse_other_ways(context)
        cls.strategy(context)
        super().examine(context, report)

    def load(self) -> None:
        refuse_other_ways(self.context)
        strategy = self.strategy(self.context)
        if strategy is not None:
            log.info(
                "model '%s': '%s' decides which requests are executed together", self.context.name, strategy
            )
        super().load()

    def _instance(self, name: str, kind: str, device_id: int) -> BackendInstance:
        made = super()._instance(name, kind, device_id)
        assert isinstance(made, IsolatedInstance)
        if self._initialize_lock is None:
            self._initialize_lock = InitializeLock()
        made.initialize_lock = self._initialize_lock
        made.lent = [self.context.host.log_levels.descriptor]
        return made

    def arguments(self, name: str, kind: str, device_id: int) -> dict[str, str]:
        return super().arguments(name, kind, device_id) | {"compiled": json.dumps(self.begun(self.context))}
