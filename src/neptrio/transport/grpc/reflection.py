"""gRPC server reflection, v1 and v1alpha: tells clients which services and messages this port has.

The two versions differ only in their package's name, so answer() serves both. The descriptors are those compiled from
proto/ (neptrio.codec.descriptors). They have no extensions, which proto3 does not allow.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2
from grpclib.const import Status

from neptrio._proto.grpc.reflection import v1, v1alpha
from neptrio.codec.descriptors import file_set, pool
from neptrio.limits import remember, shown
from neptrio.loop.slices import Slices

MOST_ANSWERS = 256  # that are kept, of some 20 KiB each
_answers: dict[tuple[Any, ...], bytes] = {}


@cache
def service_names() -> list[str]:
    """The full names of all services in proto/, sorted."""
    return sorted(f"{file.package}.{service.name}" for file in file_set().file for service in file.service)


def _with_dependencies(file: Any, seen: set[str]) -> Iterator[bytes]:
    """A file's descriptor and those of its imports, so that clients need not ask for each of them."""
    if file.name in seen:
        return
    seen.add(file.name)
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    yield proto.SerializeToString()
    for dependency in file.dependencies:
        yield from _with_dependencies(dependency, seen)


def answer(api: Any, request: Any) -> Any:
    """The response to one request; `api` is the generated module of the version, v1 or v1alpha."""
    made = api.ServerReflectionResponse(valid_host=request.host, original_request=request)
    try:
        if request.list_services is not None:
            made.list_services_response = api.ListServiceResponse(
                service=[api.ServiceResponse(name=name) for name in service_names()]
            )
        elif request.file_by_filename is not None:
            made.file_descriptor_response = _file(api, pool().FindFileByName(request.file_by_filename))
        elif request.file_containing_symbol is not None:
            file = pool().FindFileContainingSymbol(request.file_containing_symbol)
            made.file_descriptor_response = _file(api, file)
        elif request.all_extension_numbers_of_type is not None:
            message = pool().FindMessageTypeByName(request.all_extension_numbers_of_type)
            made.all_extension_numbers_response = api.ExtensionNumberResponse(
                base_type_name=message.full_name
            )
        elif request.file_containing_extension is not None:
            raise KeyError(request.file_containing_extension.containing_type)
        else:
            made.error_response = _error(
                api, Status.INVALID_ARGUMENT, "the request names nothing to look for"
            )
    except KeyError as error:
        made.error_response = _error(api, Status.NOT_FOUND, f"not found: {shown(str(error.args[0]))}")
    return made


def answered(api: Any, request: Any) -> bytes:
    """The bytes of answer(). Clients ask for the same few things, whose descriptors take long to encode."""
    if request.file_containing_extension is not None:
        return bytes(answer(api, request))
    asked = (request.file_by_filename, request.file_containing_symbol, request.all_extension_numbers_of_type)
    key = (api.__name__, request.host, request.list_services, *asked)
    made = _answers.get(key)
    if made is None:
        made = bytes(answer(api, request))
        remember(_answers, key, made, MOST_ANSWERS, sum(len(text or "") for text in key))
    return made


def _file(api: Any, file: Any) -> Any:
    return api.FileDescriptorResponse(file_descriptor_proto=_descriptors(file.name))


@cache
def _descriptors(name: str) -> list[bytes]:
    """Those of one of our files and its imports: there are a few files, which never change."""
    return list(_with_dependencies(pool().FindFileByName(name), set()))


def _error(api: Any, status: Status, text: str) -> Any:
    return api.ErrorResponse(error_code=status.value, error_message=text)


class _Each:
    """The answers to a stream's messages. No generator, which would have to be closed when the call is cancelled."""

    def __init__(self, api: Any, messages: AsyncIterator[Any]) -> None:
        self._api = api
        self._messages = messages
        self._slices = Slices()

    def __aiter__(self) -> _Each:
        return self

    async def __anext__(self) -> bytes:
        await self._slices.rest()
        return answered(self._api, await anext(self._messages))


class ReflectionV1(v1.ServerReflectionBase):
    """grpc.reflection.v1."""

    def server_reflection_info(self, messages: AsyncIterator[Any]) -> AsyncIterator[bytes]:
        return _Each(v1, messages)


class ReflectionV1Alpha(v1alpha.ServerReflectionBase):
    """grpc.reflection.v1alpha, which older clients use."""

    def server_reflection_info(self, messages: AsyncIterator[Any]) -> AsyncIterator[bytes]:
        return _Each(v1alpha, messages)
