"""What others rely on: the article that the overlay ovh-mks stands in for, and the endpoint picker's chart."""

import copy
import pathlib
import shutil

import pytest
import yaml

import lint_operation  # noqa: F401  (its rules join those of lint)
import render
from lint import World, lint
from manifests import Manifests, Object, Workload, at, environment, selects

# The article's objects, and what its text, its commands and its dashboards say of them.
OBJECTS = {
    "Namespace": "vllm",
    "ConfigMap": "vllm-config",
    "Deployment": "qwen3-vl",
    "Service": "qwen3-vl-service",
    "PodDisruptionBudget": "qwen3-vl-pdb",
    "Ingress": "qwen3-vl-ingress",
    "ServiceMonitor": "vllm-metrics",
}
CONFIG = {
    "model_name": "Qwen/Qwen3-VL-8B-Instruct",
    "served_model_name": "qwen3-vl-8b",
    "tensor_parallel_size": "1",
    "gpu_memory_utilization": "0.90",
    "max_model_len": "8192",
    "max_num_seqs": "128",
    "dtype": "bfloat16",
}
APP = {"app": "qwen3-vl"}


@pytest.fixture(scope="module")
def article(renderings: dict[str, Manifests]) -> Manifests:
    return renderings["kustomize ovh-mks"]


def test_names_and_labels_are_the_articles(article: Manifests) -> None:
    for kind, name in OBJECTS.items():
        found = article.find(kind, name)
        assert found is not None, f"there is no {kind} {name}"
        assert at(found, "metadata", "namespace", default="vllm") == "vllm"
    # Applied over the article's Deployment the selector must be the same: it cannot change.
    assert article.find("Deployment", "qwen3-vl")["spec"]["selector"] == {"matchLabels": APP}
    assert article.find("Service", "qwen3-vl-service")["spec"]["selector"] == APP
    assert at(article.find("Service", "qwen3-vl-service"), "metadata", "labels", "app") == "qwen3-vl"
    monitor = article.find("ServiceMonitor", "vllm-metrics")
    assert monitor["spec"]["selector"] == {"matchLabels": APP} and monitor["spec"]["jobLabel"] == "app"
    assert at(monitor, "metadata", "labels", "release") == "prometheus"
    relabelled = {it["targetLabel"] for it in monitor["spec"]["endpoints"][0]["relabelings"]}
    assert relabelled == {"pod", "node", "namespace"}


