"""Serving from the command line: tritonserver's flags with their defaults, and what the process that serves does.

Flags are declared here, one line each, in the group where a user
would look for them; every destination is a field of Settings. Flags of missing features, hints
without effect and unknown flags are flags.refuse_unknown's. Source: docs/protocol/features.md A8.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neptrio import __version__, flags, limits, process_end, process_start
from neptrio.errors import TritonError
from neptrio.observe.trace_options import DIRECTORY, MAX_BYTES
from neptrio.settings import Settings


def parser(first: str = "") -> argparse.ArgumentParser:
    """The flags of serving; `first` comes before them in the text of --help."""
    p = argparse.ArgumentParser(
        prog="neptrio",
        usage="neptrio DIR [flags]  |  neptrio --model-repository=DIR [flags]  |  neptrio SUBCOMMAND ...",
        description="\n\n".join(
            filter(None, ["An inference server that speaks the Triton protocol.", first])
        ),
        formatter_class=_Help,
        allow_abbrev=False,
        add_help=False,
    )
    add = p.add_argument_group("general").add_argument
    add("--help", "-h", action="help", help="print this text and exit")
    add("--version", action="version", version=__version__, help="print the version and exit")
    add("--id", default="triton", help="the server's name in its metadata")
    add(
        "--exit-timeout-secs",
        type=flags.seconds,
        default=30.0,
        help="how long a shutdown may wait for requests",
    )
    add("--exit-grace-secs", type=flags.seconds, default=1.0,
        help="how long connected clients may send one more request when the server stops; at most a quarter "
        "of --exit-timeout-secs")  # fmt: skip
    add("--exit-on-error", type=flags.boolean, default=True, help="exit when a model fails to load at start")
    add("--exit-on-device-error", type=flags.boolean, default=False,
        help="exit with status 1 when a GPU cannot be used any more, so that a supervisor starts the server anew")  # fmt: skip
    add("--auth-config", type=Path, default=None, metavar="FILE",
        help="clients by token (neptrio token makes one) or certificate, and what each may do: TOML, or YAML by its name; "
        "read again when it changes")  # fmt: skip
    add("--audit-log", default="", metavar="FILE",
        help="append who changed what, and who was refused, to this file as lines of JSON; stderr: to standard error")  # fmt: skip
    add("--access-log", type=flags.one_of(*flags.ACCESS_LOGS), choices=flags.ACCESS_LOGS, default="off",
        help="write a line for each request over HTTP and gRPC: json, or combined as web servers do")  # fmt: skip
    add("--access-log-file", default="stdout", metavar="FILE",
        help="append the access log to this file; stdout, stderr: to that stream")  # fmt: skip
    add("--read-only", type=flags.boolean, nargs="?", const=True, default=False,
        help="refuse every verb that changes something: models, traces, logging, shared memory, sequences")  # fmt: skip
    add("--strict-readiness", type=flags.boolean, default=True, help="ready only while every model is")

    add = p.add_argument_group("model repository").add_argument
    add("--model-repository", "--model-store", type=flags.repository, action="append", default=[],
        help="a folder of models, or a URL of cloud storage (s3://bucket/models, any that fsspec knows; "
        "needs the extra cloud); may be repeated")  # fmt: skip
    add("--model-repository-cache", type=Path, default=None,
        help="keep what was fetched from cloud storage here for the next start")  # fmt: skip
    add("--model-name", "--model_name", type=flags.model_name, default="",
        help="serve a repository that is itself the folder of one model under this name")  # fmt: skip
    add("--allow-file-override", type=flags.boolean, default=None,
        help="load calls may bring files along, which run as code (default: only by loopback addresses "
        "and Unix sockets)")  # fmt: skip
    add("--model-control-mode", type=flags.one_of(*flags.CONTROL_MODES), choices=flags.CONTROL_MODES, default="none",
        help="none: every model is loaded at start; poll: changed folders are taken up as well; explicit: "
        "models come and go by request; on-demand: a model is loaded when it is asked for")  # fmt: skip
    add("--repository-poll-secs", type=flags.not_negative, default=15,
        help="how often modes poll and on-demand look at the folders, 0 = never again")  # fmt: skip
    add("--load-model", action="append", default=[],
        help="a model to load at start in modes explicit and on-demand, '*' for all; may be repeated")  # fmt: skip
    add("--model-memory-budget", type=flags.memory_budget, action="append", default=[], metavar="SIZE|P%|gpu:N=SIZE",
        help="the memory of the host that models may hold together (8GiB, 500MiB, bytes, or a share of what the server may "
        "use), or that of a GPU (gpu:0=20GiB); models that are loaded on demand are put away for others; may be "
        "repeated")  # fmt: skip
    add("--model-cache-directory", type=Path, default=None,
        help="where it is remembered for the next start what models hold (default: a file in the first local repository), and "
        "optimised ONNX models are kept for their next load (default: nowhere)")  # fmt: skip
    add("--loads-at-once", type=flags.not_negative, default=0,
        help="how many loads that requests wait for run at once, 0 = short ones on all cores but one, at most --model-load-thread-count")  # fmt: skip
    add("--load-wait-secs", type=flags.positive_seconds, default=60.0,
        help="how long a request waits for a model that is loaded on demand")  # fmt: skip
    add(
        "--backend-directory",
        type=Path,
        default=None,
        help="folder of backends: <name>/model.py or <name>/libtriton_<name>.so",
    )
    add("--model-load-thread-count", type=flags.at_least_one, default=4, help="threads that load models")
    add(
        "--model-load-retry-count",
        type=flags.not_negative,
        default=0,
        help="how often a load that failed is tried again",
    )
    add("--model-config-name", default="", help="use configs/NAME.pbtxt of a model where it exists")
    add("--follow-external-links", type=flags.boolean, nargs="?", const=True, default=False,
        help="serve models whose symbolic links lead out of the repositories")  # fmt: skip
    add("--disable-auto-complete-config", type=flags.boolean, nargs="?", const=True, default=False,
        help="take configurations as they are written")  # fmt: skip
    add("--strict-model-config", type=flags.boolean, nargs="?", const=True, help=argparse.SUPPRESS)

    add = p.add_argument_group("backends").add_argument
    add("--backend-config", type=flags.backend_setting, action="append", default=[],
        metavar="NAME,KEY=VALUE", help="a setting of one backend, or KEY=VALUE of all; may be repeated")  # fmt: skip

    add = p.add_argument_group("response cache").add_argument
    add("--cache-config", action="append", default=[], metavar="NAME,KEY=VALUE",
        help="keep responses of models with response_cache: local,size=BYTES is built in, other names are those of "
        "libtritoncache_NAME.so; coalesce=true shares identical requests in flight; may be repeated")  # fmt: skip
    add("--cache-directory", type=Path, default=None,
        help="folder of caches: NAME/libtritoncache_NAME.so (default /opt/tritonserver/caches)")  # fmt: skip
    add("--response-cache-byte-size", type=flags.not_negative, default=0, help=argparse.SUPPRESS)

    add = p.add_argument_group("rate limiter").add_argument
    add("--rate-limit", type=flags.one_of("off", "execution_count"), choices=("off", "execution_count"), default="off",
        help="execution_count: instances take turns by rate_limiter priority and resources")  # fmt: skip
    add("--rate-limit-resource", type=flags.resource, action="append", default=[],
        metavar="NAME:COUNT[:DEVICE]",
        help="how much of a resource there is, on every device or on one; may be repeated")  # fmt: skip

    add = p.add_argument_group("shared memory").add_argument
    add(
        "--allow-client-shm",
        type=flags.boolean,
        default=False,
        help="let clients register regions of shared memory, the system's and CUDA's",
    )
    add("--pinned-memory-pool-byte-size", type=flags.not_negative, default=256 << 20,
        help="page-locked memory for outputs of kernel models, at most, per GPU; what is above uses ordinary memory")  # fmt: skip

    add = p.add_argument_group("admin listener").add_argument
    add("--admin-address", type=flags.admin_address, default=None, metavar="HOST:PORT|unix:PATH",
        help="serve control verbs (loading, traces, logging, shared memory, ends of sequences) here and not at the "
        "public ports: everything over REST and gRPC, and /metrics")  # fmt: skip
    add("--admin-socket-mode", type=flags.file_mode, default=0o600, metavar="MODE",
        help="who may connect to unix:PATH, in octal digits (default: 600)")  # fmt: skip

    add = p.add_argument_group("connections").add_argument
    add("--frontends", type=flags.frontends, default=0, metavar="N|auto",
        help="processes that speak HTTP and gRPC for this one, auto: by the cores it may use; 0: this one does itself")  # fmt: skip
    add("--busy-poll-us", type=flags.not_negative, default=100, metavar="US",
        help="for so long the server looks for the next request before it sleeps, and front ends and engine for each other's "
        "messages, if there are two cores; 0: never")  # fmt: skip
    add("--max-connections", type=flags.not_negative, default=0,
        help="REST and gRPC connections together, 0 = as many as there are descriptors")  # fmt: skip
    add("--max-connections-per-address", type=flags.not_negative, default=0,
        help="of those, how many one client address may have, 0 = no limit of its own")  # fmt: skip
    add("--max-requests-per-second-per-address", type=flags.not_negative, default=0,
        help="requests of one client address over REST and gRPC, 0 = no limit; probes are free")  # fmt: skip
    add("--max-concurrent-requests-per-address", type=flags.not_negative, default=0,
        help="requests that one client address may have under way, 0 = no limit; probes are free")  # fmt: skip
    add("--max-load-bytes", type=flags.positive, default=limits.LOAD_BYTES,
        help="bytes of a load call's message over gRPC; over REST --http-max-input-size says it")  # fmt: skip
    add("--max-output-bytes", type=flags.positive, default=limits.OUTPUT_BYTES,
        help="bytes that an output or scratch buffer of a kernel model may take, whose size follows from a request")  # fmt: skip
    add("--max-held-bytes", type=flags.not_negative, default=0,
        help="bytes of large requests, what they are inflated to, and unread answers, REST and gRPC together, "
        "0 = half of the container's memory or the machine's")  # fmt: skip

    add = p.add_argument_group("web pages").add_argument
    add("--cors-allow-origin", type=flags.origin, action="append", default=[], metavar="ORIGIN",
        help="web pages of this origin may use the REST port (https://ui.example, '*' for all); may be repeated")  # fmt: skip
    add("--allowed-host", type=flags.host, action="append", default=[], metavar="NAME",
        help="a name of this server in Host headers ('*.NAME' for those under it, '*' for all); others are refused; "
        "on a loopback address they are without this flag, too; may be repeated")  # fmt: skip

    add = p.add_argument_group("TLS").add_argument
    add("--tls-min-version", choices=("1.2", "1.3"), default="1.2", help="of REST, gRPC and metrics")
    add("--tls-ciphers", default="", metavar="LIST",
        help="ciphers of TLS 1.2, as OpenSSL lists them (default: its own)")  # fmt: skip

    add = p.add_argument_group("HTTP/REST").add_argument
    add("--allow-http", type=flags.boolean, default=True, help="serve HTTP")
    add("--http-address", default="0.0.0.0", help="the address to listen on")
    add("--http-port", type=flags.port, default=8000, help="the port, 0 = any free one")
    add("--reuse-http-port", type=flags.boolean, default=False, help="share the port with other processes")
    add(
        "--http-max-input-size",
        type=flags.positive,
        default=64 << 20,
        help="bytes of a request, decompressed",
    )
    add("--http-header-forward-pattern", type=flags.header_pattern, default="", metavar="REGEX",
        help="headers whose name it finds become parameters of the request")  # fmt: skip
    add("--http-restricted-api", type=flags.restriction("api"), action="append", default=[],
        metavar="API[,API...]:HEADER=VALUE",
        help="endpoints that want this header; APIs: " + ", ".join(flags.RESTRICTED_CATEGORIES)
        + "; may be repeated")  # fmt: skip
    add("--http-restricted-api-file", type=Path, default=None, metavar="FILE",
        help="the same, one per line, where no other user can read the secret")  # fmt: skip
    add("--http-lean", type=flags.boolean, default=True, help="false: hypercorn, as released, serves REST")
    add("--http-request-timeout-secs", type=flags.seconds, default=60.0,
        help="how long a request may take to arrive; large bodies earn more")  # fmt: skip
    add("--http-keep-alive-timeout-secs", type=flags.seconds, default=600.0,
        help="close connections that are idle for so long, 0 = never")  # fmt: skip
    add("--http-tls-cert", type=Path, metavar="FILE", help="serve REST over TLS: the certificate chain, PEM")
    add("--http-tls-key", type=Path, metavar="FILE", help="the certificate's private key, PEM")
    add("--http-tls-client-ca", type=Path, metavar="FILE",
        help="ask clients for a certificate of these roots, PEM")  # fmt: skip

    add = p.add_argument_group("gRPC").add_argument
    add("--allow-grpc", type=flags.boolean, default=True, help="serve gRPC")
    add("--grpc-address", default="0.0.0.0", help="the address to listen on")
    add("--grpc-port", type=flags.port, default=8001, help="the port, 0 = any free one")
    add("--reuse-grpc-port", type=flags.boolean, default=False, help="share the port with other processes")
    add("--grpc-use-ssl", type=flags.boolean, default=False, help="serve gRPC over TLS")
    add("--grpc-use-ssl-mutual", type=flags.boolean, default=False,
        help="serve gRPC over TLS and ask clients for a certificate")  # fmt: skip
    add("--grpc-server-cert", type=Path, metavar="FILE", help="the server's certificate chain, PEM")
    add("--grpc-server-key", type=Path, metavar="FILE", help="the server's private key, PEM")
    add("--grpc-root-cert", type=Path, metavar="FILE", help="the roots of client certificates, PEM")
    add("--grpc-infer-response-compression-level", type=flags.one_of("none", "low", "medium", "high"), choices=("none", "low", "medium", "high"), default="none",
        help="compress the answers of clients that take gzip or deflate")  # fmt: skip
    add("--grpc-header-forward-pattern", type=flags.header_pattern, default="", metavar="REGEX",
        help="metadata whose name it finds become parameters of the request")  # fmt: skip
    add("--grpc-restricted-protocol", type=flags.restriction("protocol"), action="append", default=[],
        metavar="API[,API...]:KEY=VALUE",
        help="calls that want the metadata triton-grpc-protocol-KEY; APIs as above; may be repeated")  # fmt: skip
    add("--grpc-restricted-protocol-file", type=Path, default=None, metavar="FILE",
        help="the same, one per line, where no other user can read the secret")  # fmt: skip
    add("--grpc-keepalive-time", dest="grpc_keepalive_time_ms", type=flags.positive, default=7_200_000,
        help="ms of silence after which the server sends PING")  # fmt: skip
    add("--grpc-keepalive-timeout", dest="grpc_keepalive_timeout_ms", type=flags.positive, default=20_000,
        help="ms after which a PING without answer ends the connection")  # fmt: skip
    add("--grpc-keepalive-permit-without-calls", type=flags.boolean, default=False,
        help="send PING also when no call is open")  # fmt: skip
    add("--grpc-http2-min-recv-ping-interval-without-data",
        dest="grpc_http2_min_recv_ping_interval_without_data_ms", type=flags.not_negative, default=300_000,
        help="a client's PING sooner than this many ms after the last, with no call open, is a strike")  # fmt: skip
    add("--grpc-http2-max-ping-strikes", type=flags.not_negative, default=2,
        help="a client with more strikes is sent away, 0 = never")  # fmt: skip
    add("--grpc-max-unfinished-bytes", type=flags.not_negative, default=0,
        help="bytes of unfinished requests over all connections, 0 = half of the container's memory or the machine's")  # fmt: skip
    add("--grpc-max-unread-bytes", type=flags.not_negative, default=0,
        help="bytes of answers that clients do not read, over all connections, 0 = a quarter of the container's memory or the machine's")  # fmt: skip
    add("--grpc-max-connection-idle", dest="grpc_max_connection_idle_ms", type=flags.not_negative,
        default=600_000, help="ms after which a connection without calls ends, 0 = never")  # fmt: skip
    add("--grpc-max-connection-age", dest="grpc_max_connection_age_ms", type=flags.not_negative, default=0,
        help="ms after which a connection takes no more calls, 0 = never")  # fmt: skip
    add("--grpc-max-connection-age-grace", dest="grpc_max_connection_age_grace_ms", type=flags.not_negative,
        default=0, help="ms that calls of an aged connection may still take, 0 = for ever")  # fmt: skip

    add = p.add_argument_group("metrics").add_argument
    add("--allow-metrics", type=flags.boolean, default=True, help="serve Prometheus metrics")
    add("--metrics-address", default="", help="the address to listen on (default: --http-address)")
    add("--metrics-port", type=flags.port, default=8002, help="the port, 0 = any free one")
    add("--allow-console", type=flags.boolean, default=None,
        help="serve the console, pages for a browser, at /console of the metrics port and of the admin listener "
        "(default: on loopback addresses)")  # fmt: skip
    add("--metrics-tls-cert", type=Path, metavar="FILE",
        help="serve metrics over TLS: the certificate chain, PEM")  # fmt: skip
    add("--metrics-tls-key", type=Path, metavar="FILE", help="the certificate's private key, PEM")
    add("--metrics-tls-client-ca", type=Path, metavar="FILE",
        help="ask scrapers for a certificate of these roots, PEM")  # fmt: skip
    add("--metrics-interval-ms", type=flags.positive, default=2000, help="how often CPU and GPUs are sampled")
    add("--allow-gpu-metrics", type=flags.boolean, default=True, help="report the GPUs' gauges")
    add("--allow-cpu-metrics", type=flags.boolean, default=True, help="report the CPU's gauges")
    add("--metrics-config", action="append", default=[], metavar="KEY=VALUE",
        help="counter_latencies, summary_latencies, histogram_latencies (true or false), or "
        "summary_quantiles=QUANTILE:ERROR,...; may be repeated")  # fmt: skip
    add("--metrics-detail", type=flags.one_of("triton", "used", "full"), choices=("triton", "used", "full"), default="used",
        help="triton: only what a Triton server has; used: more of models that have had a request; "
        "full: of all models, with every bucket")  # fmt: skip

    add = p.add_argument_group("logging").add_argument
    add("--log-verbose", type=flags.verbosity, default=0, help="0 = off, 1 and more: verbose messages")
    add("--log-info", type=flags.boolean, default=True, help="log information")
    add("--log-warning", type=flags.boolean, default=True, help="log warnings")
    add("--log-error", type=flags.boolean, default=True, help="log errors")
    add(
        "--log-format",
        type=flags.one_of("default", "ISO8601"),
        choices=("default", "ISO8601"),
        default="default",
        help="the form of a log line",
    )
    add("--loop-lag-warning-ms", type=flags.tolerance, default=200.0, metavar="MS",
        help="log what made all requests wait for longer than this, at most a line a minute; 0: never")  # fmt: skip
    add("--log-file", default="", help="append the log to this file instead of standard error")

    add = p.add_argument_group("tracing").add_argument
    add("--trace-config", action="append", default=[], metavar="MODE,KEY=VALUE",
        help="level=OFF, TIMESTAMPS or TENSORS (repeat it for both), rate=N: every Nth request, count=N: so "
        "many traces, -1 = all; tail=MICROSECONDS: only of requests as slow or failed; triton,file=PATH; "
        "triton,log-frequency=N: a file per N traces; mode=opentelemetry, opentelemetry,url=URL; "
        "opentelemetry,resource=KEY=VALUE; opentelemetry,bsp_schedule_delay=MS; "
        "opentelemetry,bsp_max_queue_size=N; opentelemetry,bsp_max_export_batch_size=N")  # fmt: skip
    add(
        "--trace-file",
        default="",
        help="the file traces are written to (older form of --trace-config triton,file=)",
    )
    add(
        "--trace-level",
        action="append",
        default=[],
        help="OFF, TIMESTAMPS or TENSORS; may be repeated",
    )
    add("--trace-rate", default="", help="trace every RATE-th request")
    add("--trace-count", default="", help="how many more requests to trace, -1 for no limit")
    add(
        "--trace-log-frequency",
        default="",
        help="write so many traces to each of the files FILE.0, FILE.1, ...; 0: all to FILE",
    )
    add("--trace-dir", type=Path, default=DIRECTORY,
        help="the folder inside which trace_file may be set over the network; made when it is first used")  # fmt: skip
    add("--trace-max-bytes", type=flags.positive, default=MAX_BYTES,
        help="bytes that the files in --trace-dir may take; tracing to files there ends when they are reached")  # fmt: skip
    add("--allow-trace-file-update", type=flags.boolean, default=True,
        help="false: trace_file is the command line's for good")  # fmt: skip
    add("--trace-tensor-bytes", type=flags.positive, default=1 << 20,
        help="how much of a tensor is traced")  # fmt: skip
    add("--allow-forced-trace", type=flags.boolean, default=None,
        help="a request may have itself traced: parameter neptrio_trace, header neptrio-trace "
        "(default: on loopback addresses, by the parameter)")  # fmt: skip
    return p


_METAVARS: dict[Any, str] = {
    flags.boolean: "BOOL",
    flags.port: "PORT",
    flags.positive: "N",
    flags.not_negative: "N",
    flags.at_least_one: "N",
    flags.verbosity: "N",
    flags.seconds: "SECS",
    flags.repository: "DIR",
    Path: "DIR",
}


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults shown, description kept in lines; wide enough for the longest flag."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return _METAVARS.get(action.type, "VALUE")

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = "(default: " in (action.help or "")
        if told or action.default in (None, "", [], argparse.SUPPRESS) or not action.option_strings:
            return action.help
        return super()._get_help_string(action)


def settings_of(
    argv: list[str], before: Mapping[str, Any] | None = None, first: str = ""
) -> tuple[Settings, list[str]]:
    """Settings from flags, and warnings about flags without effect. Exits with 2 when they are wrong.

    `before` are settings that flags may change: their defaults, and more repositories and backend settings. `first` begins
    the text of --help.
    """
    before = dict(before or {})
    p = parser(first)
    more = {name: before.pop(name) for name in ("model_repository", "backend_config") if name in before}
    cache = before.pop("cache_config", ())
    p.set_defaults(**{name: list(v) if isinstance(v, tuple) else v for name, v in before.items()})
    options, left = p.parse_known_args(argv)
    warnings = flags.refuse_unknown(p, left)
    values: dict[str, Any] = vars(options)
    values["model_repository"] = [*more.get("model_repository", ()), *values["model_repository"]]
    if not values["model_repository"]:
        p.error("--model-repository=DIR is missing: the folder whose models are to be served")
    size = values.pop("response_cache_byte_size")
    if size and values["cache_config"]:
        p.error("--cache-config replaces --response-cache-byte-size: use only one of them")
    if size:
        warnings.append("--response-cache-byte-size is deprecated, use --cache-config=local,size=BYTES")
        values["cache_config"] = (f"local,size={size}",)
    values["cache_config"] = (
        [text for text in values["cache_config"] if text] if values["cache_config"] else cache
    )
    strict = values.pop("strict_model_config")
    if strict is not None:
        warnings.append("--strict-model-config is deprecated, use --disable-auto-complete-config")
        values["disable_auto_complete_config"] = values["disable_auto_complete_config"] or strict
    if values["rate_limit_resource"] and values["rate_limit"] == "off":
        warnings.append("--rate-limit-resource has no effect without --rate-limit=execution_count")
    if values["access_log_file"] != "stdout" and values["access_log"] == "off":
        warnings.append("--access-log-file has no effect without --access-log=json or combined")
    backends = {backend: dict(said) for backend, said in more.get("backend_config", {}).items()}
    for backend, key, value in values["backend_config"]:
        backends.setdefault(backend, {})[key] = value
        if meant := flags.misspelt(key):
            given = f"{backend},{key}" if backend else key
            warnings.append(f"--backend-config={given} is no setting of this server, did you mean '{meant}'?")
    values["backend_config"] = backends
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    try:
        for name, what, variable in (
            ("http_restricted_api", "api", "NEPTRIO_HTTP_RESTRICTED_API"),
            ("grpc_restricted_protocol", "protocol", "NEPTRIO_GRPC_RESTRICTED_PROTOCOL"),
        ):
            file = values.pop(name + "_file")
            values[name] += flags.read_restrictions(file, variable, what)
        return Settings(**values), warnings
    except ValueError as error:
        p.error(str(error))


def serve(settings: Settings, warnings: list[str], first_steps: bool = False) -> int:
    """Serves in this process until a signal; returns its exit status. `first_steps`: it says what can be typed now."""
    os.environ.pop("NEPTRIO_TOKEN", None)  # for commands that ask a server; models here must not see it
    gc.disable()  # start-up makes what lives for ever; the server turns it on when it is ready
    process_end.serves()
    with process_start.Uninterrupted():
        from neptrio import server_process
        from neptrio.logs import settle, start_logging
        from neptrio.loop import allocator

    allocator.set_up()
    try:
        start_logging(settings)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        return server_process.run(settings, first_steps)
    except TritonError as error:
        print(f"error: creating server: {error.code.title} - {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: creating server: {_of_system(error, settings)}", file=sys.stderr)
        return 1
    finally:
        settle()
        gc.enable()


def _of_system(error: OSError, settings: Settings) -> str:
    """An error's text without its number, and with the flag that names the file."""
    text = error.strerror or str(error)
    if error.filename is None:
        return text
    named = {str(getattr(settings, name)): name for name in ("log_file", "access_log_file", "audit_log")}
    flag = named.get(str(error.filename), "").replace("_", "-")
    return f"{f'--{flag}: ' if flag else ''}'{error.filename}' cannot be opened: {text}"
