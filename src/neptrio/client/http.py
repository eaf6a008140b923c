"""Inference calls over HTTP, blocking: arrays in, arrays out. Threads may share a client."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from neptrio import datatypes
from neptrio.addresses import model_in_path, parts_of
from neptrio.client.client import InferenceError, Inputs, Parameters, Result, decode_array, encode_array
from neptrio.client.connection import ConnectionLost
from neptrio.flags import authorization

HEADER = "Inference-Header-Content-Length"


class HttpClient:
    """Calls to one server, over one connection per thread.

    `url` is HOST:PORT, or an http or https URL, optionally with the path prefix that comes before /v2.
    """

    def __init__(self, url: str, timeout: float = 300.0) -> None:
        try:
            parts = parts_of(url if "://" in url else f"http://{url}")
            if parts.scheme not in ("http", "https"):
                raise ValueError
            # refuses what is no host, and connects later
            http.client.HTTPConnection(parts.hostname or "", parts.port)
        except (ValueError, http.client.InvalidURL):
            raise ValueError(f"'{url}' is no HTTP address: expected HOST:PORT or http://HOST:PORT") from None
        self._parts = parts
        self._timeout = timeout
        self._local = threading.local()
        self._all: list[http.client.HTTPConnection] = []

    def _connection(self) -> http.client.HTTPConnection:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            kind = (
                http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
            )
            connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout)
            self._local.connection = connection
            self._all.append(connection)
        return connection

    def call(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[bytes, str]:
        """The body of an answer, and the length of its JSON part (its Inference-Header-Content-Length header).

        Raises InferenceError for an answer that is an error, ConnectionLost when none came.
        """
        connection = self._connection()
        try:
            headers = {**authorization(), **(headers or {})}
            connection.request(method, self._parts.path.rstrip("/") + path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ConnectionLost(f"{self._parts.netloc}: {error or type(error).__name__}") from error
        if answer.status != 200:
            try:
                message = str(json.loads(content)["error"])
            except (ValueError, KeyError, TypeError, RecursionError):
                message = content[:200].decode(errors="replace").strip()
            raise InferenceError(message or f"HTTP status {answer.status}", answer.status)
        return content, answer.getheader(HEADER, "")

    def json(self, method: str, path: str) -> dict[str, Any]:
        """The JSON object of an answer. Raises as call() does, and InferenceError for an answer that is none."""
        content, _ = self.call(method, path)
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise InferenceError(
                f"{self._parts.netloc} answered with no JSON object: is this the HTTP port of an inference server?"
            )
        return found

    def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: str = "",
        id: str = "",
        outputs: Iterable[str] = (),
        parameters: Parameters | None = None,
    ) -> Result:
        """One inference with binary tensors; `outputs` are the names of those that are wanted, none for all. Raises
        InferenceError, ConnectionLost.
        """
        text, raws = encode(inputs, id=id, outputs=outputs, parameters=parameters)
        path = f"/v2/models/{model_in_path(model)}" + (f"/versions/{version}" if version else "") + "/infer"
        body, size = self.call("POST", path, b"".join([text, *raws]),
                               {"Content-Type": "application/octet-stream", HEADER: str(len(text))})  # fmt: skip
        return _result(body, int(size or len(body)))

    def close(self) -> None:
        """Closes every thread's connection."""
        for connection in self._all:
            connection.close()


def encode(
    inputs: Inputs, *, id: str = "", outputs: Iterable[str] = (), parameters: Parameters | None = None
) -> tuple[bytes, list[bytes]]:
    """The JSON part of a request's body and the binary tensors behind it; `outputs` are the names of those that are wanted."""
    head: dict[str, Any] = {"inputs": []}
    if id:
        head["id"] = id
    head["parameters"] = {**(parameters or {}), "binary_data_output": True}
    raws = []
    for name, given in inputs.items():
        array = np.asarray(given)
        datatype, raw = encode_array(name, array)
        raws.append(raw)
        head["inputs"].append({"name": name, "datatype": datatype, "shape": array.shape,
                               "parameters": {"binary_data_size": len(raw)}})  # fmt: skip
    wanted = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    if wanted:
        head["outputs"] = wanted
    return json.dumps(head).encode(), raws


def _result(body: bytes, size: int) -> Result:
    head = json.loads(body[:size])
    outputs: dict[str, np.ndarray] = {}
    at = size
    for tensor in head.get("outputs", ()):
        datatype, shape = tensor["datatype"], tensor["shape"]
        length = tensor.get("parameters", {}).get("binary_data_size")
        if length is None:
            array = np.array(tensor["data"], dtype=datatypes.NUMPY[datatypes.NUMBER[datatype]]).reshape(shape)
        else:
            array = decode_array(datatype, shape, body[at : at + length])
            at += length
        outputs[tensor["name"]] = array
    return Result(head.get("id", ""), head.get("model_name", ""), str(head.get("model_version", "")), outputs,
                  head.get("parameters", {}))  # fmt: skip
