"""Options of the server: every field of the interface, and what becomes of it here.

Rules:
 1. A field that the server has a setting for becomes that setting.
 2. A field without a counterpart that does not change what a program computes is accepted; with another value than
    its default there is a warning.
 3. A field that a program relies on, and that the server cannot do, is refused with UnsupportedError.
 4. Everything is checked by Server.start(): TypeError for a wrong type, InvalidArgumentError for a wrong value.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from neptrio.compat.tritonserver.enums import (
    InstanceGroupKind,
    LogFormat,
    ModelControlMode,
    RateLimitMode,
)
from neptrio.compat.tritonserver.errors import InternalError, InvalidArgumentError, UnsupportedError


@dataclass
class RateLimiterResource:
    """How much there is of a resource that instances may need, on a device."""

    name: str
    count: int
    device: int


@dataclass
class ModelLoadDeviceLimit:
    """How much of a device's memory may be in use for a model to be loaded. Refused by Server.start()."""

    kind: InstanceGroupKind
    device: int
    fraction: float


@dataclass
class Options:
    """Options of a Server. docs/compat-tritonserver.md has a line for each."""

    model_repository: str | Path | list[str] | list[Path] | None = field(default_factory=list)
    server_id: str = "triton"
    model_control_mode: ModelControlMode = ModelControlMode.NONE
    startup_models: list[str] = field(default_factory=list)
    strict_model_config: bool = False
    rate_limiter_mode: RateLimitMode = RateLimitMode.OFF
    rate_limiter_resources: list[RateLimiterResource] = field(default_factory=list)
    pinned_memory_pool_size: int = 1 << 28
    cuda_memory_pool_sizes: dict[int, int] = field(default_factory=dict)
    cache_config: dict[str, dict[str, Any]] = field(default_factory=dict)
    cache_directory: str = "/opt/tritonserver/caches"
    min_supported_compute_capability: float = 6.0
    exit_on_error: bool = True
    strict_readiness: bool = True
    exit_timeout: int = 30
    buffer_manager_thread_count: int = 0
    model_load_thread_count: int = 4
    model_load_retry_count: int = 0
    model_namespacing: bool = False
    enable_peer_access: bool = True
    log_file: str | None = None
    log_info: bool = False
    log_warn: bool = False
    log_error: bool = False
    log_format: LogFormat = LogFormat.DEFAULT
    log_verbose: int = 0
    metrics: bool = True
    gpu_metrics: bool = True
    cpu_metrics: bool = True
    metrics_interval: int = 2000
    backend_directory: str = "/opt/tritonserver/backends"
    repo_agent_directory: str = "/opt/tritonserver/repoagents"
    model_load_device_limits: list[ModelLoadDeviceLimit] = field(default_factory=list)
    backend_configuration: dict[str, dict[str, str]] = field(default_factory=dict)
    host_policies: dict[str, dict[str, str]] = field(default_factory=dict)
    metrics_configuration: dict[str, dict[str, str]] = field(default_factory=dict)

    def _repositories(self) -> list[str | Path]:
        """The repositories. Raises TypeError, InvalidArgumentError without one, InternalError for no folder."""
        given = self.model_repository
        if given is None or given == [] or given == "":
            raise InvalidArgumentError(
                "model_repository is missing: the folder whose models are to be served"
            )
        several: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
        for one in several:
            if not isinstance(one, (str, Path)):
                raise TypeError(f"model_repository must be str or a list of str, got {type(one).__name__}")
            if "://" not in str(one) and not Path(one).is_dir():
                raise InternalError(f"failed to open model repository '{one}': no such folder")
        return several

    def _settings(self) -> dict[str, Any]:
        """Settings of neptrio.Server. Raises as rule 4 says, and UnsupportedError."""
        self._check_types()
        self._refuse()
        self._warn()
        explicit = self.model_control_mode == ModelControlMode.EXPLICIT
        made: dict[str, Any] = {
            "id": self.server_id,
            "model_control_mode": self.model_control_mode.name.lower(),
            "load_model": tuple(self.startup_models) if explicit else (),
            "repository_poll_secs": 0.0,  # Server.poll_model_repository() says when
            "disable_auto_complete_config": self.strict_model_config,
            "pinned_memory_pool_byte_size": self.pinned_memory_pool_size,
            "exit_on_error": self.exit_on_error,
            "strict_readiness": self.strict_readiness,
            "exit_timeout_secs": float(self.exit_timeout),
            "model_load_thread_count": self.model_load_thread_count,
            "model_load_retry_count": self.model_load_retry_count,
            "allow_gpu_metrics": self.gpu_metrics,
            "allow_cpu_metrics": self.cpu_metrics,
            "metrics_interval_ms": self.metrics_interval,
            "metrics_config": _flat(self.metrics_configuration),
            "backend_config": {name: dict(values) for name, values in self.backend_configuration.items()},
            "log_file": self.log_file or "",
            "log_info": self.log_info or self.log_verbose > 0,
            "log_warning": self.log_warn or self.log_info or self.log_verbose > 0,
            "log_error": self.logs,
            "log_verbose": self.log_verbose,
            "log_format": "ISO8601" if self.log_format == LogFormat.ISO8601 else "default",
        }
        if self.rate_limiter_mode == RateLimitMode.EXEC_COUNT:
            made["rate_limit"] = "execution_count"
            made["rate_limit_resource"] = tuple(
                (resource.name, resource.device, resource.count) for resource in self.rate_limiter_resources
            )
        if self.backend_directory != _DEFAULTS["backend_directory"]:
            made["backend_directory"] = Path(self.backend_directory)
        if self.cache_config:
            [(name, values)] = self.cache_config.items()
            made["cache_config"] = tuple(f"{name},{key}={_text(value)}" for key, value in values.items()) or (
                name,
            )
        if self.cache_directory != _DEFAULTS["cache_directory"]:
            made["cache_directory"] = Path(self.cache_directory)
        return made

    @property
    def logs(self) -> bool:
        """Whether anything is logged at all."""
        return self.log_error or self.log_warn or self.log_info or self.log_verbose > 0

    def _check_types(self) -> None:
        for one in fields(self):
            value, default = getattr(self, one.name), _DEFAULTS[one.name]
            wanted: Any = type(default)
            if one.name == "model_repository":
                continue
            if one.name == "log_file":
                wanted = (str, Path, type(None))
            elif wanted is float:
                wanted = (int, float)
            wrong = not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool)
            if wrong:
                name = (
                    wanted.__name__ if isinstance(wanted, type) else " or ".join(t.__name__ for t in wanted)
                )
                raise TypeError(f"{one.name} must be {name}, got {type(value).__name__}")
            if isinstance(value, int) and value < 0:
                raise InvalidArgumentError(f"{one.name} must be >= 0, got {value}")

    def _refuse(self) -> None:
        for name, why in REFUSED.items():
            if getattr(self, name) != _DEFAULTS[name]:
                raise UnsupportedError(f"{name} is not supported: {why}")
        if len(self.cache_config) > 1:
            raise InvalidArgumentError(f"there is one response cache, got {list(self.cache_config)}")

    def _warn(self) -> None:
        for name, why in WITHOUT_EFFECT.items():
            if getattr(self, name) != _DEFAULTS[name]:
                warnings.warn(f"{name} has no effect: {why}", UserWarning, stacklevel=4)


_DEFAULTS: dict[str, Any] = {one.name: getattr(Options(), one.name) for one in fields(Options)}
REFUSED = {
    "model_namespacing": "model names are unique over all repositories",
    "model_load_device_limits": "models are loaded whatever a device's memory holds",
    "host_policies": "bind the process with numactl or taskset instead",
}
WITHOUT_EFFECT = {
    "cuda_memory_pool_sizes": "there is no CUDA memory pool of the server",
    "min_supported_compute_capability": "the CUDA driver decides which devices can run a model",
    "buffer_manager_thread_count": "instances copy their own buffers",
    "enable_peer_access": "devices do not exchange tensors",
    "repo_agent_directory": "there are no repository agents",
}


def _flat(configuration: dict[str, dict[str, str]]) -> tuple[str, ...]:
    """What --metrics-config takes: NAME,KEY=VALUE or KEY=VALUE."""
    return tuple(
        f"{name},{key}={_text(value)}" if name else f"{key}={_text(value)}"
        for name, values in configuration.items()
        for key, value in values.items()
    )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
