"""The overlay of OVHcloud's article, applied over running vLLM, and the way back."""

import copy
import json

import pytest

import render
import tools
from conftest import APPLIED
from control_plane import Api
from manifests import Object, parse
from processes import until
from release import rolled_out
from test_compositions import moved, trouble

NAME = "qwen3-vl"
RESTRICTED = "pod-security.kubernetes.io/enforce"


def vllm() -> Object:
    """vLLM under the article's name and selector, as root and with a GPU for each of two replicas."""
    container = {
        "name": "vllm",
        "image": "vllm/vllm-openai:v0.11.0",
        "args": ["--model", "Qwen/Qwen3-VL-8B-Instruct"],
        "ports": [{"containerPort": 8000, "name": "http"}],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "cache", "mountPath": "/root/.cache"}],
    }
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "cache", "emptyDir": {}}]
    strategy = {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    template = {"metadata": {"labels": {"app": NAME}}, "spec": {"containers": [container], "volumes": volumes}}
    spec = {"replicas": 2, "strategy": strategy, "selector": {"matchLabels": {"app": NAME}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": NAME, "labels": {"app": NAME}}, "spec": spec}


class Place:
    """The namespace of the article, changed by plain `kubectl apply`, as the article and our page do."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api, self.namespace = api, namespace

    def apply(self, *objects: Object) -> str:
        """Applies objects; what kubectl warns of."""
        text = "\n---\n".join(map(json.dumps, objects))
        done = self.api.run(tools.KUBECTL, "apply", "-n", self.namespace, "-f", "-", stdin=text)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def overlay(self) -> str:
        """Applies the overlay, its namespace among it; what kubectl warns of."""
        objects = parse(render.kustomize(render.KUSTOMIZATIONS["ovh-mks"]))
        (own,) = [copy.deepcopy(it) for it in objects if it["kind"] == "Namespace"]
        own["metadata"]["name"] = self.namespace
        APPLIED["compositions"] += 1
        APPLIED["objects"] += len(objects)
        return self.apply(own, *moved(objects, self.namespace))

    @property
    def deployment(self) -> Object:
        return self.api.ask(f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{NAME}")

    def images(self) -> list[str]:
        """The images of the server's pods, which are not those of the Job."""
        pods = self.api.ask(f"/api/v1/namespaces/{self.namespace}/pods?labelSelector=app%3D{NAME}")["items"]
        return [it["spec"]["containers"][0]["image"] for it in pods]

    def finished(self) -> None:
        until(lambda: trouble(self.api, self.namespace), lambda: rolled_out(self.deployment), limit=180)


@pytest.fixture
def place(api: Api, namespace, nodes) -> Place:
    """vLLM on both GPUs of a cluster."""
    nodes(1, 1)
    # The article's namespace has no level; vLLM needs no more than this one.
    place = Place(api, namespace("baseline"))
    assert "violate" not in place.apply(vllm())
    place.finished()
    return place


def test_the_overlay_replaces_running_vllm(place: Place) -> None:
    warned = place.overlay()
    assert "existing pods in namespace" in warned and 'violate the new PodSecurity enforce level "restricted' in warned
    labels = place.api.ask(f"/api/v1/namespaces/{place.namespace}")["metadata"]["labels"]
    assert labels[RESTRICTED] == "restricted"
    place.finished()
    assert len(place.images()) == 2 and all("octavo" in image for image in place.images())


def test_vllm_returns_after_relabelling(place: Place) -> None:
    place.overlay()
    place.finished()
    assert "would violate PodSecurity" in place.apply(vllm())
    until("the level refuses the pods of vLLM", lambda: "violates PodSecurity" in trouble(place.api, place.namespace))
    # The rollout has taken one replica away and goes no further; the other serves.
    until("one replica is left", lambda: place.deployment["status"].get("readyReplicas") == 1, limit=120)
    levels = [f"pod-security.kubernetes.io/{mode}=baseline" for mode in ("enforce", "warn", "audit")]
    place.api.kubectl("label", "namespace", place.namespace, "--overwrite", *levels)
    place.finished()
    assert len(place.images()) == 2 and all("vllm" in image for image in place.images())
