"""Settings of neptrio.Server: checked as the command's flags are."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import neptrio
from neptrio.embedded.setting_values import checked
from neptrio.flags import MemoryBudget
from neptrio.settings import Settings


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"model_control_mode": "explict"}, ValueError, "model_control_mode: expected one of none, poll, explicit, on-demand, got 'explict', did you mean 'explicit'"),
        ({"allow_http": "maybe"}, ValueError, "allow_http: expected one of true"),
        ({"allow_http": 1}, TypeError, "allow_http: expected bool, got int"),
        ({"http_port": 70000}, ValueError, "http_port: expected an integer from 0 to 65535, got '70000'"),
        ({"http_port": True}, TypeError, "http_port: expected int, got bool"),
        ({"http_port": 1.5}, TypeError, "http_port: expected int, got float"),
        ({"exit_timeout_secs": "x"}, ValueError, "exit_timeout_secs: expected a number of seconds"),
        ({"exit_timeout_secs": None}, TypeError, "exit_timeout_secs: expected a number, got NoneType"),
        ({"max_held_bytes": -1}, ValueError, "max_held_bytes: expected an integer of 0 or more"),
        ({"rate_limit_resource": ["R"]}, ValueError, "rate_limit_resource: expected NAME:COUNT"),
        ({"load_model": [b"m"]}, TypeError, "load_model: expected str, got bytes"),
        ({"auth_config": 3}, TypeError, "auth_config: expected a path, got int"),
        ({"backend_config": {"python": 3}}, TypeError, "backend_config: expected a mapping"),
        ({"http_prot": 8000}, TypeError, "Server has no setting 'http_prot', did you mean 'http_port'"),
        ({"response_cache_byte_size": 1}, TypeError, "Server has no setting 'response_cache_byte_size'"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_settings_are_refused_when_they_are_given(
    given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        neptrio.Server(**given)
    with pytest.raises(error, match=text):
        neptrio.Server().preset(**given)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"allow_http": "false"}, {"allow_http": False}),
        ({"load_model": "simple"}, {"load_model": ("simple",)}),
        ({"load_model": ["a", "b"]}, {"load_model": ("a", "b")}),
        ({"exit_timeout_secs": "5"}, {"exit_timeout_secs": 5.0}),
        ({"repository_poll_secs": 0.0}, {"repository_poll_secs": 0}),
        ({"auth_config": "tokens.toml"}, {"auth_config": Path("tokens.toml")}),
        ({"auth_config": None}, {"auth_config": None}),
        ({"log_verbose": 1}, {"log_verbose": 1}),
        ({"log_verbose": "true", "log_format": "iso8601"}, {"log_verbose": 1, "log_format": "ISO8601"}),
        ({"trace_rate": 1}, {"trace_rate": "1"}),
        ({"model_memory_budget": 1 << 30}, {"model_memory_budget": (MemoryBudget(None, 1 << 30),)}),
        ({"model_memory_budget": MemoryBudget(0, 5)}, {"model_memory_budget": (MemoryBudget(0, 5),)}),
        (
            {"model_memory_budget": ["1GiB", "gpu:0=2GiB"]},
            {"model_memory_budget": (MemoryBudget(None, 1 << 30), MemoryBudget(0, 2 << 30))},
        ),
        ({"rate_limit_resource": "R:4"}, {"rate_limit_resource": (("R", None, 4),)}),
        ({"rate_limit_resource": ("R", 0, 4)}, {"rate_limit_resource": (("R", 0, 4),)}),
        ({"backend_config": "python,a=b"}, {"backend_config": {"python": {"a": "b"}}}),
        ({"backend_config": {"": {"a": True}}}, {"backend_config": {"": {"a": "true"}}}),
    ],
    ids=str,
)
def test_settings_are_read_as_flags_are(given: dict[str, Any], taken: dict[str, Any]) -> None:
    assert checked(given) == taken


def test_every_setting_can_be_given_and_every_default_is_one() -> None:
    defaults = {
        one.name: getattr(Settings(), one.name) for one in fields(Settings) if one.name != "model_repository"
    }
    assert checked(defaults) == defaults


def test_a_text_that_means_no_opens_no_port() -> None:
    with neptrio.Server(allow_http="false", model_control_mode="EXPLICIT".lower()).running() as server:
        assert server.addresses == {}
