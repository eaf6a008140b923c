"""The server's settings: immutable, checked, with units in their names. Defaults are those of a Triton server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from neptrio.addresses import is_loopback
from neptrio.errors import Denied
from neptrio.flags import AdminAddress, MemoryBudget, Restriction, check_restrictions, compile_pattern
from neptrio.limits import LOAD_BYTES, OUTPUT_BYTES
from neptrio.observe.trace_options import DIRECTORY, MAX_BYTES, TraceOptions, start_values
from neptrio.scheduling.cache_config import parse_config


@dataclass(frozen=True)
class Settings:
    """Everything the command line can set (docs/protocol/features.md A8)."""

    id: str = "triton"
    model_repository: tuple[Path | str, ...] = ()  # str: a URL of cloud storage
    model_repository_cache: Path | None = None  # where files of cloud storage are kept; None: not kept
    model_name: str = ""  # of a repository that is the folder of one model; "": every repository holds models
    model_control_mode: str = "none"
    repository_poll_secs: float = 15.0
    load_model: tuple[str, ...] = ()
    model_memory_budget: tuple[
        MemoryBudget, ...
    ] = ()  # what all models may hold together of the host, or of a GPU
    model_cache_directory: Path | None = (
        None  # what is learnt of models is kept here; None: beside their folders
    )
    loads_at_once: int = (
        0  # that requests wait for; 0: short ones on all cores but one, at most the loader threads
    )
    load_wait_secs: float = 60.0  # how long a request waits for a model that is loaded on demand
    auth_config: Path | None = None  # tokens of clients, None: nobody is asked for one
    access_log: str = "off"  # json or combined: a line for each request
    access_log_file: str = "stdout"  # or stderr, or a file
    audit_log: str = ""  # a file, or stderr; "": none
    read_only: bool = False  # refuse all changes over the network
    # None: only by loopback addresses and Unix sockets
    allow_file_override: bool | None = None
    strict_readiness: bool = True
    exit_on_error: bool = True
    exit_on_device_error: bool = False  # end the server when a GPU cannot be used any more
    exit_timeout_secs: float = 30.0
    exit_grace_secs: float = 1.0  # time for connected clients to send one more request
    disable_auto_complete_config: bool = False
    model_load_thread_count: int = 4
    model_load_retry_count: int = 0
    model_config_name: str = ""
    follow_external_links: bool = False  # serve models with links that lead out of the repositories
    cache_config: tuple[str, ...] = ()  # NAME,KEY=VALUE; several texts are settings of one cache
    cache_directory: Path | None = (
        None  # of libtritoncache_NAME.so, each in a folder of its name; None: Triton's
    )
    backend_directory: Path | None = None
    backend_config: dict[str, dict[str, str]] = field(default_factory=dict)

    rate_limit: str = "off"
    # (name, device or -1 for global, count)
    rate_limit_resource: tuple[tuple[str, int | None, int], ...] = ()

    allow_client_shm: bool = False
    pinned_memory_pool_byte_size: int = 256 << 20  # of each GPU that models use

    # None: control verbs are served at the public ports
    admin_address: AdminAddress | None = None
    admin_socket_mode: int = 0o600  # of a Unix socket

    frontends: int = 0  # processes that speak HTTP and gRPC; 0: the server's own does
    busy_poll_us: int = 100  # for so long loops look for requests and messages before they sleep
    max_connections: int = 0  # REST and gRPC together; 0 = as many as there are descriptors
    max_connections_per_address: int = 0  # 0 = no limit of its own
    max_requests_per_second_per_address: int = 0  # 0 = no limit
    max_concurrent_requests_per_address: int = 0  # 0 = no limit
    max_load_bytes: int = LOAD_BYTES  # of the message of a load call over gRPC
    max_output_bytes: int = OUTPUT_BYTES  # of an output or scratch buffer of a kernel model
    max_held_bytes: int = 0  # of requests and answers; 0 = half of the machine's memory

    cors_allow_origin: tuple[str, ...] = ()  # origins of web pages that may use REST; "*" = all
    allowed_host: tuple[str, ...] = ()  # names for this server that Host headers may have

    tls_min_version: str = "1.2"
    tls_ciphers: str = ""  # of TLS 1.2, as OpenSSL lists them; "" = its own

    allow_http: bool = True
    http_address: str = "0.0.0.0"
    http_port: int = 8000
    reuse_http_port: bool = False
    http_max_input_size: int = 64 << 20
    http_header_forward_pattern: str = ""  # a regular expression, "" = none
    http_restricted_api: tuple[Restriction, ...] = ()
    http_lean: bool = True  # False: hypercorn, as released, serves REST
    http_request_timeout_secs: float = 60.0  # for receiving a request; large bodies get more
    http_keep_alive_timeout_secs: float = 600.0  # of an idle connection; 0 = for ever, as in Triton
    http_tls_cert: Path | None = None
    http_tls_key: Path | None = None
    http_tls_client_ca: Path | None = None  # clients must show a certificate of theirs

    allow_grpc: bool = True
    grpc_address: str = "0.0.0.0"
    grpc_port: int = 8001
    reuse_grpc_port: bool = False
    grpc_use_ssl: bool = False
    grpc_use_ssl_mutual: bool = False
    grpc_server_cert: Path | None = None
    grpc_server_key: Path | None = None
    grpc_root_cert: Path | None = None
    grpc_infer_response_compression_level: str = "none"
    grpc_header_forward_pattern: str = ""
    grpc_restricted_protocol: tuple[Restriction, ...] = ()
    grpc_keepalive_time_ms: int = 7_200_000
    grpc_keepalive_timeout_ms: int = 20_000
    grpc_keepalive_permit_without_calls: bool = False
    grpc_http2_min_recv_ping_interval_without_data_ms: int = 300_000
    grpc_http2_max_ping_strikes: int = 2
    grpc_max_unfinished_bytes: int = 0  # of incomplete requests on all connections; 0 = half of the memory
    grpc_max_unread_bytes: int = 0  # of unread answers on all connections; 0 = a quarter of the memory
    grpc_max_connection_idle_ms: int = 600_000  # 0 = for ever
    grpc_max_connection_age_ms: int = 0  # 0 = for ever
    grpc_max_connection_age_grace_ms: int = 0  # 0 = for ever

    # None: where it adds no way in (console_at)
    allow_console: bool | None = None

    allow_metrics: bool = True
    metrics_address: str = ""
    metrics_port: int = 8002
    metrics_tls_cert: Path | None = None
    metrics_tls_key: Path | None = None
    metrics_tls_client_ca: Path | None = None  # scrapers must show a certificate of theirs
    metrics_interval_ms: int = 2000
    metrics_config: tuple[str, ...] = ()
    metrics_detail: str = "used"  # a value of observe.model_families.Detail
    allow_gpu_metrics: bool = True
    allow_cpu_metrics: bool = True

    loop_lag_warning_ms: float = 200  # 0: no warning

    log_verbose: int = 0
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_format: str = "default"
    log_file: str = ""

    trace_config: tuple[str, ...] = ()  # MODE,KEY=VALUE or KEY=VALUE
    trace_file: str = ""
    trace_level: tuple[str, ...] = ()
    trace_rate: str = ""  # texts, which observe.trace_options parses like those from the network
    trace_count: str = ""
    trace_log_frequency: str = ""
    trace_dir: Path = DIRECTORY  # made when first used
    trace_max_bytes: int = MAX_BYTES
    allow_trace_file_update: bool = True
    trace_tensor_bytes: int = 1 << 20
    allow_forced_trace: bool | None = None  # None: where only this machine reaches the ports

    def __post_init__(self) -> None:
        if (self.http_tls_cert is None) != (self.http_tls_key is None):
            raise ValueError("--http-tls-cert=FILE and --http-tls-key=FILE belong together")
        if self.http_tls_client_ca is not None and self.http_tls_cert is None:
            raise ValueError("--http-tls-client-ca=FILE needs --http-tls-cert=FILE and --http-tls-key=FILE")
        if (self.metrics_tls_cert is None) != (self.metrics_tls_key is None):
            raise ValueError("--metrics-tls-cert=FILE and --metrics-tls-key=FILE belong together")
        if self.metrics_tls_client_ca is not None and self.metrics_tls_cert is None:
            raise ValueError(
                "--metrics-tls-client-ca=FILE needs --metrics-tls-cert=FILE and --metrics-tls-key=FILE"
            )
        if self.allow_console and not self._same_certificates:
            raise ValueError(
                "--allow-console=true serves REST's verbs at the metrics port, which must ask clients for the same "
                "certificates: give --metrics-tls-client-ca the file of --http-tls-client-ca"
            )
        if self.load_model and self.model_control_mode not in ("explicit", "on-demand"):
            raise ValueError("--load-model belongs to --model-control-mode=explicit and on-demand")
        if self.model_memory_budget and self.model_control_mode not in ("explicit", "on-demand"):
            raise ValueError("--model-memory-budget needs --model-control-mode=on-demand or explicit")
        if len({budget.device for budget in self.model_memory_budget}) < len(self.model_memory_budget):
            raise ValueError("--model-memory-budget is given twice for the host, or for one GPU")
        if "*" in self.load_model and len(set(self.load_model)) > 1:
            raise ValueError("--load-model=* loads every model, other names beside it have no use")
        if self.backend_directory is not None and not self.backend_directory.is_dir():
            raise ValueError(f"--backend-directory: there is no folder '{self.backend_directory}'")
        if self.cache_config:
            parse_config(self.cache_config)
        for pattern in (self.http_header_forward_pattern, self.grpc_header_forward_pattern):
            if pattern:
                compile_pattern(pattern)
        check_restrictions(self.http_restricted_api, "api")
        check_restrictions(self.grpc_restricted_protocol, "protocol")
        start_values(self.trace_options())
        if self.frontends:
            self._check_frontends()
        tls = self.grpc_use_ssl or self.grpc_use_ssl_mutual
        if tls and (self.grpc_server_cert is None or self.grpc_server_key is None):
            raise ValueError("TLS on the gRPC port needs --grpc-server-cert=FILE and --grpc-server-key=FILE")
        if self.grpc_use_ssl_mutual and self.grpc_root_cert is None:
            raise ValueError(
                "--grpc-use-ssl-mutual needs --grpc-root-cert=FILE, the roots of client certificates"
            )

    @property
    def memory_budgets(self) -> dict[int, int]:
        """Bytes that models may hold, by place: GPUs by their numbers, the host as -1."""
        return {
            -1 if one.device is None else one.device: one.size for one in self.model_memory_budget if one.size
        }

    @property
    def host_memory_budget(self) -> int:
        """Bytes of the host that models may hold; 0: any."""
        return self.memory_budgets.get(-1, 0)

    def _check_frontends(self) -> None:
        if not self.allow_http and not self.allow_grpc:
            raise ValueError("--frontends=N needs a port to serve: --allow-http=true or --allow-grpc=true")

    def trace_options(self) -> TraceOptions:
        """The tracing flags."""
        return TraceOptions(
            config=self.trace_config,
            file=self.trace_file,
            level=self.trace_level,
            rate=self.trace_rate,
            count=self.trace_count,
            log_frequency=self.trace_log_frequency,
            directory=self.trace_dir,
            max_bytes=self.trace_max_bytes,
            tensor_bytes=self.trace_tensor_bytes,
            allow_forced=self.forced_trace,
            forced_by_header=bool(self.allow_forced_trace),
        )

    def change(self, what: str) -> None:
        """Called before `what` is changed over the network. Raises Denied when the server is read-only."""
        if self.read_only:
            raise Denied(
                f"the server was started with --read-only=true: {what} is not possible over the network"
            )

    @property
    def _same_certificates(self) -> bool:
        """Whether who cannot use REST for want of a certificate cannot use the metrics port either."""
        wanted = self.http_tls_client_ca
        return not self.allow_metrics or wanted is None or wanted == self.metrics_tls_client_ca

    def console_at(self, host: str, admin: bool = False) -> bool:
        """Whether the metrics port, or the admin listener, on `host` ("" = a Unix socket) serves the console.

        By itself only on loopback addresses and where the same verbs are served by REST, to the same clients.
        """
        if self.allow_console is not None:
            return self.allow_console
        if not host or not is_loopback(host):
            return False
        return admin or (self.allow_http and self._same_certificates)

    @property
    def exposed(self) -> tuple[str, ...]:
        """The addresses that serve control verbs and that other machines can reach."""
        admin = self.admin_address
        if admin is not None:
            return () if admin.path is not None or is_loopback(admin.host) else (str(admin),)
        used = (
            (self.allow_http, self.http_address, self.http_port),
            (self.allow_grpc, self.grpc_address, self.grpc_port),
            (
                bool(self.allow_console) and self.allow_metrics,
                self.metrics_address or self.http_address,
                self.metrics_port,
            ),
        )
        return tuple(f"{host}:{port}" for on, host, port in used if on and not is_loopback(host))

    def takes_files(self, host: str | None) -> bool:
        """Whether load calls may contain files, which lets callers run their own code here. `host`: what the listener that
        they come by listens on, "" for a Unix socket, None where nobody knows."""
        if self.allow_file_override is not None:
            return self.allow_file_override
        return host is not None and (not host or is_loopback(host))

    @property
    def forced_trace(self) -> bool:
        """Whether a request may have itself traced: by itself only where no other machine reaches REST and gRPC.

        Then by a parameter alone: reading headers costs every request its fast path, which nobody has asked for.
        """
        if self.allow_forced_trace is not None:
            return self.allow_forced_trace
        used = [self.http_address] * self.allow_http + [self.grpc_address] * self.allow_grpc
        return bool(used) and all(map(is_loopback, used))

    @property
    def loads_by_request(self) -> bool:
        """Whether clients may load and unload models, as far as the control mode decides that."""
        return self.model_control_mode in ("explicit", "on-demand")

    @property
    def grace_secs(self) -> float:
        """exit_grace_secs, limited so that it ends before the exit timeout."""
        return min(self.exit_grace_secs, self.exit_timeout_secs / 4)

    def backend_settings(self, backend: str) -> dict[str, str]:
        """The --backend-config of a backend: its own values, and for other keys those given for all backends ("")."""
        return {**self.backend_config.get("", {}), **self.backend_config.get(backend, {})}
