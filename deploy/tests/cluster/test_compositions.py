"""Every composition is accepted without a warning, its pods are created and find their nodes."""

import copy
import json

import pytest

import render
from conftest import APPLIED
from control_plane import Api
from manifests import CLUSTER_SCOPED, Object, parse
from processes import until
from test_combinations import SAMPLES, drawn

KUSTOMIZED = {f"kustomize {name}": folder for name, folder in render.KUSTOMIZATIONS.items()}
CHARTS = {f"helm {name}": values for name, values in render.CHARTS.items()}
DRAWN = [f"drawn {seed}" for seed in range(SAMPLES)]


def composition(name: str) -> str | None:
    """The manifests of a composition; None for values that the chart refuses."""
    if folder := KUSTOMIZED.get(name):
        return render.kustomize(folder)
    if name in CHARTS:
        return render.helm(CHARTS[name])
    _, done = drawn(int(name.split()[1]))
    return done.stdout if done.returncode == 0 else None


def moved(objects: list[Object], namespace: str) -> list[Object]:
    """The objects in another namespace, which is there already."""
    found = [copy.deepcopy(it) for it in objects if it["kind"] != "Namespace"]
    for it in found:
        if it["kind"] not in CLUSTER_SCOPED:
            it["metadata"]["namespace"] = namespace
    return found


def level(objects: list[Object]) -> str:
    """The Pod Security level of a composition's own namespace, or that which the chart's page names."""
    for it in objects:
        if it["kind"] == "Namespace":
            return it["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    text = json.dumps(objects)
    return "privileged" if '"hostPath"' in text else "baseline" if '"InferencePool"' in text else "restricted"


def workloads(api: Api, namespace: str) -> list[Object]:
    found = [api.ask(f"/apis/{place}")["items"] for place in (f"apps/v1/namespaces/{namespace}/deployments", f"batch/v1/namespaces/{namespace}/jobs")]
    return [it for items in found for it in items]


def wanted(it: Object) -> int:
    return it["spec"]["replicas"] if "replicas" in it["spec"] else it["spec"]["parallelism"]


def settled(api: Api, namespace: str) -> bool:
    """Whether every workload has as many ready pods as it asks for."""
    return all(it["status"].get("readyReplicas", it["status"].get("ready", 0)) == wanted(it) for it in workloads(api, namespace))


def trouble(api: Api, namespace: str) -> str:
    """What the events of a namespace complain of."""
    events = api.ask(f"/api/v1/namespaces/{namespace}/events")["items"]
    return "\n".join(sorted({it.get("message", "") for it in events if it.get("type") == "Warning"}))


@pytest.mark.parametrize("name", [*KUSTOMIZED, *CHARTS, *DRAWN])
def test_a_composition_runs(name: str, api: Api, namespace, nodes) -> None:
    text = composition(name)
    if text is None:
        return
    # As many pods may have to be on nodes of their own.
    nodes(8, 8, 8, 8)
    objects = parse(text)
    where = namespace(level(objects))
    objects = moved(objects, where)
    api.apply("\n---\n".join(map(json.dumps, objects)), where)
    until(lambda: trouble(api, where), lambda: settled(api, where), limit=90)
    APPLIED["compositions"] += 1
    APPLIED["objects"] += len(objects)
