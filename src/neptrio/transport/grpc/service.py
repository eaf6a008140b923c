"""The calls of GRPCInferenceService other than inference: they convert messages and call the services."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from neptrio._proto import inference as v2
from neptrio.config.version_labels import LABELS
from neptrio.errors import InvalidArgument
from neptrio.limits import shown
from neptrio.loop.slices import gathered
from neptrio.repository.override import FILE
from neptrio.service import Services, Verbs
from neptrio.service.statistics import Detail, since_start_asked
from neptrio.transport.grpc.health import HealthHandlers
from neptrio.transport.grpc.reflection import ReflectionV1, ReflectionV1Alpha

LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"
STATISTICS = "/inference.GRPCInferenceService/ModelStatistics"
SINCE_START = (
    "neptrio-since-start"  # metadata: "true" asks for the sums over all loads since the server's start
)


def _durations(message: type, values: dict[str, dict[str, int]]) -> Any:
    return message(**{key: v2.StatisticDuration(**value) for key, value in values.items()})


def _log_setting(value: Any) -> v2.LogSettingsResponseSettingValue:
    if isinstance(value, bool):
        return v2.LogSettingsResponseSettingValue(bool_param=value)
    if isinstance(value, int):
        return v2.LogSettingsResponseSettingValue(uint32_param=value)
    return v2.LogSettingsResponseSettingValue(string_param=value)


class InferenceHandlers(v2.GrpcInferenceServiceBase):
    """All methods of GRPCInferenceService except ModelInfer (infer.py) and ModelStreamInfer (stream_infer.py).

    Where a message has rows of one repeated field, its bytes are made row by row: the bytes of protobuf messages that
    follow each other are those of all together.
    """

    def __init__(self, services: Services, verbs: Verbs) -> None:
        self._services = services
        self._verbs = verbs

    async def server_live(self, message: Any) -> v2.ServerLiveResponse:
        return v2.ServerLiveResponse(live=self._verbs.metadata.live())

    async def server_ready(self, message: Any) -> v2.ServerReadyResponse:
        return v2.ServerReadyResponse(ready=self._verbs.metadata.ready())

    async def model_ready(self, message: Any) -> v2.ModelReadyResponse:
        return v2.ModelReadyResponse(
            ready=await self._verbs.metadata.model_ready(message.name, message.version)
        )

    async def server_metadata(self, message: Any) -> v2.ServerMetadataResponse:
        return v2.ServerMetadataResponse(**self._verbs.metadata.server())

    async def model_metadata(self, message: Any) -> v2.ModelMetadataResponse:
        await self._verbs.metadata.present(message.name, message.version)
        plain = self._verbs.metadata.model(message.name, message.version)
        for key in ("inputs", "outputs"):
            plain[key] = [v2.ModelMetadataResponseTensorMetadata(**tensor) for tensor in plain[key]]
        return v2.ModelMetadataResponse(**plain)

    async def model_config(self, message: Any) -> v2.ModelConfigResponse:
        await self._verbs.metadata.present(message.name, message.version)
        config = self._verbs.metadata.config_message(message.name, message.version)
        return v2.ModelConfigResponse(config=v2.ModelConfig.parse(config.SerializeToString()))

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
        await stream.send_message(await gathered(texts))

    async def log_settings(self, message: Any) -> v2.LogSettingsResponse:
        changes: dict[str, Any] = {}
        for key, value in message.settings.items():
            given = (value.bool_param, value.uint32_param, value.string_param)
            changes[key] = next((v for v in given if v is not None), None)
        async with self._verbs.changes.changed():
            settings = self._verbs.logging.update(changes, "grpc")
        return v2.LogSettingsResponse(settings={key: _log_setting(value) for key, value in settings.items()})

    async def trace_setting(self, message: Any) -> v2.TraceSettingResponse:
        given = {key: list(setting.value) for key, setting in message.settings.items()}
        async with self._verbs.changes.changed():
            settings = await self._verbs.trace.update(given, message.model_name, "grpc")
        return v2.TraceSettingResponse(
            settings={
                key: v2.TraceSettingResponseSettingValue(value=value if isinstance(value, list) else [value])
                for key, value in settings.items()
            }
        )

    async def repository_index(self, message: Any) -> bytes:
        rows = await self._verbs.repository.index_texts(
            message.ready, "protobuf", _index_text, message.repository_name
        )
        return await gathered(rows)

    async def _load_call(self, stream: Any) -> None:
        message = await stream.recv_message()
        parameters: dict[str, Any] = {}
        for key, value in message.parameters.items():
            if key in ("config", LABELS):
                kind = "string_param"
            elif key.startswith(FILE):
                kind = "bytes_param"
            elif key == "async":
                kind = "bool_param"
            else:
                raise InvalidArgument(f"unrecognized load parameter '{shown(key)}'.")
            parameters[key] = getattr(value, kind)
            if parameters[key] is None:
                raise InvalidArgument(
                    f"invalid value type for load parameter '{shown(key)}', expected {kind}."
                )
        async with self._verbs.changes.changed():
            await self._verbs.repository.load(
                message.model_name, parameters, message.repository_name, stream.caller
            )
        await stream.send_message(v2.RepositoryModelLoadResponse())

    async def repository_model_unload(self, message: Any) -> v2.RepositoryModelUnloadResponse:
        dependents = False
        for key, value in message.parameters.items():
            if key == "unload_dependents":
                if value.bool_param is None:
                    raise InvalidArgument(
                        "invalid value type for 'unload_dependents' parameter, expected bool_param."
                    )
                dependents = value.bool_param
        async with self._verbs.changes.changed():
            await self._verbs.repository.unload(message.model_name, dependents, message.repository_name)
        return v2.RepositoryModelUnloadResponse()

    def _memory(self) -> Any:
        memory = self._services.shared_memory
        memory.check_allowed(change=True)
        return memory

    # where clients may not register regions there are none, as on a Triton server; HTTP says that they may not

    async def system_shared_memory_status(self, message: Any) -> v2.SystemSharedMemoryStatusResponse:
        rows = self._services.shared_memory.system.status(message.name)
        return v2.SystemSharedMemoryStatusResponse(
            regions={row["name"]: v2.SystemSharedMemoryStatusResponseRegionStatus(**row) for row in rows}
        )

    async def system_shared_memory_register(self, message: Any) -> v2.SystemSharedMemoryRegisterResponse:
        self._memory().system.register(message.name, message.key, message.offset, message.byte_size)
        return v2.SystemSharedMemoryRegisterResponse()

    async def system_shared_memory_unregister(self, message: Any) -> v2.SystemSharedMemoryUnregisterResponse:
        self._memory().system.unregister(message.name)
        return v2.SystemSharedMemoryUnregisterResponse()

    async def cuda_shared_memory_status(self, message: Any) -> v2.CudaSharedMemoryStatusResponse:
        rows = self._services.shared_memory.cuda.status(message.name)
        return v2.CudaSharedMemoryStatusResponse(
            regions={row["name"]: v2.CudaSharedMemoryStatusResponseRegionStatus(**row) for row in rows}
        )

    async def cuda_shared_memory_register(self, message: Any) -> v2.CudaSharedMemoryRegisterResponse:
        cuda = self._memory().cuda
        await cuda.register(message.name, message.raw_handle, message.device_id, message.byte_size)
        return v2.CudaSharedMemoryRegisterResponse()

    async def cuda_shared_memory_unregister(self, message: Any) -> v2.CudaSharedMemoryUnregisterResponse:
        self._memory().cuda.unregister(message.name)
        return v2.CudaSharedMemoryUnregisterResponse()


def _index_text(row: dict[str, Any]) -> bytes:
    return bytes(v2.RepositoryIndexResponse(models=[v2.RepositoryIndexResponseModelIndex(**row)]))


def _statistics_text(plain: dict[str, Any]) -> bytes:
    return bytes(v2.ModelStatisticsResponse(model_stats=[_model_statistics(plain)]))


def _model_statistics(plain: dict[str, Any]) -> v2.ModelStatistics:
    return v2.ModelStatistics(
        **{k: plain[k] for k in ("name", "version", "last_inference", "inference_count", "execution_count")},
        inference_stats=_durations(v2.InferStatistics, plain["inference_stats"]),
        response_stats={
            k: _durations(v2.InferResponseStatistics, v) for k, v in plain["response_stats"].items()
        },
        batch_stats=[
            v2.InferBatchStatistics(
                batch_size=b["batch_size"],
                **{
                    k: v2.StatisticDuration(**b[k])
                    for k in ("compute_input", "compute_infer", "compute_output")
                },
            )
            for b in plain["batch_stats"]
        ],
        memory_usage=[v2.MemoryUsage(**m) for m in plain["memory_usage"]],
    )


def servicers(services: Services, verbs: Verbs) -> list[Any]:
    """The grpclib servicers of all services on the gRPC port."""
    return [InferenceHandlers(services, verbs), HealthHandlers(verbs), ReflectionV1(), ReflectionV1Alpha()]
