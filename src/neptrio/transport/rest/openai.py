"""OpenAI's API for models that are text in, text out: /v1/models, completions, chat completions, embeddings.

Every choice (a prompt, `n` times) is a request of its own, which enters at admission like any other: it is batched with
everybody else's, counted, traced, limited and cancelled in the same way.

Rules:
 1. What refuses a request, and a failure before anything was sent, is answered with that error's status. A later one is
    an event with an `error`, and ends the stream.
 2. Pieces are sent as they come. If the client reads slowly, its own choices wait, and the model with them.
 3. A client that disconnects, a stop text and a failed choice cancel the requests that are not answered.
 4. Choices of one prompt share its tensor, which the server's budget of bytes counts. In the limits of a client address
    and of a token each choice and each text counts as a request.
 5. Errors have OpenAI's shape (codec.openai.error_object).
"""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import trio

from neptrio import datatypes
from neptrio.codec import openai as codec
from neptrio.codec.http_json import dump_json
from neptrio.config.openai import OpenAiMapping, Render
from neptrio.errors import Denied, Internal, InvalidArgument, NotFound, TritonError, raise_it
from neptrio.loop.slices import Slices
from neptrio.request.infer_request import InferRequest, InferResponse, Tensor
from neptrio.request.numpy_tensor import from_numpy, to_numpy
from neptrio.service import Services, Verbs
from neptrio.service.tokens import Account
from neptrio.transport.header_policy import Forwarded
from neptrio.transport.reservation import Kept
from neptrio.transport.rest.disconnect import unless_gone, when_loaded
from neptrio.transport.rest.generate import EVENTS, ResponseQueue
from neptrio.transport.rest.infer import JSON, Answer
from neptrio.transport.rest.times import CallTimes

PREFIX = "/v1/"  # of the paths whose errors have OpenAI's shape
DONE = b"data: [DONE]\n\n"
COUNTED = 32 << 10  # bytes: a larger text that was made of a request's is counted in the server's budget


@dataclass
class _Choice:
    """One choice under way, and what it has come to."""

    index: int
    request: InferRequest
    queue: ResponseQueue
    stops: codec.Stops
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )  # a model may cut its text inside of a character
    text: str = ""
    reason: str = "stop"
    prompt_tokens: int = 0
    tokens: int = 0
    unsent: int = 0  # responses of which the client has not been sent anything yet


