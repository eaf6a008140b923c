"""The settings of a server inside a program, with the types that a program may give.

A type checker and an editor read them here; what each one does, `neptrio --help` says of the flag of that name. A test holds
them equal to the flags. Defaults are those of Settings, but for what QUIET and LOCAL say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from neptrio.settings import Settings

# what a server inside a program does unless it is told: nothing that other processes can notice
QUIET = {"allow_http": False, "allow_grpc": False, "allow_metrics": False, "exit_grace_secs": 0.0}
LOCAL = {"http_address": "127.0.0.1", "grpc_address": "127.0.0.1"}


class ServerSettings(TypedDict, total=False):
    """Keyword arguments of neptrio.Server, all of them optional: the command's flags with `_`."""

    # general
    id: str
    exit_timeout_secs: float
    exit_grace_secs: float
    exit_on_error: bool
    exit_on_device_error: bool
    auth_config: str | Path | None
    audit_log: str
    access_log: Literal["off", "json", "combined"]
    access_log_file: str
    read_only: bool
    strict_readiness: bool
    # model repository
    model_repository_cache: str | Path | None
    model_name: str
    allow_file_override: bool | None
    model_control_mode: Literal["none", "poll", "explicit", "on-demand"]
    repository_poll_secs: float
    load_model: str | Sequence[str]
    model_memory_budget: int | str | Sequence[str]
    model_cache_directory: str | Path | None
    loads_at_once: int
    load_wait_secs: float
    backend_directory: str | Path | None
    model_load_thread_count: int
    model_load_retry_count: int
    model_config_name: str
    follow_external_links: bool
    disable_auto_complete_config: bool
    # backends
    backend_config: Mapping[str, Mapping[str, object]] | str | Sequence[str]
    # response cache
    cache_config: str | Sequence[str]
    cache_directory: str | Path | None
    # rate limiter
    rate_limit: Literal["off", "execution_count"]
    rate_limit_resource: str | Sequence[str]
    # shared memory
    allow_client_shm: bool
    pinned_memory_pool_byte_size: int
    # admin listener
    admin_address: str | None
    admin_socket_mode: int | str
    # connections
    frontends: int
    busy_poll_us: int
    max_connections: int
    max_connections_per_address: int
    max_requests_per_second_per_address: int
    max_concurrent_requests_per_address: int
    max_load_bytes: int
    max_output_bytes: int
    max_held_bytes: int
    # web pages
    cors_allow_origin: str | Sequence[str]
    allowed_host: str | Sequence[str]
    # TLS
    tls_min_version: Literal["1.2", "1.3"]
    tls_ciphers: str
    # HTTP/REST
    allow_http: bool
    http_address: str
    http_port: int
    reuse_http_port: bool
    http_max_input_size: int
    http_header_forward_pattern: str
    http_restricted_api: str | Sequence[str]
    http_lean: bool
    http_request_timeout_secs: float
    http_keep_alive_timeout_secs: float
    http_tls_cert: str | Path | None
    http_tls_key: str | Path | None
    http_tls_client_ca: str | Path | None
    # gRPC
    allow_grpc: bool
    grpc_address: str
    grpc_port: int
    reuse_grpc_port: bool
    grpc_use_ssl: bool
    grpc_use_ssl_mutual: bool
    grpc_server_cert: str | Path | None
    grpc_server_key: str | Path | None
    grpc_root_cert: str | Path | None
    grpc_infer_response_compression_level: Literal["none", "low", "medium", "high"]
    grpc_header_forward_pattern: str
    grpc_restricted_protocol: str | Sequence[str]
    grpc_keepalive_time_ms: int
    grpc_keepalive_timeout_ms: int
    grpc_keepalive_permit_without_calls: bool
    grpc_http2_min_recv_ping_interval_without_data_ms: int
    grpc_http2_max_ping_strikes: int
    grpc_max_unfinished_bytes: int
    grpc_max_unread_bytes: int
    grpc_max_connection_idle_ms: int
    grpc_max_connection_age_ms: int
    grpc_max_connection_age_grace_ms: int
    # metrics
    allow_metrics: bool
    metrics_address: str
    metrics_port: int
    allow_console: bool | None
    metrics_tls_cert: str | Path | None
    metrics_tls_key: str | Path | None
    metrics_tls_client_ca: str | Path | None
    metrics_interval_ms: int
    allow_gpu_metrics: bool
    allow_cpu_metrics: bool
    metrics_config: str | Sequence[str]
    metrics_detail: Literal["triton", "used", "full"]
    # logging
    log_verbose: int | bool
    log_info: bool
    log_warning: bool
    log_error: bool
    log_format: Literal["default", "ISO8601"]
    loop_lag_warning_ms: float
    log_file: str
    # tracing
    trace_config: str | Sequence[str]
    trace_file: str
    trace_level: str | Sequence[str]
    trace_rate: str
    trace_count: str
    trace_log_frequency: str
    trace_dir: str | Path
    trace_max_bytes: int
    allow_trace_file_update: bool
    trace_tensor_bytes: int
    allow_forced_trace: bool | None


def defaults() -> dict[str, Any]:
    """What each of them is without being given."""
    made = {
        each.name: each.default_factory() if each.default_factory is not MISSING else each.default
        for each in fields(Settings)
    }
    return {**made, **QUIET, **LOCAL}
