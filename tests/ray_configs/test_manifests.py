"""Cluster-launcher files against Ray's own schema, KubeRay manifests against the fields that its CRDs define, and
runtime environments as Ray reads them; the runs inside fit the clusters around them."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.runtime_env import RuntimeEnv

from openrlhf_ebft import __version__
from openrlhf_ebft.actors.free_resources import NodeResources
from openrlhf_ebft.actors.placement import plan_placement
from openrlhf_ebft.config import load_config
from openrlhf_ebft.config.serving import load_serving_config
from tests.processes import ROOT

FOLDER = ROOT / "ray_configs"
SCHEMA = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
IMAGE = f"REGISTRY/openrlhf-ebft:{__version__}-gpu"

# Fields of KubeRay 1.6 (its API reference): those that must be there, and those that may.
RAYJOB = {
    "entrypoint", "submissionMode", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit",
    "activeDeadlineSeconds", "runtimeEnvYAML", "rayClusterSpec", "clusterSelector", "jobId", "metadata", "suspend",
    "submitterPodTemplate", "submitterConfig", "entrypointNumCpus", "entrypointNumGpus", "entrypointResources",
}  # fmt: skip
RAYSERVICE = {"serveConfigV2", "rayClusterConfig", "serveService", "upgradeStrategy"}
RAYCLUSTER = {
    "rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling", "autoscalerOptions",
    "headServiceAnnotations", "suspend", "gcsFaultToleranceOptions", "managedBy",
}  # fmt: skip
HEAD = ({"rayStartParams", "template"}, {"serviceType", "headService", "enableIngress", "resources", "labels"})
WORKER = (
    {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"},
    {"replicas", "numOfHosts", "scaleStrategy", "suspend", "idleTimeoutSeconds", "resources", "labels"},
)


def documents(name: str) -> dict[str, dict]:
    """A manifest's objects by kind."""
    return {item["kind"]: item for item in yaml.safe_load_all((FOLDER / name).read_text())}


def test_every_file_is_tested():
    """Training configurations are in test_training.py."""
    others = {path.name for path in FOLDER.iterdir() if re.match(r"cluster_|kuberay_|runtime_env", path.name)}
    assert others == {
        "cluster_aws.yaml",
        "cluster_gcp.yaml",
        "kuberay_rayjob.yaml",
        "kuberay_rayservice.yaml",
        "runtime_env.yaml",
        "runtime_env_offline.yaml",
    }


@pytest.mark.parametrize("provider", ["aws", "gcp"])
def test_launcher_files_follow_rays_schema(provider):
    config = yaml.safe_load((FOLDER / f"cluster_{provider}.yaml").read_text())
    jsonschema.validate(config, SCHEMA)
    complete = prepare_config(config)
    validate_config(complete)
    assert complete["head_start_ray_commands"] == config["head_start_ray_commands"]
    assert config["provider"]["type"] == provider
    assert config["docker"]["image"] == IMAGE
    for command in config["head_start_ray_commands"][1:] + config["worker_start_ray_commands"][1:]:
        assert "RAY_AUTH_MODE=token" in command
    assert config["file_mounts"] == {"/home/ray/.ray/auth_token": "~/.ray/auth_token"}
    types = config["available_node_types"]
    nodes = [
        NodeResources(kind["resources"]["CPU"], kind["resources"].get("GPU", 0))
        for name, kind in types.items()
        for _ in range(kind.get("max_workers", 1))
    ]
    assert len(nodes) == config["max_workers"] + 1 and config["head_node_type"] in types
    plan_placement(load_config(FOLDER / "two_nodes.yaml"), nodes)


def test_rays_schema_refuses_what_is_wrong():
    config = yaml.safe_load((FOLDER / "cluster_aws.yaml").read_text())
    config["available_node_types"]["head"]["resources"]["CPU"] = "many"
    with pytest.raises(jsonschema.ValidationError, match="'many' is not of type 'integer'"):
        jsonschema.validate(config, SCHEMA)


def check_cluster(spec: dict) -> list[NodeResources]:
    """A RayClusterSpec has the CRD's fields; returns its pods as nodes."""
    assert set(spec) <= RAYCLUSTER and spec["rayVersion"] == ray.__version__
    assert spec["authOptions"] == {"mode": "token"}
    head, workers = spec["headGroupSpec"], spec["workerGroupSpecs"]
    check_group(head, *HEAD)
    nodes = [pod_resources(head)]
    assert head["rayStartParams"]["num-gpus"] == "0"
    for group in workers:
        check_group(group, *WORKER)
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        nodes += [pod_resources(group)] * group["replicas"]
    return nodes


