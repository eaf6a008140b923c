"""Checks objects against schemas: Kubernetes' own, and small ones of ours for kinds that others define.

The fields of ServiceMonitor are from the Prometheus Operator's API reference (monitoring.coreos.com/v1), those of
ServingRuntime from KServe's API reference (serving.kserve.io/v1alpha1). Ours have the fields that the chart may use, not
all there are; unknown ones fail, which is how a misspelt one is found. Containers and volumes inside are Kubernetes' own.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import kubernetes_validate

# the oldest that the chart says it needs (its pods' preStop sleeps without a program), and the newest that is known
VERSIONS = ("1.30", kubernetes_validate.latest_version())
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
SELECTOR = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "matchLabels": TEXTS,
        "matchExpressions": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["key", "operator"],
                "properties": {
                    "key": {"type": "string"},
                    "operator": {"enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
                    "values": {"type": "array", "items": {"type": "string"}},
                },
            },
        },
    },
}
SERVICE_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["selector", "endpoints"],
    "properties": {
        "selector": SELECTOR,
        "namespaceSelector": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "any": {"type": "boolean"},
                "matchNames": {"type": "array", "items": {"type": "string"}},
            },
        },
        "jobLabel": {"type": "string"},
        "endpoints": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "port": {"type": "string"},
                    "path": {"type": "string", "pattern": "^/"},
                    "scheme": {"enum": ["http", "https"]},
                    "authorization": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "type": {"type": "string"},
                            "credentials": {
                                "type": "object",
                                "additionalProperties": False,
                                "required": ["name", "key"],
                                "properties": {"name": {"type": "string"}, "key": {"type": "string"}},
                            },
                        },
                    },
                    "interval": {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"},
                },
            },
        },
    },
}
SERVING_RUNTIME = {
    "type": "object",
    "additionalProperties": False,
    "required": ["containers"],
    "properties": {
        "annotations": TEXTS,
        "labels": TEXTS,
        "disabled": {"type": "boolean"},
        "multiModel": {"type": "boolean"},
        "protocolVersions": {"type": "array", "items": {"enum": ["v1", "v2", "grpc-v1", "grpc-v2"]}},
        "supportedModelFormats": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name"],
                "properties": {
                    "name": {"type": "string"},
                    "version": {"type": "string"},
                    "autoSelect": {"type": "boolean"},
                    "priority": {"type": "integer", "minimum": 1},
                },
            },
        },
        "imagePullSecrets": {"type": "array"},
        "containers": {"type": "array", "minItems": 1},
        "volumes": {"type": "array"},
    },
}
OWN = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): SERVICE_MONITOR,
    ("serving.kserve.io/v1alpha1", "ServingRuntime"): SERVING_RUNTIME,
    ("serving.kserve.io/v1alpha1", "ClusterServingRuntime"): SERVING_RUNTIME,
}


def check(found: dict[str, Any]) -> None:
    """Raises ValidationError where an object is not what its kind may be; unknown fields count."""
    own = OWN.get((found["apiVersion"], found["kind"]))
    if own is None:
        for version in VERSIONS:
            kubernetes_validate.validate(found, version, strict=True)
        return
    assert set(found) == {"apiVersion", "kind", "metadata", "spec"}
    jsonschema.Draft7Validator(own).validate(found["spec"])
    if "containers" in found["spec"]:
        pod = {key: found["spec"][key] for key in ("containers", "volumes") if key in found["spec"]}
        check({"apiVersion": "v1", "kind": "Pod", "metadata": found["metadata"], "spec": pod})
