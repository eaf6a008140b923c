"""The table of sizes: what the document says, and what readers do at the last value and one beyond it."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2

from neptrio import limits
from neptrio.codec.control_sizes import check_sizes
from neptrio.codec.descriptors import message_class
from neptrio.codec.json_reader import load
from neptrio.codec.json_request import decode_request as decode_json
from neptrio.codec.proto_request import decode_request as decode_message
from neptrio.errors import InvalidArgument, Overloaded, TritonError
from neptrio.repository.override import parts_of
from neptrio.request.infer_request import InferRequest
from neptrio.service.held_bytes import HeldBytes
from neptrio.transport.header_policy import HeaderForward
from neptrio.transport.rest import routes

ROOT = Path(__file__).resolve().parents[2]


def test_the_document_has_the_table() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    found = re.search(r"<!-- sizes: begin -->\n(.*?)<!-- sizes: end -->", text, re.S)
    assert found is not None
    rows = "".join(
        f"| {row.where} | {row.what} | {row.most:,}{' ' + row.unit if row.unit else ''} "
        f"| {row.beyond} | {'`' + row.flag + '`' if row.flag else ''} |\n"
        for row in limits.TABLE
    )
    assert found[1] == "| where | what | the most | beyond it | flag |\n|---|---|---|---|---|\n" + rows


def in_json(dimensions: int, name: str) -> None:
    shape = ",".join(["1"] * dimensions)
    text = f'{{"inputs":[{{"name":"{name}","datatype":"INT8","shape":[{shape}],"data":[1]}}]}}'
    decode_json(InferRequest(), text.encode())


def in_a_message(dimensions: int, name: str) -> None:
    message = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[b"1"])
    message.inputs.add(name=name, datatype="INT8", shape=[1] * dimensions)
    decode_message(InferRequest(), message.SerializeToString())


@pytest.mark.parametrize("read", [in_json, in_a_message])
def test_shapes_and_names(read: Callable[[int, str], None]) -> None:
    read(limits.MOST_DIMENSIONS, "x" * limits.LONGEST_NAME)
    with pytest.raises(InvalidArgument, match="more than 64 dimensions"):
        read(limits.MOST_DIMENSIONS + 1, "x")
    with pytest.raises(InvalidArgument, match=r"1025.*the most is 1024: 'x{128}\.\.\. ") as caught:
        read(1, "x" * (limits.LONGEST_NAME + 1))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("what", ["inputs", "outputs"])
def test_lists_of_tensors(what: str) -> None:
    message = service_pb2.ModelInferRequest(model_name="m")
    for _ in range(limits.MOST_TENSORS + 1):
        getattr(message, what).add(name="x")
    with pytest.raises(InvalidArgument, match=f"'{what}' has more than 16384 tensors"):
        decode_message(InferRequest(), message.SerializeToString())
    row = '{"name":"x","datatype":"INT8","shape":[1],"data":[1]}'
    document = {name: "[]" for name in ("inputs", "outputs")}
    document[what] = f"[{','.join([row] * (limits.MOST_TENSORS + 1))}]"
    text = f'{{"inputs":{document["inputs"]},"outputs":{document["outputs"]}}}'
    with pytest.raises(InvalidArgument, match=f"'{what}' has more than 16384 tensors"):
        decode_json(InferRequest(), text.encode())


@pytest.mark.slow
def test_objects_of_json_are_counted_before_they_are_made() -> None:
    kept: list[int] = []
    load(b"[" + b",".join([b"[]"] * 100_000) + b"]", large=True, reserve=kept.append)
    assert 7 << 20 < sum(kept) < 20 << 20

    def full(size: int) -> None:
        raise Overloaded("no room")

    with pytest.raises(Overloaded):
        load(b"[" + b",".join([b"[]"] * 100_000) + b"]", large=True, reserve=full)


SETTINGS = b"/inference.GRPCInferenceService/TraceSetting"
LOAD = b"/inference.GRPCInferenceService/RepositoryModelLoad"


def test_control_messages() -> None:
    made = message_class("inference.TraceSettingRequest")()
    for number in range(limits.MOST_ENTRIES // 2):
        made.settings[str(number)].value.append("x" * limits.LONGEST_VALUE)
    check_sizes(SETTINGS, made)
    made.settings["0"].value.append("x")
    with pytest.raises(InvalidArgument, match="more than 1024 elements"):
        check_sizes(SETTINGS, made)
    for longer in (
        {"model_name": "x" * 1025},
        {"settings": {"x" * 1025: {}}},
        {"settings": {"x": {"value": ["x" * 4097]}}},
    ):
        with pytest.raises(InvalidArgument, match="the most is"):
            check_sizes(SETTINGS, message_class("inference.TraceSettingRequest")(**longer))


def test_files_of_a_load_call() -> None:
    """A model may have thousands; each is an entry of the message, and its bytes are not read to count them."""
    made = message_class("inference.RepositoryModelLoadRequest")()
    for number in range(limits.MOST_FILES):
        made.parameters[f"file:1/{number}"].bytes_param = b"x"
    check_sizes(LOAD, made)
    with pytest.raises(InvalidArgument, match="more than 1024 elements"):
        check_sizes(SETTINGS, made)
    made.parameters["file:1/more"].bytes_param = b"x"
    with pytest.raises(InvalidArgument, match="more than 32768 elements"):
        check_sizes(LOAD, made)


def test_what_never_fits_is_not_told_to_come_again() -> None:
    held = HeldBytes(1000)
    assert "send the request again later" in str(held.problem(600) or held.problem(600))
    assert str(held.problem(1001)) == (
        "1001 bytes can never be held: requests and answers may hold 1000 in all (--max-held-bytes)"
    )


def test_errors_are_cut() -> None:
    error = TritonError("x" * (1 << 20))
    assert len(str(error)) == len(error.message) < limits.LONGEST_ERROR + 40
    assert limits.shown("x" * 128) == "x" * 128


@pytest.mark.parametrize("path", ["/" * 5000, "a/" * 2000 + "b", "x" * 5000])
def test_paths_of_files_in_load_calls(path: str) -> None:
    with pytest.raises(InvalidArgument, match="a path may have 1024 characters and 32 folders") as caught:
        parts_of(path)
    assert len(str(caught.value)) < 300


def test_long_texts_of_clients_are_not_remembered() -> None:
    cache: dict[str, int] = {}
    limits.remember(cache, "x" * (limits.LONGEST_KEPT + 1), 1, 4)
    assert not cache
    for number in range(6):
        limits.remember(cache, str(number), number, 4)
    assert cache == {"4": 4, "5": 5}


def test_header_names_and_methods_do_not_pile_up() -> None:
    forward = HeaderForward("^tenant")

    def many(times: int) -> None:
        for number in range(times):
            long = f"tenant{number}" + "x" * 10_000
            assert forward.headers([(long.encode(), b"v")]) == {long: "v"}
            request = InferRequest()
            request.parameters = {f"p{long}": 1}
            forward.into(request, {})
            assert routes.match(long, "/v2") is not None

    many(2)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        many(200)
        assert tracemalloc.get_traced_memory()[0] - before < 500_000  # of six million characters
    finally:
        tracemalloc.stop()
