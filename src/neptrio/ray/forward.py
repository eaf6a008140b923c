"""Passes requests on to the replica that has their sequence, over the REST and gRPC ports of its engine.

Not over Ray's handles: a request that is passed on already has its place among a replica's ongoing requests. If it
needed another at the second replica, two replicas that pass requests to each other could fill up and wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import aiohttp
import yarl
from grpclib.client import Channel
from grpclib.const import Cardinality
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import StreamTerminatedError

from neptrio.errors import Unavailable

T = TypeVar("T")
NOT_PASSED_ON = (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"te", b"upgrade")
AUTOMATIC = (
    "Accept",
    "Accept-Encoding",
    "Content-Type",
    "User-Agent",
)  # headers that the client would invent
# what Ray puts into metadata for itself, and what belongs to the hop
RAYS = ("application", "request_id", "multiplexed_model_id", "session_id")


class Unreachable(Exception):
    """Nothing listens at the address: the request was not sent."""


class Bytes(CodecBase):
    """Messages are bytes already."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> bytes:
        return data


class Peers:
    """Connections to engines. For tasks of one asyncio loop."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._channels: dict[str, Channel] = {}

    async def close(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()
        for channel in self._channels.values():
            channel.close()

    async def http(self, address: str, scope: Mapping[str, Any], body: bytes, send: Any) -> None:
        """Lets the engine at `address` answer a request, and sends its answer on as it comes.

        `scope`: an ASGI scope whose path is relative. Raises Unreachable, and Unavailable when the answer breaks off.
        """
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, force_close=False)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        query = scope.get("query_string", b"").decode("latin-1")
        path = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in NOT_PASSED_ON
        ]
        begun = False
        try:
            async with self._session.request(
                scope["method"],
                yarl.URL(f"http://{address}{path}", encoded=True),
                data=body or None,
                headers=headers,
                skip_auto_headers=AUTOMATIC,
                allow_redirects=False,
            ) as answer:
                kept = [
                    (name.lower(), value)
                    for name, value in answer.raw_headers
                    if name.lower() not in NOT_PASSED_ON or name.lower() == b"content-length"
                ]
                begun = True
                await send({"type": "http.response.start", "status": answer.status, "headers": kept})
                async for part in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(str(error)) from None
        except aiohttp.ClientError as error:
            what = "broke off its answer" if begun else "ended before it answered"
            raise Unavailable(f"the replica that has this sequence {what}: {error}") from None

    def _channel(self, address: str) -> Channel:
        channel = self._channels.get(address)
        if channel is None:
            host, _, port = address.rpartition(":")
            channel = self._channels[address] = Channel(host.strip("[]"), int(port), codec=Bytes())
        return channel

    async def unary(
        self, address: str, path: str, message: bytes, metadata: list[tuple[str, Any]]
    ) -> tuple[bytes, list[tuple[str, Any]]]:
        """The answer to one call, and its trailing metadata. Raises GRPCError, Unreachable, Unavailable."""
        request = self._channel(address).request(
            path, Cardinality.UNARY_UNARY, bytes, bytes, metadata=metadata
        )
        try:
            async with request as stream:
                await stream.send_message(message, end=True)
                answer = await stream.recv_message()
                await stream.recv_trailing_metadata()
        except OSError as error:
            raise Unreachable(str(error)) from None
        except StreamTerminatedError as error:
            raise Unavailable(f"the replica ended before it answered: {error}") from None
        return answer or b"", [*(stream.trailing_metadata or {}).items()]

    async def stream(
        self, address: str, path: str, messages: AsyncIterator[bytes], metadata: list[tuple[str, Any]]
    ) -> AsyncIterator[bytes]:
        """The answers of a bidirectional stream as they come. Raises GRPCError, Unavailable, and Unreachable before the
        first."""
        request = self._channel(address).request(
            path, Cardinality.STREAM_STREAM, bytes, bytes, metadata=metadata
        )
        async with request as stream:
            try:
                await stream.send_request()
            except OSError as error:
                raise Unreachable(str(error)) from None

            async def pump() -> None:
                async for message in messages:
                    await stream.send_message(message)
                await stream.end()

            sending = asyncio.ensure_future(pump())
            try:
                while (answer := await stream.recv_message()) is not None:
                    yield answer
                await stream.recv_trailing_metadata()
            except StreamTerminatedError as error:
                raise Unavailable(f"the replica ended before it had answered: {error}") from None
            finally:
                sending.cancel()
                with suppress(asyncio.CancelledError, StreamTerminatedError):
                    await sending


def passed_on(metadata: Any) -> list[tuple[str, Any]]:
    """The client's metadata without what belongs to Ray or to the hop."""
    return [
        (key, value)
        for key, value in metadata or ()
        if key not in RAYS
        and not key.startswith(("grpc-", ":"))
        and key not in ("user-agent", "te", "content-type")
    ]


async def unless_gone(receive: Any, work: Callable[[], Awaitable[None]]) -> None:
    """Does `work`, and stops it if the client disconnects first. For ASGI calls whose body has been read."""
    working = asyncio.ensure_future(work())

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        working.cancel()

    watching = asyncio.ensure_future(gone())
    try:
        await asyncio.wait([working])
    finally:
        watching.cancel()
        working.cancel()
    if not working.cancelled():
        working.result()
