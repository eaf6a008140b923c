"""The Helm chart: rendered by Helm, checked against the schemas, and against what the server really takes and answers."""

from __future__ import annotations

import copy
import hashlib
import json
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from jsonschema.exceptions import ValidationError

from neptrio.cli import settings_of
from tests.deploy import schemas
from tests.deploy.chart import CHART, NAMESPACE, by_kind, render
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

ROOT = CHART.parents[2]
EVERYTHING: dict[str, Any] = {
    "replicaCount": 3,
    "image": {"repository": "registry.example/neptrio", "tag": "1", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "pull"}],
    "modelRepository": "s3://bucket/models",
    "extraArgs": ["--model-control-mode=poll", "--repository-poll-secs=30"],
    "env": [{"name": "AWS_REGION", "value": "eu"}],
    "envFrom": [{"secretRef": {"name": "aws"}}],
    "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}],
    "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
    "ports": {"http": 18000, "grpc": 18001, "metrics": 18002},
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "autoscaling": {"enabled": True},
    "serviceMonitor": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "tokenSecret": {"name": "neptrio", "key": "token"},
    },
    "networkPolicy": {
        "from": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}],
        "metricsFrom": [{"podSelector": {}}],
        "egress": [{"ports": [{"protocol": "TCP", "port": 443}]}],
    },
    "serviceAccount": {"annotations": {"role": "models"}},
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "a"},
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
}
KSERVE: dict[str, Any] = {"kserve": {"enabled": True}}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "kserve": KSERVE,
    "kserve of the cluster": {
        **EVERYTHING,
        "kserve": {"enabled": True, "clusterScope": True, "autoSelect": True, "name": "neptrio-runtime"},
    },
    "little": {
        "service": {"headless": False},
        "podDisruptionBudget": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "serviceAccount": {"create": False},
    },
}


