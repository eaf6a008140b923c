"""The shapes of what the REST port takes and answers, as JSON Schema (2020-12, which OpenAPI 3.1 uses).

Answers are described to the last member where the members are ours to choose. Requests may have members that nobody
reads, as everywhere in this protocol, so their objects are open.
"""

from __future__ import annotations

from typing import Any

from neptrio import datatypes

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
MOMENT: Schema = {**COUNT, "description": "milliseconds since the epoch"}
TEXTS: Schema = {"type": "array", "items": TEXT}


def ref(name: str) -> Schema:
    """A reference to a schema of SCHEMAS."""
    return {"$ref": f"#/components/schemas/{name}"}


def listed(items: Schema) -> Schema:
    """An array of `items`."""
    return {"type": "array", "items": items}


def closed(*, optional: Schema | None = None, **required: Schema) -> Schema:
    """An object with these members and no others."""
    return {**opened(optional=optional, **required), "additionalProperties": False}


def opened(*, optional: Schema | None = None, **required: Schema) -> Schema:
    """An object with these members, and perhaps others."""
    made: Schema = {"type": "object", "properties": {**required, **(optional or {})}}
    if required:
        made["required"] = list(required)
    return made


DATATYPE: Schema = {"type": "string", "enum": [name for name in datatypes.NUMBER if name != "INVALID"]}
SHAPE: Schema = {"type": "array", "items": {"type": "integer"}, "description": "-1: of any size"}
PARAMETERS: Schema = {
    "type": "object",
    "additionalProperties": {"type": ["boolean", "integer", "number", "string"]},
    "description": "for the model, except those that the protocol knows by name",
}
DURATION = closed(count=COUNT, ns={**COUNT, "description": "sum in nanoseconds"})
RESPONSE_COUNTS = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
COMPUTE = ("compute_input", "compute_infer", "compute_output")
INFERENCE_COUNTS = ("success", "fail", "queue", *COMPUTE, "cache_hit", "cache_miss")
DATA: Schema = {"type": "array", "description": "elements in row-major order, nested or flat"}
REGION = {"shared_memory_region": TEXT, "shared_memory_offset": COUNT, "shared_memory_byte_size": COUNT}

LOG_SETTINGS = {
    "log_info": FLAG,
    "log_warning": FLAG,
    "log_error": FLAG,
    "log_verbose_level": COUNT,
    "log_format": {"type": "string", "enum": ["default", "ISO8601"]},
}
OPENAI_OPTIONS = {
    "n": {"type": "integer", "minimum": 1, "maximum": 16},
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "seed": COUNT,
    "stop": {"type": ["string", "array"], "items": TEXT},
    "stream": FLAG,
    "stream_options": opened(optional={"include_usage": FLAG}),
}
OPENAI_USAGE = opened(prompt_tokens=COUNT, total_tokens=COUNT, optional={"completion_tokens": COUNT})

