"""The calls of GRPCInferenceService other than inference: they convert messages and call the services."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from neptrio._proto.inference import (
    InferBatchStatistics,
    InferResponseStatistics,
    InferStatistics,
    LogSettingsResponse,
    LogSettingsResponseSettingValue,
    MemoryUsage,
    ModelConfig,
    ModelConfigResponse,
    ModelMetadataResponse,
    ModelMetadataResponseTensorMetadata,
    ModelReadyResponse,
    ModelStatistics,
    ModelStatisticsResponse,
    RepositoryIndexResponse,
    RepositoryIndexResponseModelIndex,
    RepositoryModelLoadResponse,
    RepositoryModelUnloadResponse,
    ServerLiveResponse,
    ServerMetadataResponse,
    ServerReadyResponse,
    StatisticDuration,
    TraceSettingResponse,
    TraceSettingResponseSettingValue,
)
from neptrio.config.version_labels import LABELS
from neptrio.errors import InvalidArgument
from neptrio.limits import shown
from neptrio.loop.slices import gathered
from neptrio.service import Services, Verbs
from neptrio.service.statistics import Detail, since_start_asked
from neptrio.transport.grpc.encoded import Encoded
from neptrio.transport.grpc.health import HealthHandlers
from neptrio.transport.grpc.reflection import ReflectionV1, ReflectionV1Alpha
from neptrio.transport.grpc.shared_memory import SharedMemoryHandlers

LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"
STATISTICS = "/inference.GRPCInferenceService/ModelStatistics"
SINCE_START = (
    "neptrio-since-start"  # metadata: "true" asks for the sums over all loads since the server's start
)


def _durations(message: type, values: dict[str, dict[str, int]]) -> Any:
    return message(**{key: StatisticDuration(**value) for key, value in values.items()})


def _log_setting(value: Any) -> LogSettingsResponseSettingValue:
    if isinstance(value, bool):
        return LogSettingsResponseSettingValue(bool_param=value)
    if isinstance(value, int):
        return LogSettingsResponseSettingValue(uint32_param=value)
    return LogSettingsResponseSettingValue(string_param=value)


async def encoded(texts: Iterable[bytes]) -> Encoded:
    """The message with all rows of a repeated field, of the texts of messages with one row each: the bytes of protobuf
    messages that follow each other are those of both together."""
    return Encoded(await gathered(texts))


class InferenceHandlers(SharedMemoryHandlers):
    """All methods of GRPCInferenceService except ModelInfer (infer.py) and ModelStreamInfer (stream_infer.py)."""

    def __init__(self, services: Services, verbs: Verbs) -> None:
        self._services = services
        self._verbs = verbs

    async def server_live(self, message: Any) -> ServerLiveResponse:
        return ServerLiveResponse(live=self._verbs.metadata.live())

    async def server_ready(self, message: Any) -> ServerReadyResponse:
        return ServerReadyResponse(ready=self._verbs.metadata.ready())

    async def model_ready(self, message: Any) -> ModelReadyResponse:
        return ModelReadyResponse(ready=await self._verbs.metadata.model_ready(message.name, message.version))

    async def server_metadata(self, message: Any) -> ServerMetadataResponse:
        return ServerMetadataResponse(**self._verbs.metadata.server())

    async def model_metadata(self, message: Any) -> ModelMetadataResponse:
        await self._verbs.metadata.present(message.name, message.version)
        plain = self._verbs.metadata.model(message.name, message.version)
        for key in ("inputs", "outputs"):
            plain[key] = [ModelMetadataResponseTensorMetadata(**tensor) for tensor in plain[key]]
        return ModelMetadataResponse(**plain)

    async def model_config(self, message: Any) -> ModelConfigResponse:
        await self._verbs.metadata.present(message.name, message.version)
        config = self._verbs.metadata.config_message(message.name, message.version)
        return ModelConfigResponse(config=ModelConfig.parse(config.SerializeToString()))

    def __mapping__(self) -> dict[str, Any]:
        """grpclib's handlers by path; those of the statistics and of loads see more of their call than the message."""
        mapping = dict(super().__mapping__())
        mapping[LOAD] = mapping[LOAD]._replace(func=self._load_call)
        mapping[STATISTICS] = mapping[STATISTICS]._replace(func=self._statistics_call)
        return mapping

    async def _statistics_call(self, stream: Any) -> None:
        message = await stream.recv_message()
        statistics = self._verbs.statistics
        if since_start_asked(SINCE_START, stream.metadata.get(SINCE_START)):
            detail = Detail(since_start=True)
            rows = statistics.rows(message.name, message.version, detail)
            texts: Iterable[bytes] = (_statistics_text({**row, **row["since_start"]}) for row in rows)
        else:
            texts = statistics.texts(message.name, message.version, "protobuf", _statistics_text)
        await stream.send_message(await encoded(texts))

    async def log_settings(self, message: Any) -> LogSettingsResponse:
        changes: dict[str, Any] = {}
        for key, value in message.settings.items():
            given = (value.bool_param, value.uint32_param, value.string_param)
            changes[key] = next((v for v in given if v is not None), None)
        settings = self._verbs.logging.update(changes, "grpc")
        return LogSettingsResponse(settings={key: _log_setting(value) for key, value in settings.items()})

    async def trace_setting(self, message: Any) -> TraceSettingResponse:
        given = {key: list(setting.value) for key, setting in message.settings.items()}
        settings = await self._verbs.trace.update(given, message.model_name, "grpc")
        return TraceSettingResponse(
            settings={
                key: TraceSettingResponseSettingValue(value=value if isinstance(value, list) else [value])
                for key, value in settings.items()
            }
        )

    async def repository_index(self, message: Any) -> Encoded:
        rows = await self._verbs.repository.index_texts(
            message.ready, "protobuf", _index_text, message.repository_name
        )
        return await encoded(rows)

    async def _load_call(self, stream: Any) -> None:
        message = await stream.recv_message()
        parameters: dict[str, Any] = {}
        for key, value in message.parameters.items():
            if key in ("config", LABELS):
                if value.string_param is None:
                    raise InvalidArgument(
                        f"invalid value type for load parameter '{key}', expected string_param."
                    )
                parameters[key] = value.string_param
            elif key.startswith("file:"):
                if value.bytes_param is None:
                    raise InvalidArgument(
                        f"invalid value type for load parameter '{shown(key)}', expected bytes_param."
                    )
                parameters[key] = value.bytes_param
            elif key == "async":
                if value.bool_param is None:
                    raise InvalidArgument(
                        "invalid value type for load parameter 'async', expected bool_param."
                    )
                parameters[key] = value.bool_param
            else:
                raise InvalidArgument(f"unrecognized load parameter '{shown(key)}'.")
        await self._verbs.repository.load(
            message.model_name, parameters, message.repository_name, stream.caller
        )
        await stream.send_message(RepositoryModelLoadResponse())

    async def repository_model_unload(self, message: Any) -> RepositoryModelUnloadResponse:
        dependents = False
        for key, value in message.parameters.items():
            if key == "unload_dependents":
                if value.bool_param is None:
                    raise InvalidArgument(
                        "invalid value type for 'unload_dependents' parameter, expected bool_param."
                    )
                dependents = value.bool_param
        await self._verbs.repository.unload(message.model_name, dependents, message.repository_name)
        return RepositoryModelUnloadResponse()


