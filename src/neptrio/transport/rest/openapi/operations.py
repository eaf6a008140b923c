"""What each REST verb is for: the words, bodies and statuses of the OpenAPI document."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

JSON = "application/json"
TEXT = "text/plain"
BINARY = "application/octet-stream"
EVENTS = "text/event-stream"
MULTIPART = "multipart/mixed"
HTML = "text/html"

# status -> why; the statuses that every route may answer with, and those that a body adds
ANYWHERE = {
    400: "malformed or invalid",
    401: "no valid token (--auth-config)",
    403: "restricted, of another origin, for a Host that is not ours, or beyond the token's scopes",
    429: "beyond a limit of the client",
    431: "the headers are too large",
    500: "an error of the server",
    503: "not possible now",
}
WITH_BODY = {408: "the body did not arrive in time", 413: "the body is too large"}
MODEL = {404: "no such model or version"}
EXECUTION = {
    **MODEL,
    501: "not supported: a decoupled model at `infer`, an unknown compression",
    504: "the server's own time limit has passed",
}
ADD_SUB: dict[str, Any] = {
    "inputs": [
        {"name": "INPUT0", "datatype": "INT32", "shape": [1, 16], "data": list(range(16))},
        {"name": "INPUT1", "datatype": "INT32", "shape": [1, 16], "data": [1] * 16},
    ]
}
SUMS: dict[str, Any] = {
    "model_name": "simple",
    "model_version": "1",
    "outputs": [
        {"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 16], "data": list(range(1, 17))},
        {"name": "OUTPUT1", "datatype": "INT32", "shape": [1, 16], "data": list(range(-1, 15))},
    ],
}


@dataclass(frozen=True)
class Operation:
    """One verb with one method. `answers` are media type -> schema's name ("" has no shape, no media type no body)."""

    summary: str
    tag: str
    answers: dict[str, str] = field(default_factory=dict)
    body: str = ""  # the schema's name of what a POST takes
    optional: bool = False  # the body may be missing
    errors: dict[int, str] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)  # parameter -> what it does
    example: Any = None  # a body that the example repository takes
    answer: Any = None  # what it answers then
    more: str = ""
    timed: bool = False  # it may be asked for its times
    binary: bool = False  # bodies may have binary tensors behind the JSON


