"""What operators do to a release: scale it, change it, take features on and off, and meet quotas."""

import json

import pytest

import render
from control_plane import Api, Refused
from processes import until
from release import Release
from test_compositions import trouble

SCALING = ("autoscaling.type=hpa", "metrics.monitor=pod")
PRELOAD = ("modelCache.type=pvc", "modelCache.preload=job")


@pytest.fixture
def release(api: Api, namespace, nodes) -> Release:
    nodes(8, 8)
    return Release(api, namespace())


@pytest.mark.parametrize("scaling", [SCALING, ("autoscaling.type=keda", "metrics.monitor=service")])
def test_an_autoscaler_goes_on_from_the_replicas_that_run(release: Release, scaling: tuple[str, ...]) -> None:
    release.apply("replicas=5")
    release.apply(*scaling, "autoscaling.maxReplicas=8")
    assert release.replicas == 5
    # The autoscaler scales, and another upgrade leaves what it has chosen.
    release.scale(6)
    release.apply(*scaling, "autoscaling.maxReplicas=8", "config.max-num-seqs=64")
    assert release.replicas == 6
    release.runs()


def test_turning_an_autoscaler_off_takes_the_replicas_back(release: Release) -> None:
    release.apply("replicas=3")
    release.apply(*SCALING)
    release.scale(4)
    with pytest.raises(Refused, match="spec.replicas"):
        release.apply("replicas=2")
    release.apply("replicas=2", force=True)
    assert release.replicas == 2


def test_scaling_by_hand_conflicts_with_an_upgrade(release: Release) -> None:
    release.apply("replicas=2")
    release.scale(3)
    with pytest.raises(Refused, match="spec.replicas"):
        release.apply("replicas=2")
    assert release.replicas == 3
    release.apply("replicas=3")
    release.scale(4)
    release.apply("replicas=2", force=True)
    assert release.replicas == 2


def test_a_configuration_changes_while_the_job_is_there(release: Release) -> None:
    release.apply(*PRELOAD)
    before = release.names("/apis/batch/v1/jobs")
    assert len(before) == 1
    release.apply(*PRELOAD, "config.max-model-len=4096")
    assert release.names("/apis/batch/v1/jobs") == before
    release.apply(*PRELOAD, "model=Qwen/Qwen3-0.6B")
    after = release.names("/apis/batch/v1/jobs")
    assert len(after) == 1 and after != before
    release.runs()
    release.roll_back()
    assert release.names("/apis/batch/v1/jobs") == before


@pytest.mark.parametrize("preload", ["none", "init", "job"])
def test_a_quota_on_processors_is_met_by_a_limit(release: Release, preload: str) -> None:
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"limits.cpu": "100"}}}
    release.api.ask(f"/api/v1/namespaces/{release.namespace}/resourcequotas", "POST", quota)
    cache = ("modelCache.type=pvc", f"modelCache.preload={preload}")
    release.apply(*cache)
    until("the quota refuses the pods", lambda: "must specify limits.cpu" in trouble(release.api, release.namespace))
    assert release.names("/api/v1/pods") == set()
    release.apply(*cache, "resources.limits.cpu=16")
    release.runs()


def test_a_claim_grows_and_does_not_shrink(release: Release) -> None:
    claim = ("modelCache.type=pvc",)
    release.apply(*claim, "modelCache.size=100Gi")
    release.apply(*claim, "modelCache.size=200Gi")
    before = release.object("/api/v1/persistentvolumeclaims/octavo-models")
    assert before["spec"]["resources"]["requests"]["storage"] == "200Gi"
    revision = release.deployment["metadata"]["generation"]
    for refused, reason in (("modelCache.size=50Gi", "cannot shrink"), ("modelCache.storageClassName=slow", "cannot change")):
        with pytest.raises(Refused, match=reason):
            release.apply(*claim, "modelCache.size=200Gi", refused, "model=a/b")
    assert release.deployment["metadata"]["generation"] == revision


def test_a_claim_keeps_its_access_mode(release: Release) -> None:
    release.apply("modelCache.type=pvc")
    revision = release.deployment["metadata"]["generation"]
    with pytest.raises(Refused, match="access mode ReadWriteOnce.*cannot change.*modelCache.existingClaim"):
        release.apply("modelCache.type=clone", "model=a/b")
    assert release.deployment["metadata"]["generation"] == revision


def test_a_release_passes_through_every_set_of_values(api: Api, namespace) -> None:
    """Nothing that a set of values adds or takes away is in the way of the next."""
    # A set with a folder of the node is not for the restricted level.
    release = Release(api, namespace("privileged"))
    for name, values in [*render.CHARTS.items(), *reversed(render.CHARTS.items())]:
        # The claim of one cannot become that of another, and the autoscaler's number is taken back.
        other = [f"modelCache.existingClaim={name}"] if values and "type: pvc" in values.read_text() else []
        release.apply(*other, values=values, force=True)
        spec = release.deployment["spec"]["template"]["spec"]
        assert spec["containers"][0]["name"] == "octavo", json.dumps(spec)


def test_a_failed_installation_leaves_nothing(release: Release) -> None:
    for bad in ("fullnameOverride=a.b", "service.port=65536", "resources.limits.memory=1Gi", "extraEnv[0].name=HF_HOME,extraEnv[0].value=x"):
        with pytest.raises(Refused):
            release.apply(bad)
    assert "octavo" not in release.api.helm("list", "-q", "-n", release.namespace)
