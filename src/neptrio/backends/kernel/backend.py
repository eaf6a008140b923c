"""The kernel backend: makes instances that run on the host or on a GPU from one configuration.

load() reads the configuration and the source and checks one against the other. Compiling and executing is done by
the instance, differently for each kind. KIND_AUTO was replaced by GPU or CPU before (default_kind()).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from neptrio.backends import own_process
from neptrio.backends.kernel import compile_options, device, host_compiler, source
from neptrio.backends.kernel import config as kernel_config
from neptrio.backends.kernel.device_instance import DeviceInstance
from neptrio.backends.kernel.expressions import Values
from neptrio.backends.kernel.host_batch import HostImage, KernelBuilder
from neptrio.backends.kernel.model_spec import Launch, ModelSpec
from neptrio.backends.kernel.signature import Signature
from neptrio.config import time_limits
from neptrio.errors import InvalidArgument
from neptrio.execution.backend import Backend, BackendInstance, LoadContext
from neptrio.execution.batch import Batch

EXECUTE_SECONDS = 300.0  # how long an execution on a GPU may take where the model does not say


def execute_seconds(context: LoadContext) -> float:
    """After how many seconds an execution on a GPU counts as hanging. Raises InvalidArgument."""
    return time_limits.execute_seconds(context.config, context.name) or EXECUTE_SECONDS


class KernelBackend(Backend):
    """One loaded version of a kernel model."""

    platform = "kernel"

    def __init__(self, context: LoadContext) -> None:
        super().__init__(context)
        self.spec = dataclasses.replace(
            kernel_config.read(context.config), max_output_bytes=context.settings.max_output_bytes
        )
        self.compile_options = compile_options.checked(
            self.spec.compile_options,
            context.version_dir,
            context.model_dir,
            context.settings.backend_settings("kernel"),
            context.name,
        )
        self.path = source.find(context.version_dir, context.config.default_model_filename)
        self.source: source.Source | None = None
        self.host_object: Any = None
        self._instances: list[BackendInstance] = []
        self.signatures: dict[str, Signature] = {}
        self.execute_seconds = EXECUTE_SECONDS

    @classmethod
    def runs_on_gpu(cls) -> bool:
        """True: KIND_AUTO means the GPU where the driver has one."""
        return device.count() > 0

    @property
    def own_processes(self) -> bool:  # type: ignore[override]
        return own_process.wanted(self.context)

    @classmethod
    def examine(cls, context: LoadContext, report: Callable[[str], None]) -> None:
        cls(context).read()
        own_process.examine(context)

    def read(self) -> None:
        """Reads the source and checks the configuration against it."""
        if self.path.suffix == ".cu":
            self.source = source.read(self.path)
            self.signatures = self.source.signatures
            self.spec.check(self.signatures, self.path.name)

    def load(self) -> None:
        self.read()
        self.execute_seconds = execute_seconds(self.context)
        self.regroup(self.context.config)

    def regroup(self, config: Any) -> None:
        if self.host_object is None and any(group.kind == 2 for group in config.instance_group):
            self.host_object = self._compile()

    def _compile(self) -> Any:
        if self.source is None:
            raise InvalidArgument(
                f"'{self.path.name}' of model '{self.context.name}' is code for a GPU; on the CPU a kernel model "
                "needs its source, model.cu"
            )
        for launch in self.spec.launches:
            if launch.cooperative or launch.cluster:
                # its blocks may wait for each other, and here one begins when another has ended
                raise InvalidArgument(
                    f"kernel '{launch.kernel}' of model '{self.context.name}' is launched with "
                    f"'{'cooperative' if launch.cooperative else 'cluster'}', which can't run on the host; serve this "
                    "model with an instance_group of kind KIND_GPU"
                )
            if launch.shared.constant():
                self._check_shared(launch)
        return host_compiler.compile_source(self.source, self.compile_options, self.context.name)

    def _check_shared(self, launch: Launch) -> None:
        size = launch.shared.evaluate(Values(1, {}, {}))
        if size > host_compiler.SHARED_LIMIT:
            raise InvalidArgument(
                f"kernel '{launch.kernel}' of model '{self.context.name}': {size} bytes of shared memory, at most "
                f"{host_compiler.SHARED_LIMIT} are possible"
            )

    def create_instance(self, name: str, kind: str, device_id: int) -> BackendInstance:
        if kind == "GPU":
            if not device.count():
                raise InvalidArgument(
                    f"model '{self.context.name}' asks for a GPU and there is none: {device.why_none()}"
                )
        elif kind != "CPU":
            raise InvalidArgument(f"kernel models run on KIND_CPU or KIND_GPU, '{name}' asks for KIND_{kind}")
        made: BackendInstance
        if self.own_processes:
            made = self._in_own_process(name, kind, device_id)
        else:
            made = DeviceInstance(self, device_id) if kind == "GPU" else HostInstance(self)
        if kind == "GPU":  # only these hold memory that is listed
            self._instances.append(made)
        return made

    def _in_own_process(self, name: str, kind: str, device_id: int) -> BackendInstance:
        from neptrio.backends.own_process.instance import own_process_instance

        seconds = time_limits.execute_seconds(self.context.config, self.context.name)
        most_under_way = 1
        if kind == "GPU":  # there the process itself ends what hangs; the server does if that can't
            seconds = self.execute_seconds + own_process.GRACE_SECONDS
            most_under_way = DeviceInstance.in_advance
        return own_process_instance(self, name, kind, device_id, most_under_way, seconds)

    def code_path(self, capability: tuple[int, int]) -> Path:
        """The file for a GPU: the one that cc_model_filenames gives for its compute capability, else the model's."""
        name = self.context.config.cc_model_filenames.get(f"{capability[0]}.{capability[1]}", "")
        return source.find(self.context.version_dir, name) if name else self.path

    def memory_usage(self) -> list[tuple[str, int, int]]:
        """The memory that instances hold: (type, id, bytes)."""
        rows: list[tuple[str, int, int]] = []
        for instance in self._instances:
            if isinstance(instance, DeviceInstance):
                rows += instance.memory_usage()
            else:
                rows += getattr(instance, "memory_rows", ())
        return rows

    def unload(self) -> None:
        self._instances = []


