"""Every kernel of the family on the host, through a real server, against numpy in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.kernel.family import FAMILY, Case
from tests.backends.kernel.family.served import BATCHED, check_alone, check_together
from tests.support.server import ServerProcess

BATCHING = "instance_group { kind: KIND_CPU } dynamic_batching { max_queue_delay_microseconds: 2000 }"


@pytest.fixture(scope="module", params=["none", "process"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("family")
    for case in FAMILY:
        case.write(repository, " " + BATCHING)
    with ServerProcess(repository, f"--backend-config=kernel,isolation={request.param}") as process:
        yield process


@pytest.mark.parametrize("case", FAMILY, ids=lambda c: c.name)
def test_against_numpy(server: ServerProcess, case: Case) -> None:
    check_alone(server, case)


@pytest.mark.parametrize("case", BATCHED, ids=lambda c: c.name)
def test_requests_batched_together_get_their_own_rows(server: ServerProcess, case: Case) -> None:
    check_together(server, case)
