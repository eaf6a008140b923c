"""The rules by which Triton's public trace summary tool reads a file, written anew from their description.

Shares no code with the server or with `neptrio trace`. Raises ValueError for what the rules do not accept, where the
public tool drops a trace or ends with an exception.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

NAMES = {
    "HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END", "GRPC_WAITREAD_START",
    "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END", "INFER_RESPONSE_COMPLETE", "REQUEST_START",
    "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END", "REQUEST_END",
}  # fmt: skip
DTYPES = {"BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32",
          "FP64", "BYTES"}  # fmt: skip
ACTIVITIES = {"TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_INPUT", "TENSOR_BACKEND_OUTPUT"}


def need(condition: object, text: str) -> None:
    if not condition:
        raise ValueError(text)


def load(path: Path) -> dict[int, dict[str, Any]]:
    """Traces by id, merged from their objects, in the order of their ids."""
    items = json.loads(path.read_text())
    need(isinstance(items, list) and items, "one array that is not empty")
    merged: dict[int, dict[str, Any]] = {}
    for item in items:
        need(isinstance(item.get("id"), int), f"a numeric id: {item}")
        trace = merged.setdefault(item["id"], {"timestamps": [], "tensors": []})
        trace["timestamps"] += item.get("timestamps", [])
        if "activity" in item:
            tensor(item)
            trace["tensors"].append((item["activity"], item["tensor"]))
        for key in ("model_name", "model_version", "parent_id", "request_id"):
            if key in item:
                need(trace.get(key, item[key]) == item[key], f"one {key} for trace {item['id']}")
                trace[key] = item[key]
    return dict(sorted(merged.items()))


def tensor(item: dict[str, Any]) -> None:
    """Checks a tensor's object: all members are texts, with as many elements as the shape says."""
    need(item["activity"] in ACTIVITIES, f"a known activity, not {item['activity']}")
    found = item["tensor"]
    need(all(isinstance(found[key], str) for key in ("name", "data", "shape", "dtype")), f"texts: {found}")
    need(found["dtype"] in DTYPES, f"a dtype that the tool knows, not {found['dtype']}")
    count = math.prod(int(d) for d in found["shape"].split(",") if d)
    if found["dtype"] == "BYTES":
        need(len(json.loads("[" + found["data"].replace("\n", "\\n").replace("\x00", "\\u0000") + "]")) == count,
             f"{count} quoted strings")  # fmt: skip
    else:
        need(len([float(x) for x in found["data"].split(",") if x]) == count, f"{count} numbers: {found}")


def span(at: dict[str, int], first: str, last: str) -> int:
    need(first in at and last in at, f"timestamps missing: {first} and {last}")
    need(at[last] >= at[first], f"{last} is before {first}")
    return at[last] - at[first]


def summary(path: Path) -> dict[tuple[str, str, int], dict[str, list[int]]]:
    """(protocol, model, version) -> durations of every span in ns, of the traces that the tool counts."""
    fronts: dict[int, str] = {}
    found: dict[tuple[str, str, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, trace in load(path).items():
        names = [stamp["name"] for stamp in trace["timestamps"]]
        need(set(names) <= NAMES, f"known names: {set(names) - NAMES}")
        times = [stamp["ns"] for stamp in trace["timestamps"]]
        need(times == sorted(times) and all(isinstance(ns, int) for ns in times), "points in time order")
        parent = trace.get("parent_id")
        if parent is not None:
            need(parent in fronts, f"the parent {parent} of {number} before it")
            front = fronts[parent]
        else:
            front = ("HTTP" if any("HTTP_RECV_START" in name for name in names)
                     else "GRPC" if any("GRPC_WAITREAD_START" in name for name in names) else "")  # fmt: skip
            need(front, f"trace {number} has no front")
        fronts[number] = front
        need("REQUEST_START" in names and "REQUEST_END" in names, f"trace {number} is whole")
        need(isinstance(trace["model_name"], str) and isinstance(trace["model_version"], int), "an identity")
        at: dict[str, int] = {}
        for stamp in trace["timestamps"]:  # of names that repeat, starts count first and ends last
            if stamp["name"] not in at or stamp["name"].endswith("END"):
                at[stamp["name"]] = stamp["ns"]
        spans = found[front, trace["model_name"], trace["model_version"]]
        spans["handler"].append(span(at, "REQUEST_START", "REQUEST_END"))
        if "COMPUTE_START" in at:
            spans["queue"].append(span(at, "QUEUE_START", "COMPUTE_START"))
            spans["compute"].append(span(at, "COMPUTE_START", "COMPUTE_END"))
            spans["input"].append(span(at, "COMPUTE_START", "COMPUTE_INPUT_END"))
            spans["infer"].append(span(at, "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"))
            spans["output"].append(span(at, "COMPUTE_OUTPUT_START", "COMPUTE_END"))
        if "HTTP_SEND_END" in at:
            spans["request"].append(span(at, "HTTP_RECV_START", "HTTP_SEND_END"))
            spans["receive"].append(span(at, "HTTP_RECV_START", "HTTP_RECV_END"))
            spans["send"].append(span(at, "HTTP_SEND_START", "HTTP_SEND_END"))
        if "GRPC_SEND_END" in at:
            spans["request"].append(span(at, "GRPC_WAITREAD_END", "GRPC_SEND_END"))
            spans["wait"].append(span(at, "GRPC_WAITREAD_START", "GRPC_WAITREAD_END"))
            spans["send"].append(span(at, "GRPC_SEND_START", "GRPC_SEND_END"))
    return {key: dict(spans) for key, spans in found.items()}
