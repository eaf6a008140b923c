"""docs/kernels.md and the example repository, taken at their word."""

from __future__ import annotations

import http.client
import json
import re
from pathlib import Path

from tests.support.repository import write_model
from tests.support.server import ServerProcess

ROOT = Path(__file__).parents[3]


def test_from_a_cu_file_to_an_answer(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "kernels.md").read_text()
    blocks = [
        "\n".join(line[3:] for line in block.split("\n"))
        for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    ]
    source, config, commands = blocks[:3]
    body = re.search(r"-d '(.*)'", commands)
    assert body is not None
    write_model(tmp_path, "scale", config, {"1/model.cu": source})
    with ServerProcess(tmp_path) as server:
        connection = http.client.HTTPConnection(server.http)
        connection.request("POST", "/v2/models/scale/infer", body.group(1))
        answer = connection.getresponse()
        assert answer.status == 200
        assert json.loads(answer.read())["outputs"][0]["data"] == [2.5, 5.0, 7.5]
        connection.close()
        assert '"data":[2.5,5.0,7.5]' in text
