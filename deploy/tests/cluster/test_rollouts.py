"""Rollouts on exactly as many GPUs as there are replicas, which no pod of a rollout may wait for in vain."""

import pytest

from control_plane import Api
from processes import until
from release import Release
from test_compositions import trouble


@pytest.mark.parametrize(
    ("gpus", "settings"),
    [
        ([2], ["replicas=2"]),
        ([1, 1, 1], ["replicas=3"]),
        ([1, 1, 1], ["replicas=3", "spread.nodes=require"]),
        ([1, 1, 1], ["replicas=3", "spread.zones=true"]),
        ([2, 1], ["replicas=3"]),
        ([1], ["replicas=1", "strategy.type=recreate"]),
        ([1], ["replicas=1", "strategy.type=recreate", "modelCache.type=pvc", "modelCache.accessMode=ReadWriteOnce"]),
        ([1, 1], ["replicas=2", "modelCache.type=clone", "modelCache.preload=job"]),
        # A GPU more than replicas is what this strategy needs.
        ([2, 1], ["replicas=2", "strategy.type=surge"]),
    ],
)
def test_a_rollout_ends(gpus: list[int], settings: list[str], api: Api, namespace, nodes) -> None:
    nodes(*gpus)
    release = Release(api, namespace())
    release.apply(*settings)
    release.finished()
    release.apply(*settings, "image.tag=0.1.1")
    release.finished()
    release.apply(*settings, "image.tag=0.1.1", "config.max-model-len=4096")
    release.finished()
    release.roll_back()
    release.finished()


def test_a_surge_waits_for_a_gpu_that_is_not_there(api: Api, namespace, nodes) -> None:
    """The values say that this strategy needs a GPU more; this is how its lack shows."""
    nodes(1, 1)
    release = Release(api, namespace())
    release.apply("replicas=2", "strategy.type=surge")
    release.finished()
    release.apply("replicas=2", "strategy.type=surge", "image.tag=0.1.1")
    until("a pod waits", lambda: "Insufficient nvidia.com/gpu" in trouble(api, release.namespace))
    assert release.deployment["status"]["readyReplicas"] == 2


def test_a_rollout_goes_round_a_cordoned_node(api: Api, namespace, nodes) -> None:
    nodes(1, 1, 1)
    release = Release(api, namespace())
    release.apply("replicas=2", "spread.nodes=require")
    release.finished()
    pods = api.ask(f"/api/v1/namespaces/{release.namespace}/pods")["items"]
    api.kubectl("cordon", pods[0]["spec"]["nodeName"])
    release.apply("replicas=2", "spread.nodes=require", "image.tag=0.1.1")
    release.finished()
