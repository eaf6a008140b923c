"""The text that the server prints when it has started: models and their states, addresses, what was found."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from neptrio.config import accelerators, groups
from neptrio.config.misplaced import no_models
from neptrio.config.sample_request import try_it
from neptrio.settings import Settings
from neptrio.terminal import counted

HEADS = ("Model", "Version", "State", "Runs on", "Reason")
REASON_WIDTH = 100
SHOWN_MODELS = 10  # of those that failed


def table(rows: Iterable[Mapping[str, str]], places: Mapping[tuple[str, str], str] | None = None) -> str:
    """Rows of the repository index as a table; long reasons continue on further lines.

    `places` says where each (model, version) runs.
    """
    places = places or {}
    cells: list[Sequence[str]] = []
    for row in rows:
        reason = []
        for text in row.get("reason", "").splitlines() or [""]:
            reason += textwrap.wrap(text, REASON_WIDTH, drop_whitespace=False) or [""]
        cells.append(
            (
                row["name"],
                row.get("version", "-"),
                row.get("state", "not loaded"),
                places.get((row["name"], row.get("version", "")), ""),
                reason[0],
            )
        )
        cells += [("", "", "", "", more) for more in reason[1:] if more.strip()]
    widths = [max([len(c[i]) for c in cells] + [len(head)]) for i, head in enumerate(HEADS)]
    rule = "+" + "+".join("-" * (w + 2) for w in widths) + "+"

    def line(values: Sequence[str]) -> str:
        return "|" + "|".join(f" {v.ljust(w)} " for v, w in zip(values, widths, strict=True)) + "|"

    return "\n".join([rule, line(HEADS), rule, *map(line, cells), rule])


def what_failed(rows: Iterable[Mapping[str, str]], settings: Settings) -> str:
    """Which models did not load, and what to type: the end of a start that failed."""
    states: dict[str, bool] = {}
    for row in rows:
        states[row["name"]] = states.get(row["name"], True) and row.get("state") == "READY"
    failed = [name for name, ready in states.items() if not ready]
    places = " ".join(shlex.quote(str(place)) for place in settings.model_repository)
    if not failed:
        return f"neptrio check {places}: says what is wrong with the repository"
    shown = ", ".join(failed[:SHOWN_MODELS]) + (", ..." if len(failed) > SHOWN_MODELS else "")
    asked = "".join(f" --model {shlex.quote(name)}" for name in failed[:SHOWN_MODELS])
    return (
        f"{len(failed)} of {len(states)} models did not load: {shown}\n"
        f"  neptrio check{asked} {places}\n"
        "      checks configurations and files without running anything\n"
        "  --exit-on-error=false\n"
        "      serves the other models"
    )


def open_controls(settings: Settings) -> str:
    """A warning when clients on other machines can change something, else ""."""
    if settings.read_only or settings.auth_config is not None or not settings.exposed:
        return ""
    found = [
        ("model-repository", settings.loads_by_request),
        ("trace", True),
        ("logging", True),
        ("shared-memory", settings.allow_client_shm),
    ]
    closed = []
    admin = settings.admin_address is not None  # it serves both protocols
    if settings.allow_http or admin:
        closed.append({name for group in settings.http_restricted_api for name in group.categories})
    if settings.allow_grpc or admin:
        closed.append({name for group in settings.grpc_restricted_protocol for name in group.categories})
    names = [name for name, on in found if on and not all(name in group for group in closed)]
    if not names:
        return ""
    return (
        f"whoever can reach {' or '.join(settings.exposed)} may use the control verbs of {', '.join(names)}: "
        "--read-only=true, --http-restricted-api with --grpc-restricted-protocol, or loopback addresses close them "
        "(docs/security.md)"
    )


def address(sock_name: Sequence[object]) -> str:
    """host:port, with brackets around an IPv6 host; unix:PATH of a Unix socket."""
    if isinstance(sock_name, str):
        return f"unix:{sock_name}"
    host, port = sock_name[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


# ------------------------------------------------------------ the texts of a server (neptrio.server.Server)


def _rest_url(server: Any) -> str:
    assert server.http_listener is not None
    scheme = "https" if server.settings.http_tls_cert else "http"
    return f"{scheme}://{address(server.http_listener.getsockname())}"


def first_steps(server: Any) -> str:
    """What somebody who tries the server can type now: a request, and how it ends."""
    lines = []
    if server.http_listener is not None:
        request = try_it((m.config for m in server.repository.ready_models()), _rest_url(server))
        lines += ["a first request:", f"  {request}"] if request else []
    return "\n".join([*lines, "Ctrl-C stops the server"])


def _table(server: Any) -> str:
    places = {
        (m.name, m.version): groups.runs_on(m.config, m.backend.own_processes)
        for m in server.repository.ready_models()
    }
    rows, waiting = _rows(server)
    found = table(rows, places) if rows else "" if waiting else no_models(server.settings.model_repository)
    told = f"loaded when asked for: {counted(waiting, 'model')}" if waiting else ""
    return "\n".join(filter(None, (found, told)))


def _rows(server: Any) -> tuple[list[dict[str, Any]], int]:
    """The rows of the repository index, and how many models it leaves out: those that are loaded on demand and are not."""
    known = () if server.repository.demand is None else server.repository.demand.known
    latest = server.repository.latest
    rows = server.repository.index(False)
    found = [row for row in rows if row["name"] not in known or row["name"] in latest]
    return found, sum(name not in latest for name in known)


def failed(server: Any) -> str:
    """The models as they are when the start ends, and what can be typed now."""
    return f"{_table(server)}\n{what_failed(_rows(server)[0], server.settings)}"


def describe(server: Any) -> str:
    """The start-up text: models and addresses, and what hardware was found."""
    lines = [_table(server)]
    for name, listener, note in (
        ("REST", server.http_listener, "https://{}" if server.settings.http_tls_cert else "http://{}"),
        ("gRPC", server.grpc_listener, "{}"),
        (
            "metrics",
            server.metrics_listener,
            "https://{}/metrics" if server.settings.metrics_tls_cert else "http://{}/metrics",
        ),
    ):
        if listener is not None:
            lines.append(f"{name:<8} on " + note.format(address(listener.getsockname())))
    if server.console and server.metrics_listener is not None:
        scheme = "https" if server.settings.metrics_tls_cert else "http"
        lines.append(f"console  on {scheme}://{address(server.metrics_listener.getsockname())}/console")
    if server.http_listener is not None:
        lines.append(f"docs     on {_rest_url(server)}/docs")
    if server.admin is not None:
        scheme = "https://" if server.admin.secure else ""
        place = address(server.admin.listener.getsockname())
        lines.append(f"admin    on {scheme}{place} (REST, gRPC, /metrics; control verbs only here)")
    if server.front_ends is not None:
        found = ", ".join(f"{row.number}: process {row.pid}" for row in server.front_ends.rows())
        spoken = [
            name
            for name, listener in (("HTTP", server.http_listener), ("gRPC", server.grpc_listener))
            if listener is not None
        ]
        lines.append(f"front ends speak {' and '.join(spoken)} ({found})")
    lines.append(f"accelerators: {accelerators.describe()}")
    return "\n".join(lines)