SCHEMAS: dict[str, Schema] = {
    "Error": closed(error=TEXT),
    "ServerMetadata": closed(name=TEXT, version=TEXT, extensions=TEXTS),
    "TensorMetadata": closed(name=TEXT, datatype=DATATYPE, shape=SHAPE),
    "ModelMetadata": closed(
        name=TEXT,
        versions=TEXTS,
        platform=TEXT,
        inputs=listed(ref("TensorMetadata")),
        outputs=listed(ref("TensorMetadata")),
    ),
    "ModelConfig": {
        **opened(
            name=TEXT,
            platform=TEXT,
            backend=TEXT,
            max_batch_size={"type": "integer"},
            input=listed({"type": "object"}),
            output=listed({"type": "object"}),
            parameters={"type": "object"},
        ),
        "description": "inference.ModelConfig of proto/model_config.proto with its defaults filled in",
    },
    "InputTensor": opened(
        name=TEXT,
        datatype=DATATYPE,
        shape=listed(COUNT),
        optional={"data": DATA, "parameters": opened(optional={"binary_data_size": COUNT, **REGION})},
    ),
    "RequestedOutput": opened(
        name=TEXT,
        optional={"parameters": opened(optional={"binary_data": FLAG, "classification": COUNT, **REGION})},
    ),
    "InferRequest": opened(
        inputs=listed(ref("InputTensor")),
        optional={
            "id": TEXT,
            "parameters": {
                **PARAMETERS,
                "properties": {
                    "sequence_id": {"type": ["integer", "string"]},
                    "sequence_start": FLAG,
                    "sequence_end": FLAG,
                    "priority": COUNT,
                    "timeout": {**COUNT, "description": "microseconds that it may wait in the queue"},
                    "binary_data_output": FLAG,
                    "neptrio_timing": {**FLAG, "description": "tell the request's times in its answer"},
                },
            },
            "outputs": listed(ref("RequestedOutput")),
        },
    ),
    "OutputTensor": closed(
        name=TEXT,
        datatype=DATATYPE,
        shape=listed(COUNT),
        optional={
            "data": DATA,
            "base64": {**TEXT, "description": "in events: what was asked for as binary"},
            "parameters": opened(optional={"binary_data_size": COUNT}),
        },
    ),
    "InferResponse": closed(
        model_name=TEXT,
        model_version=TEXT,
        outputs=listed(ref("OutputTensor")),
        optional={"id": TEXT, "parameters": PARAMETERS},
    ),
    "GenerateRequest": {
        "type": "object",
        "properties": {"id": TEXT, "parameters": PARAMETERS},
        "description": "members named like inputs are tensors, all others parameters",
    },
    "GenerateResponse": {
        "type": "object",
        "properties": {"id": TEXT, "model_name": TEXT, "model_version": TEXT, "error": TEXT},
        "description": "outputs under their names; generate with another number of responses than one: `error`",
    },
    "Sequences": opened(
        model_name=TEXT,
        model_version=TEXT,
        **dict.fromkeys(
            ("live", "slots", "slots_used", "null_requests", "backlog", "backlog_requests"), COUNT
        ),
        sequences=listed(opened()),
    ),
    "SequenceEnded": opened(),
    "Statistics": opened(model_stats=listed(ref("ModelStatistics"))),
    "ModelStatistics": opened(
        name=TEXT,
        version=TEXT,
        last_inference={**COUNT, "description": "milliseconds since the epoch, 0: never"},
        inference_count=COUNT,
        execution_count=COUNT,
        inference_stats=closed(**dict.fromkeys(INFERENCE_COUNTS, DURATION)),
        response_stats={
            "type": "object",
            "additionalProperties": closed(**dict.fromkeys(RESPONSE_COUNTS, DURATION)),
        },
        batch_stats=listed(closed(batch_size=COUNT, **dict.fromkeys(COMPUTE, DURATION))),
        memory_usage=listed(closed(type=TEXT, id=COUNT, byte_size=COUNT)),
    ),
    "TraceSettings": opened(
        trace_level=TEXTS,
        trace_rate=TEXT,
        trace_count=TEXT,
        trace_mode=TEXT,
        optional={"log_frequency": TEXT, "trace_file": TEXT},
    ),
    "TraceChanges": opened(
        optional={
            "trace_level": {"type": ["array", "null"], "items": TEXT},
            "trace_rate": {"type": ["string", "null"]},
            "trace_count": {"type": ["string", "null"]},
            "log_frequency": {"type": ["string", "null"]},
        }
    ),
    "LastErrors": closed(
        models=listed(
            closed(
                name=TEXT,
                version=TEXT,
                errors=listed(
                    closed(
                        text=TEXT,
                        code=TEXT,
                        reason={"enum": ["REJECTED", "CANCELED", "BACKEND", "OTHER"]},
                        refused={**FLAG, "description": "the requests were not accepted"},
                        count=COUNT,
                        first=MOMENT,
                        last=MOMENT,
                    )
                ),
            )
        ),
    ),
    "RecentTraces": listed(opened(id=COUNT)),
    "LogSettings": closed(log_file=TEXT, **LOG_SETTINGS),
    "RecentLog": closed(
        lines=listed(
            closed(
                number=COUNT,
                time=MOMENT,
                level={"enum": ["verbose", "info", "warning", "error"]},
                text=TEXT,
            )
        ),
        last=COUNT,
    ),
    "LogChanges": opened(optional=LOG_SETTINGS),
    "SystemRegions": listed(closed(name=TEXT, key=TEXT, offset=COUNT, byte_size=COUNT)),
    "SystemRegion": opened(key=TEXT, byte_size=COUNT, optional={"offset": COUNT}),
    "CudaRegions": listed(closed(name=TEXT, device_id=COUNT, byte_size=COUNT)),
    "CudaRegion": opened(raw_handle=opened(b64=TEXT), device_id=COUNT, byte_size=COUNT),
    "IndexRequest": opened(optional={"ready": FLAG, "timings": FLAG}),
    "RepositoryIndex": listed(
        closed(
            name=TEXT,
            optional={
                "version": TEXT,
                "state": {
                    "type": "string",
                    "enum": ["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"],
                },
                "reason": TEXT,
                "loaded_at": MOMENT,
                "load_duration_ns": COUNT,
            },
        )
    ),
    "LoadRequest": opened(
        optional={
            "parameters": opened(
                optional={
                    "config": {**TEXT, "description": "a model configuration as JSON"},
                    "version_labels": {**TEXT, "description": "stable=3,canary=4: to be set with the load"},
                    "async": FLAG,
                }
            )
        }
    ),
    "CheckRequest": opened(optional={"parameters": opened(optional={"config": TEXT}), "config": opened()}),
    "CheckAnswer": opened(name=TEXT, ok=FLAG, problems={"type": "array"}, load_would=TEXT),
    "LoadProgress": opened(name=TEXT, versions=listed(opened(version=TEXT, state=TEXT))),
    "LabelChanges": closed(
        optional={
            "labels": {
                "type": "object",
                "additionalProperties": {"type": ["integer", "string", "null"]},
                "description": "label: the version that it names from now on; null: removed",
            },
            "aliases": {
                "type": "object",
                "additionalProperties": {"enum": [True, None]},
                "description": "true: a name of the model from now on; null: removed",
            },
        }
    ),
    "Labels": closed(
        name=TEXT,
        versions=listed(COUNT),
        labels={"type": "object", "additionalProperties": COUNT},
        aliases=TEXTS,
        set=closed(labels=TEXTS, aliases=TEXTS),
    ),
    "UnloadRequest": opened(optional={"parameters": opened(optional={"unload_dependents": FLAG})}),
    "OpenAiError": closed(error=closed(message=TEXT, type=TEXT, param={}, code={})),
    "OpenAiModels": opened(object={"enum": ["list", "model"]}),
    "OpenAiCompletionRequest": opened(
        model=TEXT, prompt={"type": ["string", "array"], "items": TEXT}, optional=OPENAI_OPTIONS
    ),
    "OpenAiChatRequest": opened(
        model=TEXT,
        messages=listed(opened(role=TEXT, content={"type": ["string", "array"]})),
        optional={**OPENAI_OPTIONS, "max_completion_tokens": {"type": "integer", "minimum": 1}},
    ),
    "OpenAiCompletion": opened(
        id=TEXT,
        object={"enum": ["text_completion", "chat.completion"]},
        created=COUNT,
        model=TEXT,
        choices=listed(opened(index=COUNT, finish_reason=TEXT)),
        optional={"usage": OPENAI_USAGE},
    ),
    "OpenAiEmbeddingRequest": opened(
        model=TEXT,
        input={"type": ["string", "array"], "items": TEXT},
        optional={"encoding_format": {"enum": ["float", "base64"]}},
    ),
    "OpenAiEmbeddings": opened(
        object={"const": "list"},
        model=TEXT,
        data=listed(
            closed(
                object={"const": "embedding"},
                index=COUNT,
                embedding={"type": ["array", "string"]},
            )
        ),
        optional={"usage": OPENAI_USAGE},
    ),
    "OpenApi": opened(openapi=TEXT, info={"type": "object"}, paths={"type": "object"}),
}