def status(url: str) -> int:
    """The status of a GET."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """The one container of the pods or of the runtime."""
    kinds = by_kind(objects)
    spec = kinds["Deployment"]["spec"]["template"]["spec"] if "Deployment" in kinds else objects[0]["spec"]
    (found,) = spec["containers"]
    return dict(found)


def test_helm_finds_nothing_wrong() -> None:
    found = helm_python.lint(str(CHART))
    assert found["errors"] == [] and [m["error"] for m in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_what_is_rendered_is_what_kubernetes_takes(values: dict[str, Any]) -> None:
    objects = render(values)
    for one in objects:
        schemas.check(one)
    kinds = {one["kind"] for one in objects}
    if values.get("kserve"):
        assert kinds == {
            "ClusterServingRuntime" if values["kserve"].get("clusterScope") else "ServingRuntime"
        }
    elif values is EVERYTHING:
        assert kinds == {
            "Deployment", "HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget", "Service",
            "ServiceAccount", "ServiceMonitor",
        }  # fmt: skip
    elif values:
        assert kinds == {"Deployment", "Service"}


@pytest.mark.parametrize("kind", ["Deployment", "NetworkPolicy", "ServiceMonitor", "ServingRuntime"])
def test_a_misspelt_field_would_be_found(kind: str) -> None:
    found = by_kind(render(KSERVE if kind == "ServingRuntime" else EVERYTHING))[kind]
    schemas.check(found)
    wrong = copy.deepcopy(found)
    spec = wrong["spec"]["template"]["spec"] if kind == "Deployment" else wrong["spec"]
    target = spec["containers"][0] if "containers" in spec else spec
    target["misspelt"] = 1
    with pytest.raises(ValidationError, match="misspelt"):
        schemas.check(wrong)


@pytest.mark.parametrize(
    "values",
    [
        {"replicas": 3},
        {"image": {"pullPolicy": "Sometimes"}},
        {"ports": {"http": 0}},
        {"extraArgs": ["http-port=1"]},
        {"shutdown": {"delaySeconds": 0}},
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmError, match="specifications of the schema"):
        render(values)


def test_every_value_is_described_and_used() -> None:
    """values.yaml and its schema have the same keys, and the templates use each."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]) - {"global"} == set(values)
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    for key, value in values.items():
        assert f".Values.{key}" in templates, key
        if "properties" in schema["properties"][key]:
            assert set(schema["properties"][key]["properties"]) == set(value), key
            for below in value:
                assert f".Values.{key}.{below}" in templates, f"{key}.{below}"


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_the_server_takes_the_flags(values: dict[str, Any]) -> None:
    objects = render(values)
    found = container(objects)
    # KServe puts the InferenceService's name in
    args = [argument.replace("{{.Name}}", "classifier") for argument in found["args"]]
    assert not any("{{" in argument for argument in args)
    settings, warnings = settings_of(args)
    assert warnings == [] and settings.read_only
    if values.get("kserve"):
        assert settings.model_repository == (Path("/mnt/models"),) and settings.model_name == "classifier"
        assert (settings.http_port, settings.grpc_port) == (8080, 9000)
        assert objects[0]["spec"]["annotations"]["prometheus.kserve.io/port"] == str(settings.metrics_port)
        return
    ports = {port["name"]: port["containerPort"] for port in found["ports"]}
    expected = {"http": settings.http_port, "grpc": settings.grpc_port, "metrics": settings.metrics_port}
    assert ports == expected
    for service in (one for one in objects if one["kind"] == "Service"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert found[probe]["httpGet"]["port"] in ports
    # a pod is not killed before the server had its time after the delay
    pod = by_kind(objects)["Deployment"]["spec"]["template"]["spec"]
    delay = found["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > delay + settings.exit_timeout_secs
    assert settings.grace_secs == settings.exit_grace_secs, "more than a quarter of the exit timeout"


def test_the_runtime_serves_what_kserve_mounts(tmp_path: Path) -> None:
    """One model without a configuration's name, with the flags of the runtime; only folder and ports are replaced."""
    mounted = write_model(tmp_path, "models", 'name: "trained" ' + identity_config())
    found = container(render(KSERVE))
    replaced = {"/mnt/models": str(mounted), "{{.Name}}": "classifier"}
    args = []
    for argument in found["args"]:
        for old, new in replaced.items():
            argument = argument.replace(old, new)
        if "-port=" not in argument:
            args.append(argument)
    with ServerProcess(None, *args) as server:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert status(f"http://{server.http}{found[probe]['httpGet']['path']}") == 200
        assert status(f"http://{server.http}/v2/models/classifier/ready") == 200
        assert status(f"http://{server.http}/v2/models/trained/ready") == 400


def test_the_chart_is_of_the_projects_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == project
    assert f":{project}" in container(render())["image"]


def test_pods_are_told_apart_by_labels_that_do_not_change() -> None:
    kinds = by_kind(render({**EVERYTHING, "image": {"tag": "2"}}))
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selector = kinds["Deployment"]["spec"]["selector"]["matchLabels"]
    assert "app.kubernetes.io/version" not in selector
    for chosen in (
        selector,
        kinds["Service"]["spec"]["selector"],
        kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        kinds["ServiceMonitor"]["spec"]["selector"]["matchLabels"],
    ):
        assert chosen.items() <= labels.items() and len(chosen) == 2


@pytest.mark.parametrize("values", [{}, KSERVE], ids=["chart", "kserve"])
def test_models_see_few_variables_unless_the_values_say_otherwise(values: dict[str, Any]) -> None:
    flag = "--backend-config=python,environment=minimal"
    assert flag in container(render(values))["args"]
    assert flag not in container(render({**values, "minimalEnvironment": False}))["args"]


@pytest.mark.parametrize("values", [{}, KSERVE], ids=["chart", "kserve"])
def test_containers_have_no_rights_and_write_to_memory_alone(values: dict[str, Any]) -> None:
    objects = render(values)
    found = container(objects)
    context = found["securityContext"]
    assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    pod = objects[0]["spec"] if values else by_kind(objects)["Deployment"]["spec"]["template"]["spec"]
    user = {**pod.get("securityContext", {}), **context}
    assert user["runAsNonRoot"] and user["runAsUser"] > 0
    assert {mount["mountPath"] for mount in found["volumeMounts"]} == {"/tmp", "/dev/shm"}
    assert all("sizeLimit" in volume["emptyDir"] for volume in pod["volumes"])
    if not values:
        assert pod["automountServiceAccountToken"] is False


def test_who_may_reach_which_port() -> None:
    policy = by_kind(render({}))["NetworkPolicy"]["spec"]
    callers, scrapers = policy["ingress"]
    assert callers["from"] == [{"podSelector": {}}]
    assert [port["port"] for port in callers["ports"]] == [8000, 8001]
    assert [port["port"] for port in scrapers["ports"]] == [8002]
    names = scrapers["from"][0]["namespaceSelector"]["matchLabels"]
    assert names == {"kubernetes.io/metadata.name": "monitoring"}
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert [port["port"] for rule in policy["egress"] for port in rule["ports"]] == [53, 53]


def test_the_autoscaler_asks_for_the_metric_that_the_adapter_makes() -> None:
    kinds = by_kind(render({"autoscaling": {"enabled": True, "minReplicas": 3}}))
    scaler = kinds["HorizontalPodAutoscaler"]["spec"]
    (rule,) = yaml.safe_load((ROOT / "deploy" / "prometheus" / "adapter.yaml").read_text())
    (metric,) = scaler["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}
    assert scaler["scaleTargetRef"]["name"] == kinds["Deployment"]["metadata"]["name"]
    assert scaler["minReplicas"] == 3
    assert "replicas" not in kinds["Deployment"]["spec"], "an upgrade would take the autoscaler's pods away"


def test_metrics_are_scraped_once() -> None:
    objects = render({"serviceMonitor": {"enabled": True}})
    monitor = by_kind(objects)["ServiceMonitor"]["spec"]
    assert monitor["namespaceSelector"] == {"matchNames": [NAMESPACE]}
    (unwanted,) = monitor["selector"]["matchExpressions"]
    (endpoint,) = monitor["endpoints"]
    scraped = [
        one["metadata"]["name"]
        for one in objects
        if one["kind"] == "Service"
        and unwanted["key"] not in one["metadata"]["labels"]
        and endpoint["port"] in {port["name"] for port in one["spec"]["ports"]}
    ]
    assert scraped == ["demo-neptrio"]


def test_probes_are_answered_without_a_token(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "m", identity_config())
    tokens = tmp_path / "tokens.toml"
    digest = hashlib.sha256(b"npt_secret").hexdigest()
    tokens.write_text(f'[[token]]\nname = "a"\nhash = "sha256:{digest}"\nscopes = ["infer"]\n')
    found = container(render({}))
    with ServerProcess(tmp_path / "models", f"--auth-config={tokens}") as server:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert status(f"http://{server.http}{found[probe]['httpGet']['path']}") == 200
        assert status(f"http://{server.http}/v2/models/m") == 401