class HttpOpenAi:
    """One request to execute a model; `chat`, else plain completions or embeddings."""

    def __init__(
        self,
        services: Services,
        owner: Account | None,
        forwarded: Forwarded | None,
        times: CallTimes,
        address: str = "",
    ) -> None:
        """`address`: the client's, for its limits; "" where none hold."""
        self._services = services
        self._owner = owner
        self._forwarded = forwarded
        self._times = times
        self._failed: _Choice | None = None  # the one that fails the others
        self._choices: list[_Choice] = []
        self._created = int(time.time())
        self._address = address if services.request_limits.on else ""
        self._joined = False
        self._kept = Kept(services.held)
        self._made: dict[tuple[str, str], Tensor] = {}  # (role, text) -> what choices share

    async def completions(
        self, document: dict[str, Any], chat: bool, receive: Any, send: Any
    ) -> Answer | None:
        """Answers a request for completions: sends a stream and returns None, or returns the answer.

        Raises TritonError if the request is refused, Disconnected. Cancellation: cancels the choices.
        """
        mapping = await self._mapping(codec.model_of(document), receive)
        if not mapping.completes:
            raise codec.RefusedMember(
                f"model '{document['model']}' does not complete text", "model", "invalid_value"
            )
        asked = codec.completion(document, chat, set(mapping.inputs), mapping.counts)
        given, prompts = "prompt", asked.prompts
        if chat:
            if not mapping.chats:
                raise codec.RefusedMember(
                    f"model '{asked.model}' has no chat template: it takes /v1/completions",
                    "model",
                    "invalid_value",
                )
            if mapping.render is not None:
                prompts = [await self._render(mapping.render, asked.messages)]
            else:
                given, prompts = "messages", [dump_json(asked.messages).decode()]
        prompts = [prompt for prompt in prompts for _ in range(asked.n)]
        try:
            self._count(len(prompts))
            for index, prompt in enumerate(prompts):
                self._submit(asked.model, mapping, {**self._values(asked, index), given: prompt}, asked.stop)
            self._services.loop.loop_pass.end()
            answer: Answer | None = await unless_gone(
                receive, self._stream if asked.stream else self._whole, asked, mapping, chat, send
            )
            return answer
        except TritonError:
            self._answers_failed()
            raise
        finally:
            self._end()

    async def embeddings(self, document: dict[str, Any], receive: Any) -> Answer:
        """Answers a request for embeddings. Raises as completions() does."""
        model = codec.model_of(document)
        mapping = await self._mapping(model, receive)
        if not mapping.embeds:
            raise codec.RefusedMember(f"model '{model}' does not embed text", "model", "invalid_value")
        texts, as_base64 = codec.embedding(document)
        try:
            self._count(len(texts))
            for text in texts:
                self._submit(model, mapping, {"input": text}, [])
            self._services.loop.loop_pass.end()
            rows: list[Any] = await unless_gone(receive, self._vectors, mapping, as_base64)
        except TritonError:
            self._answers_failed()
            raise
        finally:
            self._end()
        made: dict[str, Any] = {"object": "list", "data": rows, "model": model}
        if mapping.counts:
            made["usage"] = codec.usage(sum(choice.prompt_tokens for choice in self._choices), None)
        return 200, JSON, [dump_json(made)]

    # ------------------------------------------------------------ requests

    async def _mapping(self, name: str, receive: Any) -> OpenAiMapping:
        """Raises NotFound for a model that is not there, does not serve this API or is not for this client."""
        if self._owner is not None and not self._owner.client.covers(name):
            raise Denied(
                f"{self._owner.client.title} is limited to some models: it is not for model '{name[:128]}'"
            )
        await when_loaded(receive, self._services.admission.present, name, "")
        found = self._services.admission.lookup(name, "")
        mapping: OpenAiMapping | None = getattr(found, "openai", None)
        if mapping is None:
            raise NotFound(f"model '{name}' is not configured for OpenAI's API (docs/openai.md)")
        return mapping

    async def _render(self, render: Render, messages: list[dict[str, str]]) -> str:
        wanted = True
        try:
            return await self._services.workers.run(lambda: render(messages, lambda: wanted), self)
        finally:
            wanted = False  # the thread ends soon, whoever has gone

    def _count(self, count: int) -> None:
        """Counts all but the first of `count` requests; the first is the client's own. Raises TooManyRequests."""
        if count > 1 and self._address:
            raise_it(self._services.request_limits.further(self._address, count - 1))
            self._services.request_limits.join(self._address, self._further)
            self._joined = True
        if self._owner is not None:
            self._owner.owe(count - 1)

    def _further(self) -> int:
        return max(sum(not choice.queue.final for choice in self._choices) - 1, 0)

    @staticmethod
    def _values(asked: codec.Asked, index: int) -> dict[str, Any]:
        values: dict[str, Any] = dict(asked.values)
        if "seed" in values:  # each choice has its own, the first the one that was given
            values["seed"] += index
        if asked.stop:
            values["stop"] = asked.stop
        return values

    def _submit(self, model: str, mapping: OpenAiMapping, values: dict[str, Any], stops: list[str]) -> None:
        request = InferRequest()
        request.model_name = model
        request.owner = self._owner
        admission = self._services.admission
        admission.find(request, None)
        self._times.stamp(admission, request)
        request.inputs = [
            self._input(request, mapping.inputs[role], role, value)
            for role, value in values.items()
            if role in mapping.inputs
        ]
        if self._forwarded is not None:
            self._forwarded(request)
        queue = ResponseQueue()
        request.responder = queue
        with self._times.submitting(request):
            admission.submit(request)
        self._choices.append(_Choice(len(self._choices), request, queue, codec.Stops(stops)))

    def _input(self, request: InferRequest, name: str, role: str, value: Any) -> Tensor:
        """An input; choices of the same prompt share its bytes. Raises Overloaded where there is no room for them."""
        if not isinstance(value, str):
            return self._tensor(request, name, value)
        made = self._made.get((role, value))
        if made is None:
            size = len(value) if value.isascii() else 4 * len(value)  # at most
            if size > COUNTED:
                self._kept.keep(size)
            made = self._made[role, value] = self._tensor(request, name, value)
        return Tensor(made.name, made.dtype, made.shape, made)

    @staticmethod
    def _tensor(request: InferRequest, name: str, value: Any) -> Any:
        spec = request.model.input_index[name]
        elements = value if isinstance(value, list) else [value]
        if spec.dtype == datatypes.BYTES:
            array = np.array([text.encode() for text in elements], dtype=object)
        else:
            array = np.array(elements, dtype=datatypes.NUMPY[spec.dtype])
        dims = [d if d >= 0 else 1 for d in spec.dims]
        if -1 in spec.dims:
            dims[spec.dims.index(-1)] = len(elements)
        if int(np.prod(dims)) != len(elements):
            raise InvalidArgument(
                f"input '{name}' has the dims {list(spec.dims)}, got {len(elements)} elements"
            )
        return from_numpy(name, array.reshape([1, *dims] if request.model.max_batch_size else dims))

    def _end(self) -> None:
        for choice in self._choices:
            self._cancel(choice)
        self._services.loop.loop_pass.end()
        if self._joined:
            self._joined = False
            self._services.request_limits.leave(self._address, self._further)
        self._kept.over()
        self._made.clear()

    def _cancel(self, choice: _Choice) -> None:
        if not choice.queue.final:
            self._services.admission.cancel(choice.request)

    def _answers_failed(self) -> None:
        """The answer is the error of the choice that failed, if one did."""
        if self._failed is not None:
            self._times.answers(self._failed.request, self._failed.unsent)

    # ------------------------------------------------------------ responses

    async def _pieces(
        self, choice: _Choice, mapping: OpenAiMapping, take: Callable[[str], Awaitable[None]]
    ) -> None:
        """Passes a choice's text on, piece by piece and without what a stop text cuts off."""
        while (response := await choice.queue.next()) is not None:
            found = self._outputs(choice, response, mapping)
            choice.prompt_tokens = choice.prompt_tokens or found.get("prompt_tokens", 0)
            choice.tokens += found.get("completion_tokens", 0)
            choice.reason = found.get("finish_reason") or choice.reason
            piece = choice.stops.take(choice.decoder.decode(found.get("text", b"")))
            if piece:
                await take(piece)
            if choice.stops.stopped:
                choice.reason = "stop"
                self._cancel(choice)
                return
        rest = choice.stops.take(choice.decoder.decode(b"", True))
        if rest := rest + choice.stops.rest():
            await take(rest)

    def _outputs(self, choice: _Choice, response: InferResponse, mapping: OpenAiMapping) -> dict[str, Any]:
        """role -> value of one response. Raises the response's error."""
        choice.unsent += 1
        if response.error is not None:
            self._failed = self._failed or choice
            failure, response.error = response.error, None
            try:
                raise failure
            finally:
                del failure  # which refers to this frame
        roles = {name: role for role, name in mapping.outputs.items()}
        found: dict[str, Any] = {}
        for tensor in response.outputs or ():
            role = roles.get(tensor.name)
            if role is None:
                continue
            values = to_numpy(tensor)
            if role == "text":
                found[role] = b"".join(values.reshape(-1).tolist())
            elif role == "finish_reason":
                found[role] = b"".join(values.reshape(-1).tolist()).decode("utf-8", "replace")
            elif role == "embedding":
                found[role] = values
            else:
                found[role] = int(values.sum())
        return found

    async def _whole(self, asked: codec.Asked, mapping: OpenAiMapping, chat: bool, send: Any) -> Answer:
        size = 0
        for choice in self._choices:
            parts: list[str] = []

            async def take(piece: str, parts: list[str] = parts) -> None:
                nonlocal size
                parts.append(piece)
                size += len(piece)
                if size > codec.LARGEST_TEXT:
                    raise Internal(
                        f"model '{asked.model}' makes more than {codec.LARGEST_TEXT} characters: stream them"
                    )

            await self._pieces(choice, mapping, take)
            choice.text = "".join(parts)
        for choice in self._choices:
            self._times.answers(choice.request, choice.unsent)
        made = self._object(asked, "chat.completion" if chat else "text_completion")
        made["choices"] = [codec.choice(chat, c.index, c.text, c.reason) for c in self._choices]
        if mapping.counts:
            made["usage"] = self._usage(asked)
        return 200, JSON, [dump_json(made)]

    async def _stream(
        self, asked: codec.Asked, mapping: OpenAiMapping, chat: bool, send: Any
    ) -> Answer | None:
        base = self._object(asked, "chat.completion.chunk" if chat else "text_completion")
        if asked.include_usage:
            base["usage"] = None
        begun = False
        turn = trio.Lock()  # choices take turns with whole events

        async def event(body: bytes, choice: _Choice | None = None) -> None:
            nonlocal begun
            async with turn:
                request, unsent = None, 0
                if choice is not None:
                    request, unsent, choice.unsent = choice.request, choice.unsent, 0
                with self._times.sending(request, unsent):
                    if not begun:
                        begun = True
                        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
                    await send({"type": "http.response.body", "body": body, "more_body": True})

        async def follow(choice: _Choice) -> None:
            first = True

            async def take(piece: str | None, reason: str | None = None) -> None:
                nonlocal first
                made = codec.delta(chat, choice.index, piece, reason, first)
                first = False
                await event(b"data: %b\n\n" % dump_json({**base, "choices": [made]}), choice)

            await self._pieces(choice, mapping, take)
            await take(None, choice.reason)

        failure = await self._together(follow)
        if failure is not None:
            if not begun:
                try:
                    raise failure
                finally:
                    del failure
            await event(b"data: %b\n\n" % dump_json(codec.error_object(failure)), self._failed)
        elif asked.include_usage:
            await event(b"data: %b\n\n" % dump_json({**base, "choices": [], "usage": self._usage(asked)}))
        self._times.over()  # before the client sees the end, as of the other streams
        await send({"type": "http.response.body", "body": b"" if failure is not None else DONE})
        return None

    async def _together(self, follow: Callable[[_Choice], Awaitable[None]]) -> TritonError | None:
        """follow() for all choices at once; the first failure ends the others and is returned."""
        failure: TritonError | None = None
        async with trio.open_nursery() as nursery:

            async def one(choice: _Choice) -> None:
                nonlocal failure
                try:
                    await follow(choice)
                except TritonError as error:
                    failure = failure or error.with_traceback(None)  # which refers to `failure`
                    nursery.cancel_scope.cancel()

            for choice in self._choices:
                nursery.start_soon(one, choice)
        return failure

    async def _vectors(self, mapping: OpenAiMapping, as_base64: bool) -> list[Any]:
        rows = []
        for choice in self._choices:
            response = await choice.queue.next()
            found = {} if response is None else self._outputs(choice, response, mapping)
            if "embedding" not in found:
                self._failed = choice
                raise Internal(f"model '{choice.request.model_name}' has made no embedding")
            choice.prompt_tokens = found.get("prompt_tokens", 0)
            try:
                values = codec.vector(found["embedding"], as_base64)
            except TritonError:
                self._failed = choice
                raise
            rows.append({"object": "embedding", "index": choice.index, "embedding": values})
        for choice in self._choices:
            self._times.answers(choice.request, choice.unsent)
        return rows

    def _object(self, asked: codec.Asked, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
        return {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": self._created,
            "model": asked.model,
        }

    def _usage(self, asked: codec.Asked) -> dict[str, int]:
        prompts = sum(
            choice.prompt_tokens for choice in self._choices[:: asked.n]
        )  # a prompt is read n times
        return codec.usage(prompts, sum(choice.tokens for choice in self._choices))


async def models(verbs: Verbs, owner: Account | None, name: str = "") -> list[bytes]:
    """The models that serve this API and that the client may use, or the one of that name: parts of a JSON text.

    Raises NotFound.
    """
    rows: dict[str, bytes] = {}
    slices = Slices()
    for model in verbs.metadata.serving(name):
        if model.openai is not None and (owner is None or owner.client.covers(model.name)):
            created = model.loaded_at_ms // 1000
            row = {"id": model.name, "object": "model", "created": created, "owned_by": "neptrio"}
            rows[model.name] = dump_json(row)
        await slices.rest()
    if not name:
        return [b'{"object":"list","data":[', b",".join(rows.values()), b"]}"]
    if name not in rows:
        raise NotFound(
            f"model '{name}' does not exist, or is not configured for OpenAI's API (docs/openai.md)"
        )
    return [rows[name]]
