"""The kit's fake models, its servers and its plugin."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import neptrio
from neptrio.testing import Clock, FakeModel, Record, TestServer
from tests.support.repository import identity_config, write_model

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[2]
X = {"x": ("FP32", [-1])}
Y = {"y": ("FP32", [-1])}
Serve = Callable[..., TestServer]


def double(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return 2 * x


def test_a_script_is_followed_and_its_last_step_repeats(neptrio_serve: Serve) -> None:
    fake = (
        FakeModel(X, Y)
        .answers({"y": [1, 2]})
        .fails(neptrio.Unavailable("not now"))
        .fails("oh")
        .answers(lambda x: {"y": x + 1})
    )
    server = neptrio_serve(fake)
    assert server.infer("fake", x=[5])["y"].tolist() == [1, 2]
    with pytest.raises(neptrio.Unavailable, match="not now"):
        server.infer("fake", x=[5])
    with pytest.raises(neptrio.TritonError, match="RuntimeError: oh"):
        server.infer("fake", x=[5])
    assert [server.infer("fake", x=[i])["y"].tolist() for i in (1, 2)] == [[2], [3]]
    assert len(fake.records) == 5


def test_records_say_what_was_asked(neptrio_serve: Serve) -> None:
    fake = FakeModel(X, Y, name="seen", config={"sequence_batching": {}})
    server = neptrio_serve(fake)
    response = server.model("seen").infer(
        {"x": [1, 2]}, request_id="r", parameters={"a": 1}, sequence_id=3, sequence_start=True
    )
    assert response["y"].tolist() == [0]
    record = fake.until_asked()
    assert record.inputs.pop("x").tolist() == [1, 2]
    assert record == Record({}, "r", {"a": 1}, 3, True, False)


def test_a_held_model_goes_on_when_released(neptrio_serve: Serve) -> None:
    fake = FakeModel(X, Y).holds().answers({"y": [1]}).answers({"y": [2]})
    server = neptrio_serve(fake)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.infer, "fake", x=[1])
        fake.until_asked()
        assert not first.done()
        fake.release()
        assert first.result(60)["y"].tolist() == [1]
    assert server.infer("fake", x=[1])["y"].tolist() == [2]
    server.until_idle("fake")


def test_batches_and_streams(neptrio_serve: Serve) -> None:
    batching = FakeModel(X, Y, name="batching", max_batch_size=4)
    stream = FakeModel(X, Y, name="stream", decoupled=True).answers({"y": [1]}, {"y": [2]})
    server = neptrio_serve(batching, stream)
    assert server.infer("batching", x=np.ones((3, 2), np.float32))["y"].tolist() == [[0]] * 3
    assert [r["y"].tolist() for r in server.model("stream").stream({"x": [1]})] == [[1], [2]]
    with pytest.raises(ValueError, match="decoupled=True"):
        batching.answers({}, {})


def test_functions_folders_and_clients_of_the_network(neptrio_serve: Serve, tmp_path: Path) -> None:
    write_model(tmp_path, "identity", identity_config())
    server = neptrio_serve(FakeModel(X, Y), double, tmp_path, http_port=0, grpc_port=0)
    assert server.http_client().is_model_ready("identity")
    assert server.grpc_client().is_model_ready("fake")
    assert server.infer("double", x=[2])["OUTPUT"].tolist() == [4]
    assert server.ready()
    with TestServer(FakeModel(X, Y)) as other, pytest.raises(RuntimeError, match="http_port=0"):
        other.http_client()
    with pytest.raises(AttributeError, match="with `with`"):
        TestServer(FakeModel(X, Y)).ready()


def test_a_server_ends_whatever_its_models_do() -> None:
    """Held executions and long delays do not keep the test."""
    held, slow = FakeModel(X, Y, name="held").holds(), FakeModel(X, Y, name="slow").takes(3600)
    with ThreadPoolExecutor(2) as pool, TestServer(held, slow) as server:
        asked = [pool.submit(server.infer, name, x=[1]) for name in ("held", "slow")]
        held.until_asked()
        slow.until_asked()
    assert all(request.result(60)["y"].tolist() == [0] for request in asked)


def test_a_request_behind_a_held_one_waits(neptrio_serve: Serve) -> None:
    fake = FakeModel(X, Y).holds()
    server = neptrio_serve(fake)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(server.infer, "fake", x=[1])]
        fake.until_asked()
        asked.append(pool.submit(server.infer, "fake", x=[1]))
        server.until_queued("fake", 1)  # in a batch that is prepared for the busy instance
        fake.release(2)
        assert [each.result(60)["y"].tolist() for each in asked] == [[0], [0]]


def test_a_test_that_fails_beside_a_held_execution_ends(neptrio_serve: Serve) -> None:
    fake = FakeModel(X, Y).holds()
    server = neptrio_serve(fake)
    with pytest.raises(ZeroDivisionError), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.infer, "fake", x=[1])
        fake.until_asked()
        1 / 0  # noqa: B018  # what a wrong assertion does: the executor waits for the model then
    assert asked.result(0)["y"].tolist() == [0]


@pytest.mark.slow
def test_the_plugin_in_a_suite_of_its_own(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["neptrio.testing.plugin"]')
    pytester.makepyfile(
        """
        from neptrio.testing import FakeModel

        def test_it(neptrio_serve, neptrio_clock):
            fake = FakeModel({"x": ("FP32", [1])}, {"y": ("FP32", [1])}).answers({"y": [3]})
            server = neptrio_serve(fake)
            assert server.clock is neptrio_clock
            assert server.infer("fake", x=[1])["y"].tolist() == [3]
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


@pytest.mark.slow
def test_the_example(pytester: pytest.Pytester) -> None:
    page = (ROOT / "docs/testing.md").read_text()
    example = (ROOT / "examples/test_patience.py").read_text()
    assert example[example.index("def test_") :] in page
    for name in ("conftest.py", "test_patience.py"):
        (pytester.path / name).write_text((ROOT / "examples" / name).read_text())
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_each_server_has_a_clock() -> None:
    assert isinstance(TestServer().clock, Clock)