OF_STATISTICS = {
    "percentiles": "such as 50,99: adds percentiles of each stage",
    "histograms": "true: adds the histograms",
    "live": "true: adds what is queued and executing now",
    "since_start": "true: adds the sums over all loads of each version",
}

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("infer", "POST"): Operation(
        "Execute a model once",
        "inference",
        {JSON: "InferResponse", BINARY: ""},
        "InferRequest",
        errors=EXECUTION,
        example=ADD_SUB,
        answer=SUMS,
        more="With `Inference-Header-Content-Length` the body is that many bytes of JSON and binary tensors behind it; 0 is "
        "the raw form, a body that is the model's only input. See docs/http.md.",
        timed=True,
        binary=True,
    ),
    ("infer_stream", "POST"): Operation(
        "Execute a model and stream its responses",
        "inference",
        {EVENTS: "", MULTIPART: ""},
        "InferRequest",
        errors=EXECUTION,
        example=ADD_SUB,
        more="An extension: each event (or, with `Accept: multipart/mixed`, part) is an InferResponse with the parameter "
        "`triton_final_response`.",
        timed=True,
        binary=True,
    ),
    ("generate", "POST"): Operation(
        "Execute a model with a flat JSON object",
        "inference",
        {JSON: "GenerateResponse"},
        "GenerateRequest",
        errors=EXECUTION,
        example={"INPUT0": list(range(16)), "INPUT1": [1] * 16},
        timed=True,
    ),
    ("generate_stream", "POST"): Operation(
        "Execute a model with a flat JSON object and stream its responses",
        "inference",
        {EVENTS: ""},
        "GenerateRequest",
        errors=EXECUTION,
        example={"INPUT0": list(range(16)), "INPUT1": [1] * 16},
        timed=True,
    ),
    ("sequences", "GET"): Operation(
        "List a model's live sequences", "sequences", {JSON: "Sequences"}, errors=MODEL
    ),
    ("sequence_end", "POST"): Operation(
        "End a sequence",
        "sequences",
        {JSON: "SequenceEnded"},
        errors={404: "no such model or sequence"},
        query={"type": "uint or string, when the id is all digits", "token": "whose sequence is meant"},
    ),
    ("live", "GET"): Operation("Whether the server runs", "health", {TEXT: ""}),
    ("ready", "GET"): Operation("Whether the server can serve; 400: it cannot", "health", {TEXT: ""}),
    ("model_ready", "GET"): Operation(
        "Whether a model can serve; 400: it cannot", "health", {TEXT: ""}, errors=MODEL
    ),
    ("server_metadata", "GET"): Operation("Name, version, extensions", "metadata", {JSON: "ServerMetadata"}),
    ("model_metadata", "GET"): Operation(
        "A model's versions, inputs and outputs", "metadata", {JSON: "ModelMetadata"}, errors=MODEL
    ),
    ("model_config", "GET"): Operation(
        "A model's complete configuration",
        "metadata",
        {JSON: "ModelConfig"},
        errors=MODEL,
        query={"defaulted": "true: adds the paths of what the server has filled in"},
    ),
    ("statistics", "GET"): Operation(
        "Counts and durations of models",
        "statistics",
        {JSON: "Statistics"},
        errors=MODEL,
        query=OF_STATISTICS,
    ),
    ("errors", "GET"): Operation(
        "The errors that requests met last, of each version since its load",
        "statistics",
        {JSON: "LastErrors"},
        errors=MODEL,
    ),
    ("trace_setting", "GET"): Operation("Trace settings", "trace", {JSON: "TraceSettings"}, errors=MODEL),
    ("trace_setting", "POST"): Operation(
        "Change trace settings",
        "trace",
        {JSON: "TraceSettings"},
        "TraceChanges",
        errors={**MODEL, 501: "a setting that cannot be changed here"},
        example={"trace_rate": "500"},
    ),
    ("trace_recent", "GET"): Operation(
        "The traces that ended last", "trace", {JSON: "RecentTraces"}, query={"count": "how many, from 1 on"}
    ),
    ("logging", "GET"): Operation("Log settings", "logging", {JSON: "LogSettings"}),
    ("logging_recent", "GET"): Operation(
        "The lines that were logged last",
        "logging",
        {JSON: "RecentLog"},
        errors={501: "the log is that of another program"},
        query={
            "count": "how many, from 1 on",
            "level": "verbose, info, warning or error: lines of that level and worse",
            "after": "the number of a line: what came after it",
        },
    ),
    ("logging", "POST"): Operation(
        "Change log settings",
        "logging",
        {JSON: "LogSettings"},
        "LogChanges",
        errors={501: "log_file cannot be changed here"},
        example={"log_verbose_level": 1},
    ),
    ("system_shm_status", "GET"): Operation(
        "Registered regions of system memory",
        "shared memory",
        {JSON: "SystemRegions"},
        errors={404: "no such region", 501: "not enabled"},
    ),
    ("system_shm_register", "POST"): Operation(
        "Register a region of system memory",
        "shared memory",
        body="SystemRegion",
        errors={404: "no such file", 501: "not enabled"},
        example={"key": "/inputs", "offset": 0, "byte_size": 128},
    ),
    ("system_shm_unregister", "POST"): Operation(
        "Unregister one region of system memory, or all", "shared memory", errors={501: "not enabled"}
    ),
    ("cuda_shm_status", "GET"): Operation(
        "Registered regions of GPU memory",
        "shared memory",
        {JSON: "CudaRegions"},
        errors={404: "no such region", 501: "not enabled"},
    ),
    ("cuda_shm_register", "POST"): Operation(
        "Register a region of GPU memory",
        "shared memory",
        body="CudaRegion",
        errors={501: "not enabled"},
        example={"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 128},
    ),
    ("cuda_shm_unregister", "POST"): Operation(
        "Unregister one region of GPU memory, or all", "shared memory", errors={501: "not enabled"}
    ),
    ("repository_index", "POST"): Operation(
        "List the models of the repository",
        "repository",
        {JSON: "RepositoryIndex"},
        "IndexRequest",
        optional=True,
        query={"timings": "true: adds when models were loaded and how long that took"},
        errors={404: "no such repository"},
        example={"ready": True},
    ),
    ("repository_load", "POST"): Operation(
        "Load or reload a model (--model-control-mode=explicit)",
        "repository",
        body="LoadRequest",
        optional=True,
        errors={**MODEL, 504: "the load took too long"},
        example={},
    ),
    ("repository_unload", "POST"): Operation(
        "Unload a model (--model-control-mode=explicit)",
        "repository",
        body="UnloadRequest",
        optional=True,
        errors=MODEL,
        example={"parameters": {"unload_dependents": True}},
    ),
    ("repository_check", "POST"): Operation(
        "What a load would do and find wrong",
        "repository",
        {JSON: "CheckAnswer"},
        "CheckRequest",
        optional=True,
        errors=MODEL,
        example={},
    ),
    ("repository_model", "GET"): Operation(
        "A model's versions, its load under way, its last error",
        "repository",
        {JSON: "LoadProgress"},
        errors=MODEL,
    ),
    ("label_setting", "GET"): Operation(
        "A model's version labels and aliases", "repository", {JSON: "Labels"}, errors=MODEL
    ),
    ("label_setting", "POST"): Operation(
        "Set version labels and aliases (--model-control-mode=explicit)",
        "repository",
        {JSON: "Labels"},
        "LabelChanges",
        errors=MODEL,
        example={"labels": {"stable": 1}},
    ),
    ("openai_models", "GET"): Operation(
        "Models that serve OpenAI's API", "openai", {JSON: "OpenAiModels"}, errors=MODEL
    ),
    ("openai_completions", "POST"): Operation(
        "Complete a prompt",
        "openai",
        {JSON: "OpenAiCompletion", EVENTS: ""},
        "OpenAiCompletionRequest",
        errors=MODEL,
        example={"model": "shakespeare", "prompt": "To be", "max_tokens": 16},
        more="See docs/openai.md.",
    ),
    ("openai_chat", "POST"): Operation(
        "Answer a conversation",
        "openai",
        {JSON: "OpenAiCompletion", EVENTS: ""},
        "OpenAiChatRequest",
        errors=MODEL,
        example={"model": "shakespeare", "messages": [{"role": "user", "content": "To be"}]},
        more="See docs/openai.md.",
    ),
    ("openai_embeddings", "POST"): Operation(
        "Embed texts",
        "openai",
        {JSON: "OpenAiEmbeddings"},
        "OpenAiEmbeddingRequest",
        errors=MODEL,
        example={"model": "minilm", "input": ["a text", "another"]},
        more="See docs/openai.md.",
    ),
    ("openapi", "GET"): Operation("This document", "metadata", {JSON: "OpenApi"}),
    ("reference", "GET"): Operation(
        "This document as a page, with the models that serve", "metadata", {HTML: ""}
    ),
    ("home", "GET"): Operation("The same page", "metadata", {HTML: ""}),
}
