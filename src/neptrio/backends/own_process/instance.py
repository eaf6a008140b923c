"""The server's side of a kernel or ONNX instance in a process of its own.

The problem: CUDA promises that after certain errors only a new process can use a device, and a kernel that writes out of
bounds on the host ends the process that runs it. The choice: what Python models have. The process is one of theirs, its
model is hosted_model.py, which runs the backend's own instance; supervision, restarts, limits and the way of the
requests are those of neptrio.backends.python.

Rules:
 1. Batches are executed in the order in which they were sent. As many may be under way as the backend takes in the
    server's process, so that a GPU is kept as busy and batches fill as well as there.
 2. Only host memory crosses: inputs in device memory are fetched before, outputs arrive in shared memory.
 3. The process ends by itself when its device can no longer be used, after it has answered what it had begun.
"""

from __future__ import annotations

import json
from pathlib import Path

from google.protobuf import json_format

from neptrio.backends.python import template
from neptrio.backends.python.backend import initialize_seconds, resources
from neptrio.backends.python.isolated import IsolatedInstance
from neptrio.execution.backend import Backend

HOSTED_MODEL = Path(__file__).with_name("hosted_model.py")


def own_process_instance(
    backend: Backend, name: str, kind: str, device_id: int, most_under_way: int, execute_seconds: float | None
) -> IsolatedInstance:
    """An instance of `backend` in a process of its own; `name`, `kind` and `device_id` as for create_instance().

    `most_under_way` batches are sent to it at once; `execute_seconds` is after how long a batch's process is killed, None
    for never. Raises InvalidArgument for parameters that cannot be followed.
    """
    context = backend.context
    kind_of = type(backend)
    made = IsolatedInstance(
        name,
        None,
        HOSTED_MODEL,
        {
            "model_name": context.name,
            "model_version": str(context.version),
            "model_config": json_format.MessageToJson(context.config, preserving_proto_field_name=True),
            "model_instance_name": name,
            "model_instance_kind": kind,
            "model_instance_device_id": str(device_id),
            "model_repository": str(context.model_dir),
            "version_directory": str(context.version_dir),
            "backend": f"{kind_of.__module__}:{kind_of.__qualname__}",
            "backend_settings": json.dumps(context.settings.backend_settings(context.config.backend)),
            "pinned_bytes": str(context.settings.pinned_memory_pool_byte_size),
            "max_output_bytes": str(context.settings.max_output_bytes),
        },
        [output.name for output in context.config.output],
        context.host,
        False,
        initialize_seconds(context, context.config.backend),
        *resources(context, context.config.backend),
        execute_seconds,
        version=context.version,
        read_only=True,
        origin=template.template,
    )
    made.in_order, made.most_under_way, made.deep = True, most_under_way, False
    return made
