"""Reads the metrics port, with prometheus_client's parser."""

from __future__ import annotations

import http.client

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.server import ServerProcess


def request(server: ServerProcess, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    """(status, headers in lower case, body) of one request to the metrics port."""
    connection = http.client.HTTPConnection(server.metrics, timeout=60)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


def scrape(server: ServerProcess) -> str:
    """The metrics document."""
    status, _, body = request(server, "GET", "/metrics")
    assert status == 200
    return body.decode()


def families(text: str) -> dict[str, Metric]:
    """name -> family. A counter's name is without `_total`, as the parser has it."""
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(text: str, name: str, **labels: str) -> float:
    """The one sample with exactly these labels; KeyError when there is none."""
    for line in text.splitlines():
        if not line.startswith(name):
            continue
        for family in text_string_to_metric_families(line + "\n"):
            for sample in family.samples:
                if line.startswith((name + "{", name + " ")) and sample.labels == labels:
                    return float(sample.value)
    raise KeyError((name, labels))