def _index_text(row: dict[str, Any]) -> bytes:
    return bytes(RepositoryIndexResponse(models=[RepositoryIndexResponseModelIndex(**row)]))


def _statistics_text(plain: dict[str, Any]) -> bytes:
    return bytes(ModelStatisticsResponse(model_stats=[_model_statistics(plain)]))


def _model_statistics(plain: dict[str, Any]) -> ModelStatistics:
    return ModelStatistics(
        **{k: plain[k] for k in ("name", "version", "last_inference", "inference_count", "execution_count")},
        inference_stats=_durations(InferStatistics, plain["inference_stats"]),
        response_stats={
            k: _durations(InferResponseStatistics, v) for k, v in plain["response_stats"].items()
        },
        batch_stats=[
            InferBatchStatistics(
                batch_size=b["batch_size"],
                **{
                    k: StatisticDuration(**b[k]) for k in ("compute_input", "compute_infer", "compute_output")
                },
            )
            for b in plain["batch_stats"]
        ],
        memory_usage=[MemoryUsage(**m) for m in plain["memory_usage"]],
    )


def servicers(services: Services, verbs: Verbs) -> list[Any]:
    """The grpclib servicers of all services on the gRPC port."""
    return [InferenceHandlers(services, verbs), HealthHandlers(verbs), ReflectionV1(), ReflectionV1Alpha()]