def check_group(group: dict, required: set[str], optional: set[str]) -> None:
    assert required <= set(group) <= required | optional
    assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] and container["image"] == IMAGE
    assert pod["securityContext"] == {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000}
    resources = container["resources"]
    # The operator tells Ray the limits: they must be there, and whole CPUs.
    assert resources["limits"] == resources["requests"] and resources["limits"]["cpu"].isdigit()
    assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
    for port in container.get("ports", []):
        assert set(port) == {"containerPort", "name"} and len(port["name"]) <= 15
    for variable in container.get("env", []):
        assert set(variable) in ({"name", "value"}, {"name", "valueFrom"})


def pod_resources(group: dict) -> NodeResources:
    (container,) = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    return NodeResources(float(limits["cpu"]), float(limits.get("nvidia.com/gpu", 0)))


def check_config_map(objects: dict[str, dict], spec: dict, key: str) -> str:
    """The ConfigMap is the one that the pods mount; returns its file."""
    name = objects["ConfigMap"]["metadata"]["name"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        assert volumes["configs"]["configMap"] == {"name": name}
    return objects["ConfigMap"]["data"][key]


def test_rayjob(tmp_path):
    objects = documents("kuberay_rayjob.yaml")
    job = objects["RayJob"]
    assert job["apiVersion"] == "ray.io/v1" and set(job) == {"apiVersion", "kind", "metadata", "spec"}
    spec = job["spec"]
    assert set(spec) <= RAYJOB and spec["submissionMode"] in ("K8sJobMode", "HTTPMode", "InteractiveMode")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,45}[a-z0-9])?", job["metadata"]["name"])
    RuntimeEnv(**yaml.safe_load(spec["runtimeEnvYAML"]))
    nodes = check_cluster(spec["rayClusterSpec"])
    run = tmp_path / "run.yaml"
    run.write_text(check_config_map(objects, spec["rayClusterSpec"], "run.yaml"))
    assert spec["entrypoint"].split() == ["openrlhf-ebft", "train", "/configs/run.yaml"]
    config = load_config(run)
    placement = plan_placement(config, nodes)
    assert sum(bundle.gpus for bundle in placement.bundles) == 16
    assert config.logging.root.startswith("/shared/") and config.placement.require_gpus


def test_rayservice(tmp_path):
    objects = documents("kuberay_rayservice.yaml")
    service = objects["RayService"]
    assert service["apiVersion"] == "ray.io/v1"
    spec = service["spec"]
    assert set(spec) <= RAYSERVICE
    nodes = check_cluster(spec["rayClusterConfig"])
    server = tmp_path / "server.yaml"
    server.write_text(check_config_map(objects, spec["rayClusterConfig"], "server.yaml"))
    config = load_serving_config(server, ())
    assert config.http.api_keys_env == "RAD_API_KEYS"
    head = spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    from openrlhf_ebft.serving.server import proxy_environment

    given = {entry["name"]: entry.get("value") for entry in head["env"]}
    assert given == {"RAD_API_KEYS": None} | proxy_environment()
    assert any(node.cpus >= config.replicas.cpus and node.gpus >= config.engine.tensor_parallel_size for node in nodes)


def test_the_serve_configuration_is_one_and_its_application_can_be_imported():
    from ray.serve.schema import ServeDeploySchema

    from openrlhf_ebft.serving import deployed, front

    text = documents("kuberay_rayservice.yaml")["RayService"]["spec"]["serveConfigV2"]
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert application.import_path == f"{deployed.__name__}:{deployed.build.__name__}"
    assert application.args == {"config": "/configs/server.yaml"}
    assert front.SETTING[1] == "openrlhf_ebft.serving.front.middlewares"


@pytest.mark.parametrize("name", ["runtime_env.yaml", "runtime_env_offline.yaml"])
def test_runtime_environments(name):
    environment = yaml.safe_load((FOLDER / name).read_text())
    assert RuntimeEnv(**environment)["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "600"
    assert {".venv/", "models/", "runs/"} <= set(environment["excludes"])
