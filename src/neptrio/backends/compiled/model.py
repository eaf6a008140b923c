"""The model of a compiled backend, in its own process: leads the library through its life.

Rules:
 1. A configuration is completed in a process of its own, with the backend and the model begun and ended again; the instance's
    process is told the complete one and that nothing is left to be completed.
 2. Where the backend blocks devices, instances on one GPU execute one at a time, but not those of models with sequences: as on
    a Triton server, where other kinds of instances have threads of their own in any case.
 3. ModelInstanceInitialize of two instances does not run at the same time, unless the backend lets instances load in parallel.
 4. Of what a backend sets, inputs, outputs, the batch size, whether it is decoupled, and a scheduler where there was none, are
    taken; everything else is as it was, as on a Triton server. Where there are no instance groups, there is the first that the
    backend prefers and this machine has.
"""

from __future__ import annotations

import json
from typing import Any

import triton_python_backend_utils as pb_utils
from neptrio.backends.compiled.host import Host
from triton_python_backend_utils import _host

SCHEDULERS = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")


class TritonPythonModel:
    """See the module's text."""

    @staticmethod
    def auto_complete_config(config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        """Asks the backend for what the configuration leaves out."""
        before = config.as_dict()
        start = before.pop("compiled")
        host = Host()
        try:
            completed = json.loads(host.begin(start, json.dumps(before), True))
            groups = [group for group in host.groups() if start["gpus"] or group[0] != "GPU"]
        finally:
            host.finish()
        return pb_utils.ModelConfig(merged(before, completed, groups), config.version_directory)

    def initialize(self, args: dict[str, str]) -> None:
        """Opens the library and begins backend, model and instance."""
        start = json.loads(args["compiled"])
        config = json.loads(args["model_config"])
        name = args["model_instance_name"]
        kind = args["model_instance_kind"].removeprefix("KIND_")
        asked = _host.require("a compiled backend")
        self._host = Host()
        self._host.begin(start, args["model_config"], False)
        manner = self._host.manner()
        if not manner["parallel loading"]:
            asked.acquire_initialize_lock()
        group = group_of(config, name)
        if kind == "GPU" and manner["device blocking"]:
            if config.get("sequence_batching"):
                pb_utils.Logger.log_info(
                    f"{name} does not wait for others on its GPU, because of the model's sequences"
                )
            else:
                asked.exclusive = True
        policy = group.get("host_policy") or f"{kind.lower()}_{args['model_instance_device_id']}"
        self._host.instance(
            name,
            kind,
            int(args["model_instance_device_id"]),
            bool(group.get("passive")),
            json.dumps({policy: {}}),
            list(group.get("profile") or ()),
            [
                (str(row.get("kind") or "KIND_NVDLA"), int(row.get("device_id", 0)))
                for row in group.get("secondary_devices") or ()
            ],
            bool((config.get("model_transaction_policy") or {}).get("decoupled")),
        )

    def execute(self, requests: list[Any]) -> Any:
        """Runs a batch."""
        return self._host.execute(requests)

    def is_ready(self) -> bool:
        """What the backend says of itself; True where it says nothing."""
        return bool(self._host.ready())

    def finalize(self) -> None:
        """Ends instance, model and backend."""
        self._host.finish()


def merged(
    before: dict[str, Any], completed: dict[str, Any], groups: list[tuple[str, int]]
) -> dict[str, Any]:
    """The configuration with what a backend may change (rule 4)."""
    made = dict(before)
    for key in ("input", "output", "max_batch_size", "model_transaction_policy"):
        if key in completed:
            made[key] = completed[key]
    if not any(before.get(key) for key in SCHEDULERS):
        made.update({key: completed[key] for key in SCHEDULERS if key in completed})
    if groups and not before.get("instance_group"):
        made["instance_group"] = [
            {"kind": f"KIND_{kind}", **({"count": count} if count else {})} for kind, count in groups[:1]
        ]
    return made


def group_of(config: dict[str, Any], instance: str) -> dict[str, Any]:
    """The instance group that an instance belongs to: its name is the group's, and a number."""
    rows: list[dict[str, Any]] = config.get("instance_group") or []
    return next((row for row in rows if row.get("name") == instance.rpartition("_")[0]), {})