def test_configuration_is_the_articles(article: Manifests) -> None:
    assert article.find("ConfigMap", "vllm-config")["data"] == CONFIG
    container = Workload(article.find("Deployment", "qwen3-vl")).containers[0]
    assert container["name"] == "vllm"
    for key in CONFIG:
        variable = environment(container)[key.upper()]
        assert variable["valueFrom"]["configMapKeyRef"] == {"name": "vllm-config", "key": key}
        # Each of the article's flags takes its value from there.
        place = container["args"].index(f"$({key.upper()})")
        flag = "model" if key == "model_name" else key.replace("_", "-")
        assert container["args"][place - 1] == f"--{flag}"
    token = environment(container)["HUGGING_FACE_HUB_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert (token["name"], token["key"]) == ("huggingface-secret", "token")


def test_ingress_is_the_articles_without_its_cookie(article: Manifests) -> None:
    ingress = article.find("Ingress", "qwen3-vl-ingress")
    prefix = "nginx.ingress.kubernetes.io/"
    annotations = {key.removeprefix(prefix): value for key, value in ingress["metadata"]["annotations"].items()}
    expected = {
        "proxy-body-size": "100m",
        "client-body-buffer-size": "10m",
        "proxy-http-version": "1.1",
        "proxy-read-timeout": "300",
        "proxy-send-timeout": "300",
    }
    assert expected.items() <= annotations.items() and "affinity" not in annotations
    assert ingress["spec"]["ingressClassName"] == "nginx" and "host" not in ingress["spec"]["rules"][0]


def test_the_load_balancer_is_more_patient_than_the_ingress(article: Manifests) -> None:
    overlay = render.DEPLOY / "k8s" / "overlays" / "ovh-mks"
    values = yaml.safe_load((overlay / "ingress-nginx-values.yaml").read_text())
    annotations = values["controller"]["service"]["annotations"]
    ingress = article.find("Ingress", "qwen3-vl-ingress")["metadata"]["annotations"]
    longest = max(float(ingress[f"nginx.ingress.kubernetes.io/proxy-{way}-timeout"]) for way in ("read", "send"))
    for side in ("client", "member"):
        assert float(annotations[f"loadbalancer.openstack.org/timeout-{side}-data"]) > 1000 * longest




@pytest.mark.parametrize("case", render.OFFERED)
def test_what_the_page_offers_can_be_added(case: str, world: World, tmp_path: pathlib.Path) -> None:
    """Components in the overlay, as mks.md has it, are not undone by the overlay's own patches."""
    shutil.copytree(render.DEPLOY / "k8s", tmp_path / "k8s")
    overlay = tmp_path / "k8s" / "overlays" / "ovh-mks"
    line, components = render.OFFERED[case]
    lines = (overlay / "kustomization.yaml").read_text().splitlines()
    place = next(number for number, one in enumerate(lines) if one.strip() == line)
    lines[place : place + 1] = [f"  - ../../components/{name}" for name in components]
    (overlay / "kustomization.yaml").write_text("\n".join(lines) + "\n")
    m = render.manifests(render.kustomize(overlay))
    assert not lint(m, world)
    (server,) = m.servers
    given = environment(server.containers[0])
    assert given["OCTAVO_API_KEY"]["valueFrom"]["secretKeyRef"]["name"] == "octavo-api-key"
    assert ("OTEL_SERVICE_NAME" in given) == ("otel" in components)
    assert ("OCTAVO_API_KEYS_FILE" in given) == ("api-keys-file" in components)
    assert "OCTAVO_MODEL" not in given and given["HF_HOME"]["value"] == "/models"


def picker_faults(values: Object, m: Manifests, world: World) -> list[str]:
    """Why the endpoint picker would not find the pods, or nothing to go by."""
    pool, extension = values["router"]["modelServers"], values["router"]["epp"]
    (server,) = m.servers
    faults = []
    if not selects({"matchLabels": pool["matchLabels"]}, server.labels):
        faults.append("the pool selects no pods")
    if [port["number"] for port in pool["targetPorts"]] != list(server.ports.values()):
        faults.append("the pool's port is not the container's")
    # The second is the name of the first before llm-d 0.10.
    engines = {server.labels.get(f"{group}/engine-type") for group in ("llm-d.ai", "inference.networking.k8s.io")}
    if engines != {pool["type"]}:
        faults.append("another engine's metrics are expected")
    config = yaml.safe_load(extension["pluginsCustomConfig"].get(extension["pluginsConfigFile"], "{}"))
    known = {plugin.get("name", plugin["type"]) for plugin in at(config, "plugins", default=[])}
    used = {
        plugin["pluginRef"] for profile in at(config, "schedulingProfiles", default=[]) for plugin in profile["plugins"]
    }
    if not used or not used <= known:
        faults.append("a profile names a plug-in that is not there")
    protocol = {"num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"}
    protocol |= {"lora_requests_info"}
    if not {f"vllm:{name}" for name in protocol} <= world.metrics:
        faults.append("a metric of the model-server protocol is missing")
    return faults


def test_endpoint_picker_fits(renderings: dict[str, Manifests], world: World) -> None:
    m = renderings["helm routing"]
    values = yaml.safe_load((render.ADDONS / "epp-values.yaml").read_text())
    assert not picker_faults(values, m, world)
    # The pool has the name of the chart's release, and the picker's pods carry it.
    (backend,) = m.find("HTTPRoute", "octavo")["spec"]["rules"][0]["backendRefs"]
    assert backend == {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "octavo-pool"}
    picker = m.find("NetworkPolicy", "octavo-from-epp")["spec"]["ingress"][0]["from"][0]["podSelector"]
    assert selects(picker, {"llm-d-router-gateway": "octavo-pool-epp"})

    def broken(*path_and_value: object) -> Object:
        *path, value = path_and_value
        bad = copy.deepcopy(values)
        at(bad, *path[:-1])[path[-1]] = value
        return bad

    for bad in (
        broken("router", "modelServers", "matchLabels", "app", "vllm"),
        broken("router", "modelServers", "targetPorts", 0, "number", 8080),
        broken("router", "modelServers", "type", "sglang"),
        broken("router", "epp", "pluginsConfigFile", "other.yaml"),
    ):
        assert picker_faults(bad, m, world)