class HostInstance(BackendInstance):
    """Executes on the CPU without the GIL. Every instance loads a private copy of the shared object."""

    native = True

    def __init__(self, backend: KernelBackend) -> None:
        self._backend = backend
        spec = backend.spec
        self._order = {name: i for i, name in enumerate(backend.signatures)}
        self._builder = KernelBuilder(
            [t.name for t in spec.inputs],
            [t.optional for t in spec.inputs],
            spec.batching,
            partial(_plan, spec, self._order, backend.signatures),
        )

    @property
    def prepare(self) -> Callable[[Batch], Batch]:  # see IdentityInstance
        return self._builder.prepare

    def initialize(self) -> None:
        names = [n for n, s in self._backend.signatures.items() if not s.template]
        self._builder.use(HostImage(str(self._backend.host_object), list(self._order), names))

    def execute(self, batch: Batch) -> None:
        raise AssertionError("native instances do not execute in Python")

    def finalize(self) -> None:
        self._builder.use(None)


def _plan(
    spec: ModelSpec,
    order: dict[str, int],
    signatures: dict[str, Signature],
    shapes: list[tuple[int, ...] | None],
    batch: int,
) -> Any:
    """The launches of a batch of these shapes on the host. Raises InvalidArgument."""
    plan = spec.plan(shapes, batch, order, signatures)
    for _, grid, block, shared, _ in plan.launches_as_text():
        if shared > host_compiler.SHARED_LIMIT:
            raise InvalidArgument(
                f"{shared} bytes of shared memory, at most {host_compiler.SHARED_LIMIT} are possible"
            )
        if any(g * b >= 2**31 for g, b in zip(grid, block, strict=True)):
            raise InvalidArgument(
                f"grid {grid} of blocks {block}: the host runs fewer than 2^31 threads per axis"
            )
    return plan
