"""A stream of the real gRPC client, and what comes over it."""

from __future__ import annotations

import queue
from typing import Any

from tritonclient.utils import InferenceServerException


class Answers:
    """What comes over a client's stream, in order; the stream is open while a block runs."""

    def __init__(self, client: Any, **options: Any) -> None:
        self._client = client
        self._got: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: self._got.put(error or result), **options)

    def next(self) -> Any:
        """The next result, or the error in its place."""
        return self._got.get(timeout=60)

    def result(self) -> Any:
        """The next answer, which is no error."""
        found = self.next()
        assert not isinstance(found, InferenceServerException), found
        return found

    def results(self, count: int) -> list[Any]:
        """The next so many answers, none of which is an error."""
        return [self.result() for _ in range(count)]

    def error(self) -> InferenceServerException:
        """The next answer, which is an error."""
        found = self.next()
        assert isinstance(found, InferenceServerException), found
        return found

    def empty(self) -> bool:
        """Whether no answer is left."""
        return self._got.empty()

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        # whoever has not come to an answer must not wait for it here once more
        self._client.stop_stream(cancel_requests=failure is not None)
